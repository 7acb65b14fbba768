"""What devices of one model group say to each other. Every collective of a forward is one of these.

With one shard each is the identity or absent, so a program of one device has no trace of them. None runs over the axis "data":
groups may run different numbers of rounds.
"""

import functools
import math
from typing import TypeVar

import jax
import jax.numpy as jnp

from eagle_jax.parallel.mesh import MODEL

Tree = TypeVar("Tree")


def shard_index() -> jax.Array:
    """Which shard of its group this device is, int32 scalar."""
    return jax.lax.axis_index(MODEL)


def sum_over_shards(x: jax.Array, shards: int, in_order: bool = False) -> jax.Array:
    """The sum of every shard's `x`, on all of them: ends row-parallel products and vocabulary-parallel lookups.

    An all-reduce may add in an order that depends on where in the array an element is. `in_order` adds shard by shard, for
    programs that must give a row the same bits wherever it stands; more bytes travel.
    """
    if shards == 1:
        return x
    if in_order:
        every = gather_over_shards(x, shards)
        return functools.reduce(jnp.add, [every[shard] for shard in range(shards)])
    with jax.named_scope("sum_over_shards"):
        return jax.lax.psum(x, MODEL)


def max_over_shards(x: jax.Array, shards: int) -> jax.Array:
    """The largest of every shard's `x`, element by element."""
    return x if shards == 1 else jax.lax.pmax(x, MODEL)


def gather_over_shards(x: jax.Array, shards: int) -> jax.Array:
    """Every shard's `x`, in the order of the shards: `[shards, ...]`."""
    if shards == 1:
        return x[None]
    with jax.named_scope("gather_over_shards"):
        return jax.lax.all_gather(x, MODEL)


def from_first_shard(tree: Tree, shards: int) -> Tree:
    """Integers of the first shard on all of them, in one collective.

    Where every shard computes the same thing for itself, a last digit that differs would let them decide differently, and wait
    for each other for ever. What steers control flow goes through here.
    """
    if shards == 1:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    flat = jnp.concatenate([leaf.reshape(-1).astype(jnp.int32) for leaf in leaves])
    flat = jax.lax.psum(jnp.where(shard_index() == 0, flat, 0), MODEL)
    ends = [0]
    for leaf in leaves:
        ends.append(ends[-1] + math.prod(leaf.shape))
    parts = [
        flat[low:high].reshape(leaf.shape).astype(leaf.dtype)
        for leaf, low, high in zip(leaves, ends[:-1], ends[1:], strict=True)
    ]
    return jax.tree.unflatten(structure, parts)
