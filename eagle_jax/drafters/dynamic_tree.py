"""EAGLE-2's dynamic tree (https://arxiv.org/abs/2406.16858) in static shapes; a chain is its case of one child a node."""

import jax
import jax.numpy as jnp

from eagle_jax.drafters.base import DraftView
from eagle_jax.drafters.head_steps import HeadSteps
from eagle_jax.drafters.tree import ROOT_PARENT, DraftTree, TreeConfig
from eagle_jax.models.cache import KVCache


def grow_dynamic_tree(
    head: HeadSteps, config: TreeConfig, view: DraftView, cache: KVCache, last: jax.Array
) -> DraftTree:
    """Expands the best nodes level by level inside one `lax.scan`, then keeps the best of all.

    Every node that was scored is numbered in creation order: the root's children first, then each level's, parent by parent in
    descending score. This pool has `config.pool_size` nodes.

    Args:
      head: runs the head.
      config: shape of the tree.
      view: gives roots and committed lengths.
      cache: draft cache after the extend step.
      last: the head's output of each slot's last row, `[B, 1, h]`.
    """
    k, depth, batch = config.top_k, config.depth, last.shape[0]
    scores, ids = (x[:, 0] for x in head.best(last, k, view, 0))  # [B, k]
    # M: every expanded node leaves a row in the tail. A scan over no level is traced all the same, hence never 0.
    rows = max(depth, 1) * k
    own = jnp.arange(rows, dtype=jnp.int32)
    frontier = jnp.arange(k, dtype=jnp.int32)

    def expand(
        carry, level
    ):  # run the frontier's k nodes, score their k * k children, keep the k best as next frontier
        tokens, scores, hidden, seen, tail = carry
        offset = level * k
        seen = seen | (own == (offset + frontier)[:, None])  # [B, k, M]
        out, tail = head.step(view, cache, tokens, hidden, level, tail, offset, seen, own // k)
        steps, ids = head.best(out, k, view, level + 1)  # [B, k, k]
        children = (scores[..., None] + steps).reshape(batch, k * k)
        ids = ids.reshape(batch, k * k)
        scores, best = jax.lax.top_k(children, k)  # ties to the lower index
        parent = best // k
        carry = (
            jnp.take_along_axis(ids, best, axis=1),
            scores,
            jnp.take_along_axis(out, parent[..., None], axis=1),
            jnp.take_along_axis(seen, parent[..., None], axis=1),
            tail,
        )
        return carry, (ids, children, k + level * k * k + best)

    start = (
        ids,
        scores,
        jnp.repeat(last, k, axis=1),
        jnp.zeros((batch, k, rows), bool),
        head.empty_tail(batch, rows),
    )
    _, (tokens, children, chosen) = jax.lax.scan(expand, start, jnp.arange(depth, dtype=jnp.int32))
    # The nodes that each level expanded, `[depth, B, k]`: the root's children, then what the level before had chosen.
    expanded = jnp.concatenate([jnp.broadcast_to(frontier, (1, batch, k)), chosen])[:depth]

    def in_order(first: jax.Array, later: jax.Array) -> jax.Array:
        return jnp.concatenate([first, later.swapaxes(0, 1).reshape(batch, depth * k * k)], axis=1)

    parents = in_order(jnp.full((batch, k), ROOT_PARENT, jnp.int32), jnp.repeat(expanded, k, axis=2))
    return keep_best(config, view.roots, in_order(ids, tokens), in_order(scores, children), parents)  # [B, pool] each


def keep_best(
    config: TreeConfig, roots: jax.Array, tokens: jax.Array, scores: jax.Array, parents: jax.Array
) -> DraftTree:
    """The tree of the best `total_tokens - 1` nodes of a pool, in creation order.

    Args:
      config: shape of the tree.
      roots: int32 `[B]`.
      tokens: of every node that was scored, int32 `[B, pool_size]` in creation order, as for the next two.
      scores: float32; a child's never exceeds its parent's.
      parents: place of each node's parent in the pool, `ROOT_PARENT` for the root's children, int32.
    """
    k, batch = config.top_k, tokens.shape[0]
    # A child never outranks its parent, and top_k prefers the lower index, so every kept node's parent is kept.
    kept = jnp.sort(jax.lax.top_k(scores, config.total_tokens - 1)[1], axis=1)
    place = jnp.zeros(tokens.shape, jnp.int32)  # node index of each kept pool node
    place = place.at[jnp.arange(batch)[:, None], kept].set(jnp.arange(1, config.total_tokens, dtype=jnp.int32))
    parent = jnp.take_along_axis(parents, kept, axis=1)
    parent = jnp.where(parent < 0, 0, jnp.take_along_axis(place, jnp.maximum(parent, 0), axis=1))
    return DraftTree.with_root(
        roots,
        tokens=jnp.take_along_axis(tokens, kept, axis=1),
        parents=parent,
        depths=jnp.where(kept < k, 1, 2 + (kept - k) // (k * k)),
        scores=jnp.take_along_axis(scores, kept, axis=1),
    )
