"""How much memory a model takes, from its configuration alone."""

import math

import jax.numpy as jnp
from flax import nnx

from eagle_jax.models import DraftConfig, DraftHead, Llama, LlamaConfig, make_head

Config = LlamaConfig | DraftConfig


def weight_bytes(config: Config, dtype: jnp.dtype | str) -> int:
    """Bytes of the weights of a target or a draft head in that dtype, over all devices; the vocabulary map is included."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in _variables(config, jnp.dtype(dtype)))


def parameter_count(config: Config) -> int:
    """Number of trained values in a target or a draft head: tied embeddings count once, the vocabulary map does not."""
    return sum(math.prod(v.shape) for v in _variables(config, jnp.dtype("float32")) if isinstance(v, nnx.Param))


def cache_bytes_per_row(config: Config, dtype: jnp.dtype | str, shards: int = 1) -> int:
    """Bytes of keys and values of one token of one slot, over all layers, on one of the devices that share the heads."""
    return sum(spec.kv.values(shards) for spec in config.layers) * jnp.dtype(dtype).itemsize


def _variables(config: Config, dtype: jnp.dtype) -> list[nnx.Variable]:
    def build() -> Llama | DraftHead:
        if isinstance(config, LlamaConfig):
            return Llama(config, dtype=dtype, rngs=nnx.Rngs(0))
        return make_head(config, dtype=dtype, rngs=nnx.Rngs(0))

    state = nnx.state(nnx.eval_shape(build))
    return [variable for _, variable in nnx.to_flat_state(state)]
