"""Modules with given weights, split over the devices of a mesh."""

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from eagle_jax.models import DraftHead, Llama, make_head
from eagle_jax.models.config import LlamaConfig
from eagle_jax.parallel.mesh import model_shards
from eagle_jax.parallel.partition import module_sharding, stored_order


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
    place, filled = module_sharding(mesh, shards), []
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        axes, values = variable.get_metadata("axes"), np.asarray(variable.get_value())
        values = stored_order(axes[0], values, config, shards)
        filled.append((path, variable.replace(jax.device_put(values, place(axes)))))
    return nnx.merge(graph, nnx.from_flat_state(filled))
