"""Models to measure: published geometries by name or from a config.json, with random weights made on the device."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from eagle_jax.models import DraftConfig, DraftHead, Llama, LlamaConfig, make_head
from eagle_jax.models.eagle_config import default_capture_layers
from eagle_jax.parallel.mesh import model_shards
from eagle_jax.parallel.partition import module_sharding

_LLAMA_3: dict[str, Any] = {
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}

PUBLISHED: dict[str, LlamaConfig] = {
    "SmolLM2-135M": LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        head_dim=64, vocab_size=49152, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
    ),
    "Llama-3.2-1B": LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, head_dim=64,
        tie_word_embeddings=True, **_LLAMA_3,
    ),
    "Llama-3.2-3B": LlamaConfig(
        hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, head_dim=128,
        tie_word_embeddings=True, **_LLAMA_3,
    ),
    "Llama-3.1-8B": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, head_dim=128, **_LLAMA_3,
    ),
    "Llama-3.3-70B": LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, head_dim=128, **_LLAMA_3,
    ),
}  # fmt: skip
"""Geometries by the name of a model; rotary scaling is left out, which costs nothing."""

SHORT_NAMES = {name.rpartition("-")[2]: name for name in PUBLISHED}
"""The sizes alone: "8B" and so on."""

DRAFT_VOCAB_SIZE = 32000
"""Of the published EAGLE-3 heads of large targets; where it exceeds a third of the target's, a third."""


def find_geometry(name: str) -> tuple[str, LlamaConfig]:
    """A published geometry by its name or size, or the one in a config.json (or the folder of one).

    Raises:
      ValueError: neither.
    """
    by_lower = {known.lower(): full for known, full in [*SHORT_NAMES.items(), *((n, n) for n in PUBLISHED)]}
    if full := by_lower.get(name.lower()):
        return full, PUBLISHED[full]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file() and path.suffix == ".json":
        return name, LlamaConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
    known = ", ".join(f"{full} ({short})" for short, full in SHORT_NAMES.items())
    raise ValueError(f"{name!r} is neither a config.json nor a published geometry; known are {known}")


def eagle3_head_of(target: LlamaConfig) -> DraftConfig:
    """The geometry of an EAGLE-3 head for a target: one layer of the target's width, a reduced vocabulary."""
    return DraftConfig(
        method="eagle3",
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=min(DRAFT_VOCAB_SIZE, max(1, target.vocab_size // 3)),
        capture_layers=_capture_layers(target.num_hidden_layers),
        rms_norm_eps=target.rms_norm_eps,
    )


def _capture_layers(layers: int) -> tuple[int, ...]:
    try:
        return default_capture_layers(layers)
    except ValueError:  # a shallow target: any three states cost the same
        return tuple(sorted({0, layers // 2, layers}))


def random_target(config: LlamaConfig, dtype: jnp.dtype, mesh: Mesh | None = None) -> Llama:
    """A target with random weights, made on the default device, or on those of a mesh, one array at a time."""
    shards = model_shards(mesh)
    return _random(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0), shards=shards), mesh, shards)


def random_head(config: DraftConfig, dtype: jnp.dtype, mesh: Mesh | None = None, shards: int = 1) -> DraftHead:
    """A draft head with random weights, over as many shards; see `random_target`."""
    return _random(lambda: make_head(config, dtype=dtype, rngs=nnx.Rngs(0), shards=shards), mesh, shards)


def _weights(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.arange(shape[0], dtype=dtype)  # a vocabulary map
    if len(shape) == 1:
        return jnp.ones(shape, dtype)  # a norm, or a bias
    return 0.02 * jax.random.normal(jax.random.key(seed), shape, dtype)


@functools.cache
def _maker(sharding: NamedSharding | None) -> Any:
    return jax.jit(_weights, static_argnums=(1, 2), out_shardings=sharding)


def _random(make: Any, mesh: Mesh | None, shards: int) -> Any:
    graph, abstract = nnx.split(nnx.eval_shape(make))
    place = None if mesh is None else module_sharding(mesh, shards)
    filled = []
    for seed, (path, variable) in enumerate(nnx.to_flat_state(abstract)):
        shape = variable.get_value()
        maker = _maker(None if place is None else place(variable.get_metadata("axes")))
        filled.append((path, variable.replace(maker(seed, shape.shape, jnp.dtype(shape.dtype)))))
    return nnx.merge(graph, nnx.from_flat_state(filled))
