"""Tiny models: small enough to compile in a second, with vocabularies so small that random heads are often right."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax.models import DraftConfig, DraftHead, Eagle3Head, EagleHead, Llama, LlamaConfig
from eagle_jax.models.module_def import ModuleDef


def llama_config(**changes: Any) -> LlamaConfig:
    """Two layers, grouped queries, a vocabulary of 7."""
    settings = {
        "vocab_size": 7,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
    }
    return LlamaConfig(**(settings | changes))


def draft_config(target: LlamaConfig, **changes: Any) -> DraftConfig:
    """A head of one layer that reads all hidden states of a two-layer target."""
    settings = {
        "method": "eagle3",
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": 40,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "capture_layers": (0, 1, 2),
    }
    return DraftConfig(**(settings | changes))


@functools.cache
def _abstract(kind: type, config: Any, dtype: Any) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: kind(config, dtype=dtype, rngs=nnx.Rngs(0))))


def _random(kind: type, config: Any, seed: int, dtype: Any, gain: float) -> Any:
    graph, shapes = _abstract(kind, config, dtype)
    rng = np.random.default_rng(seed)
    leaves = []
    for path, leaf in nnx.to_flat_state(shapes):
        abstract, name = leaf.get_value(), path[-1]
        shape = abstract.shape
        if name == "vocabulary":
            # Ascending and with gaps, as checkpoints have it, but not the first ids.
            value = np.sort(rng.permutation(config.vocab_size)[: shape[0]]).astype(np.int32)
        elif name == "bias":
            value = 0.3 * rng.standard_normal(shape)
        elif len(shape) == 1:
            value = 1 + 0.3 * rng.standard_normal(shape)  # a norm
        else:
            value = (1.0 if "embed" in path else gain * shape[-1] ** -0.5) * rng.standard_normal(shape)
        leaves.append((path, leaf.replace(jnp.asarray(value, abstract.dtype))))
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def random_llama(config: LlamaConfig, seed: int, *, dtype: Any = jnp.float32, gain: float = 1.5) -> Llama:
    """A target with random weights. Models of one configuration share their compiled programs, whatever the seed."""
    return _random(Llama, config, seed, dtype, gain)


def random_head(config: DraftConfig, seed: int, *, dtype: Any = jnp.float32, gain: float = 1.5) -> DraftHead:
    """A head of the configuration's method with random weights."""
    return _random(Eagle3Head if config.method == "eagle3" else EagleHead, config, seed, dtype, gain)


def abstract_state(module_type: type, config: Any, dtype: Any) -> tuple[Any, Any]:
    """Definition and parameters' shapes of a module, as plans and weights hold them; no memory is taken."""
    return ModuleDef.split(nnx.eval_shape(lambda: module_type(config, dtype=dtype, rngs=nnx.Rngs(0))))


def place(tree: Any, sharding: Any) -> Any:
    """A pytree of shapes with a sharding on every leaf."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
