"""What of weights and state each device of a mesh has, and programs that run on all of them at once.

A whole program is one `jax.shard_map`: the modules in it see the arrays of one device, and speak to the other devices of their
model group through `eagle_jax.parallel.collectives` alone. Slots are split over the groups, which share nothing: each decodes its
own until it is done.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafters.base import Memory
from eagle_jax.parallel.mesh import DATA, MODEL, data_groups

Result = TypeVar("Result")


def spread(body: Callable[..., Result], mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable[..., Result]:
    """`body` on the arrays of each device; `body` itself without a mesh.

    Arrays without elements, such as what a state has of a head that is not there, are made on each device: jax 0.11.2 compiles no
    `shard_map` that takes one (its partitioner ends the process).
    """
    if mesh is None:
        return body

    def run(*arguments: Any) -> Result:
        leaves, structure = jax.tree.flatten(arguments)
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, arguments))
        given = [i for i, leaf in enumerate(leaves) if np.size(leaf)]

        def with_empty(*arrays: jax.Array) -> Result:
            own = dict(zip(given, arrays, strict=True))
            for i in range(len(leaves)):
                if i not in own:
                    shape = NamedSharding(mesh, specs[i]).shard_shape(leaves[i].shape)
                    own[i] = jnp.zeros(shape, leaves[i].dtype)
            return body(*jax.tree.unflatten(structure, [own[i] for i in range(len(leaves))]))

        taken = tuple(specs[i] for i in given)
        mapped = jax.shard_map(with_empty, mesh=mesh, in_specs=taken, out_specs=out_specs, check_vma=False)
        return mapped(*(leaves[i] for i in given))

    return run


def state_specs(state: DecodeState, shards: int, memory: Memory) -> DecodeState:
    """How a state is split: slots over the groups, heads of the cache and what runs over the vocabulary over the shards; `memory`
    are the specs of the drafter's."""

    def of(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        names = [getattr(key, "name", None) for key in path]
        split = shards > 1 and ("target_cache" in names or "history" in names or "bias" in names)
        if not leaf.ndim or "costs" in names:
            # Of the whole group; between dispatches each device keeps what it had.
            return PartitionSpec()
        return PartitionSpec(DATA, MODEL) if split else PartitionSpec(DATA)

    specs = jax.tree_util.tree_map_with_path(of, dataclasses.replace(state, draft=()))
    return dataclasses.replace(specs, draft=memory)


def placed(shapes: Any, specs: Any, mesh: Mesh | None) -> Any:
    """Shapes with the shardings that programs take; as they are without a mesh."""
    if mesh is None:
        return shapes
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), shapes, specs
    )


def everywhere(values: Any, mesh: Mesh | None) -> Any:
    """Values of the host as shapes that lie whole on every device; as they are without a mesh."""
    if mesh is None:
        return values
    return placed(values, jax.tree.map(lambda _: PartitionSpec(), values), mesh)


def own_group(values: Any, mesh: Mesh | None) -> Any:
    """Inside a program: this group's entry of arrays `[groups, ...]`; the arrays themselves where there is one group."""
    if data_groups(mesh) == 1:
        return values
    group = jax.lax.axis_index(DATA)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, group, keepdims=False), values)


def only_if(active: jax.Array, new: DecodeState, old: DecodeState, memory: Memory) -> DecodeState:
    """`new` where `active` (bool scalar), else `old`, but in any case the cache of `new` and the drafter's `memory`."""
    # With the same arrays on both sides nothing is chosen for these.
    old = dataclasses.replace(old, target_cache=new.target_cache, draft=memory)
    new = dataclasses.replace(new, draft=memory)
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(active, a, b), new, old)
