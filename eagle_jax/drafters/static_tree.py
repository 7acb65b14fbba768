"""EAGLE-1's static trees: the same paths every round, given by the rank of each child among the head's guesses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.drafters.base import Drafts, DraftView
from eagle_jax.drafters.head_steps import HeadSteps
from eagle_jax.drafters.tree import DraftTree, StaticTree
from eagle_jax.models.cache import KVCache


def grow_static_tree(
    head: HeadSteps, config: StaticTree, view: DraftView, cache: KVCache, last: jax.Array
) -> DraftTree:
    """Fills a static tree level by level; only nodes with children are run. Arguments as `grow_dynamic_tree`.

    Levels differ in width, so they are unrolled: a static tree is a handful of levels.
    """
    parents, depths, ranks = config.parents, config.depths, config.ranks
    batch, nodes = last.shape[0], config.total_tokens
    inner = sorted(set(parents[1:].tolist()) - {0})  # expanded nodes but the root, level by level
    row_of = {node: row for row, node in enumerate(inner)}
    tail_levels = jnp.asarray(depths[inner] - 1, jnp.int32)
    # Ancestors among the expanded nodes, themselves included, `[N, M]`.
    seen = np.zeros((nodes, len(inner)), bool)
    for node in inner:
        seen[node] = seen[parents[node]]
        seen[node, row_of[node]] = True

    tokens: list[jax.Array] = [view.roots] * nodes  # [B] each
    scores: list[jax.Array] = [jnp.zeros((batch,), jnp.float32)] * nodes
    tail = head.empty_tail(batch, len(inner))
    expanded, out = [0], last
    proposals: list[jax.Array] = [jnp.zeros((batch, head.head.config.draft_vocab_size), jnp.float32)] * nodes
    for level in range(config.max_depth):
        children = [node for node in range(1, nodes) if depths[node] == level + 1]
        count = int(ranks[children].max()) + 1
        if head.drafts is Drafts.SAMPLED and view.settings is not None:
            steps, ids, drawn_from = head.sample(out, count, view, expanded)  # [B, T, k], [B, T, Vd]
            for row, node in enumerate(expanded):
                proposals[node] = drawn_from[:, row]
        else:
            steps, ids = head.best(out, count, view, level)  # [B, T, k]
        for node in children:
            row = expanded.index(parents[node])
            tokens[node] = ids[:, row, ranks[node]]
            scores[node] = scores[parents[node]] + steps[:, row, ranks[node]]
        following = [node for node in children if node in row_of]
        if not following:
            break
        above = np.array([expanded.index(parents[node]) for node in following])
        out, tail = head.step(
            view,
            cache,
            jnp.stack([tokens[node] for node in following], axis=1),
            out[:, above],
            level,
            tail,
            row_of[following[0]],
            jnp.broadcast_to(jnp.asarray(seen[following]), (batch, len(following), len(inner))),
            tail_levels,
        )
        expanded = following

    def everywhere(values: np.ndarray) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(values[1:], jnp.int32), (batch, nodes - 1))

    tree = DraftTree.with_root(
        view.roots,
        tokens=jnp.stack(tokens[1:], axis=1),
        parents=everywhere(parents),
        depths=everywhere(depths),
        scores=jnp.stack(scores[1:], axis=1),
    )
    if head.drafts is not Drafts.SAMPLED or view.settings is None:
        return tree
    probabilities = head.over_target_ids(jnp.stack(proposals, axis=1))
    return dataclasses.replace(tree, probabilities=probabilities, shape=config)
