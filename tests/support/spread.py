"""Modules with given weights, split over the devices of a mesh."""

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle_jax.decoding.placement import path_name
from eagle_jax.models import DraftHead, Llama, make_head
from eagle_jax.models.config import LlamaConfig
from eagle_jax.parallel.mesh import model_shards
from eagle_jax.parallel.partition import partition_spec, stored_order


def spread_module(module: Any, mesh: Mesh | None, shards: int | None = None) -> Any:
    """The module over the mesh's shards, or with `shards` 1 whole on every device."""
    if mesh is None:
        return module
    config, shards = module.config, model_shards(mesh) if shards is None else shards

    def build() -> Llama | DraftHead:
        if isinstance(config, LlamaConfig):
            return Llama(config, dtype=module.dtype, rngs=nnx.Rngs(0), shards=shards)
        return make_head(config, dtype=module.dtype, rngs=nnx.Rngs(0), shards=shards)

    graph, _ = nnx.split(nnx.eval_shape(build))

    def place(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        name = path_name(path)
        values = np.asarray(leaf)
        if name.rpartition(".")[2] in ("weight", "bias"):
            values = stored_order(name, values, config, shards)
        return jax.device_put(values, NamedSharding(mesh, partition_spec(name) if shards > 1 else PartitionSpec()))

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(place, nnx.state(module)))
