"""A loaded head drafting a greedy chain, by its modules alone: what is compared with `support.torch_heads`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax import Draft, Target
from eagle_jax.models import DraftContext

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiled once and run a few times: compiling is the whole cost."""


@functools.cache
def _program(graph: Any, known: int, compiler_options: tuple = tuple(QUICK.items())) -> Any:
    def run(weights: Any, lm_head: jax.Array, embedded: jax.Array, features: jax.Array, fed_back: jax.Array, row: int):
        head = nnx.merge(graph, weights)
        rows = len(embedded)
        hidden = jnp.where((jnp.arange(rows) < known)[:, None], head.fuse(features), fed_back)
        context = DraftContext(jnp.arange(rows)[None], head.empty_cache(1, 8), jnp.zeros((1,), jnp.int32))
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
