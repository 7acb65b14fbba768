"""A loaded head drafting a greedy chain, by its modules alone: what is compared with `support.torch_heads`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax import Draft, Target
from eagle_jax.models import CacheContext, DraftHead, KVCache, KVRows

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiled once and run a few times: compiling is the whole cost."""


@functools.cache
def _program(graph: Any, known: int, compiler_options: tuple = tuple(QUICK.items())) -> Any:
    def run(weights: Any, lm_head: jax.Array, embedded: jax.Array, features: jax.Array, fed_back: jax.Array, row: int):
        head = nnx.merge(graph, weights)
        rows = len(embedded)
        hidden = jnp.where((jnp.arange(rows) < known)[:, None], head.fuse(features), fed_back)
        context = CacheContext(jnp.arange(rows)[None], head.empty_cache(1, 8), jnp.zeros((1,), jnp.int32))
        out, _ = head(embedded[None], hidden[None], context)
        last = jax.lax.dynamic_slice_in_dim(out, row, 1, axis=1)
        if head.config.own_lm_head:
            logits = head.logits(last)
        else:
            logits = head.before_lm_head(last).astype(jnp.float32) @ lm_head.astype(jnp.float32).T
        return last[0, 0], jax.nn.log_softmax(logits[0, 0])

    return jax.jit(run, compiler_options=dict(compiler_options))


def chain(
    target: Target, draft: Draft, tokens: list[int], features: np.ndarray, depth: int
) -> tuple[list[np.ndarray], list[int]]:
    """Log-probabilities behind a greedy chain and the drafted ids, as `TorchHead.chain`.

    Rows that are not yet known are computed on zeros; attention is causal, so that nothing sees them.
    """
    head, known = draft.head, len(tokens) - 1
    graph, weights = nnx.split(head)
    run = _program(graph, known)
    embedding = (target.model.embed if head.embed is None else head.embed).weight[...]
    lm_head = (target.model.embed if target.model.lm_head is None else target.model.lm_head).weight[...]
    rows = known + depth - 1
    padded = np.zeros((rows, features.shape[1]), np.float32)
    padded[:known] = features
    ids, fed_back = np.zeros(rows, np.int32), np.zeros((rows, draft.config.hidden_size), np.float32)
    ids[:known] = tokens[1:]
    out, drafted = [], []
    for level in range(depth):
        row = known - 1 + level
        hidden, log_probs = run(
            weights, lm_head, embedding[ids].astype(head.dtype), padded, fed_back.astype(head.dtype), row
        )
        out.append(np.asarray(log_probs))
        drafted.append(int(head.target_ids(jnp.argmax(log_probs))))
        if level + 1 < depth:
            ids[row + 1], fed_back[row + 1] = drafted[-1], np.asarray(hidden, np.float32)
    return out, drafted


CHUNK = 4


@functools.cache
def _cached_programs(graph: Any, rows: int) -> tuple[Any, Any]:
    """Programs that encode CHUNK rows into the draft cache, and that run one row of a chain in a tail of `rows` rows."""

    def extend(weights: Any, embedded: jax.Array, features: jax.Array, cache: KVCache, lengths: jax.Array) -> Any:
        head = nnx.merge(graph, weights)
        positions = lengths[:, None] + jnp.arange(CHUNK)
        out, new = head(embedded, head.fuse(features), CacheContext(positions, cache, lengths))
        return out[:, -1:], cache.write(new, lengths)

    def step(
        weights: Any, embedded: jax.Array, hidden: jax.Array, cache: KVCache, lengths: jax.Array, tail: Any, depth: int
    ) -> Any:
        head = nnx.merge(graph, weights)
        context = CacheContext(
            positions=lengths[:, None] + depth,
            cache=cache,
            lengths=lengths,
            tail=tail,
            tail_offset=depth,
            tail_mask=(jnp.arange(rows) <= depth)[None, None],
            tail_positions=lengths[:, None] + jnp.arange(rows),
        )
        return head(embedded, hidden, context)

    return jax.jit(extend, compiler_options=QUICK), jax.jit(step, compiler_options=QUICK)


def cached_chain(
    head: DraftHead,
    embedding: np.ndarray,
    lm_head: np.ndarray,
    tokens: list[int],
    features: np.ndarray,
    depth: int,
) -> list[np.ndarray]:
    """Log-probabilities of a greedy chain as decoding runs it: known rows in chunks into a cache, drafts in a tail behind it.

    Args:
      head: the head.
      embedding: the target's table, for heads without their own.
      lm_head: the target's output head, likewise.
      tokens: the known tokens and the root, T + 1; T must be a multiple of CHUNK.
      features: captured states of the T known tokens, `[T, n * H]`.
      depth: how many tokens are drafted. The tail has two rows more than that.
    """
    table = jnp.asarray(embedding if head.embed is None else head.embed.weight[...], head.dtype)
    graph, weights = nnx.split(head)
    rows = depth + 2
    extend, step = _cached_programs(graph, rows)
    known = len(features)
    cache, lengths = head.empty_cache(1, known + CHUNK), jnp.zeros((1,), jnp.int32)
    for start in range(0, known, CHUNK):
        embedded = table[jnp.asarray(tokens[start + 1 : start + CHUNK + 1])][None]
        part = jnp.asarray(features[None, start : start + CHUNK], jnp.float32)
        hidden, cache = extend(weights, embedded, part, cache, lengths)
        lengths = lengths + CHUNK
    empty = head.empty_cache(1, rows)
    tail, out = KVRows(empty.keys, empty.values), []
    for level in range(depth):
        if head.config.own_lm_head:
            logits = head.logits(hidden)
        else:
            logits = head.before_lm_head(hidden).astype(jnp.float32) @ jnp.asarray(lm_head, jnp.float32).T
        out.append(np.asarray(jax.nn.log_softmax(logits[0, 0])))
        drafted = head.target_ids(jnp.argmax(out[-1]))
        if level + 1 < depth:
            hidden, tail = step(weights, table[drafted][None, None], hidden, cache, lengths, tail, level)
    return out
