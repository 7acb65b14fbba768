"""Parts of a round, each repeated inside a program of its own, so that no dispatch is counted.

Every repetition depends on the one before, in ways that the compiler cannot see through; otherwise it would run a part once.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.decoding.accept import accept
from eagle_jax.decoding.commit import commit
from eagle_jax.decoding.plan import Plan, Weights
from eagle_jax.decoding.state import DecodeState
from eagle_jax.decoding.verify import TargetOutput, verify
from eagle_jax.drafters.base import Drafter, Outcome
from eagle_jax.drafters.dynamic_tree import keep_best
from eagle_jax.drafters.tree import ROOT_PARENT, DraftTree, StaticTree, TreeConfig, ancestor_mask
from eagle_jax.engine.calibration import step_seconds
from eagle_jax.models.cache import KVRows
from eagle_jax.models.llama import Llama

LEAST_SECONDS = 0.2
"""A measured loop takes at least so long where its steps may be chosen."""
MOST_STEPS = 4096


def some_tree(tree: TreeConfig | StaticTree, slots: int) -> DraftTree:
    """A tree of the right shape for every slot: level by level, each level as wide as `top_k` allows."""
    if isinstance(tree, StaticTree):
        parents = tree.parents
    else:
        parents = np.maximum(np.arange(tree.total_tokens) - tree.top_k, 0)
        parents[0] = ROOT_PARENT
    depths = np.zeros_like(parents)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    shape = (slots, len(parents))
    return DraftTree(
        tokens=jnp.zeros(shape, jnp.int32),
        parents=jnp.broadcast_to(jnp.asarray(parents, jnp.int32), shape),
        depths=jnp.broadcast_to(jnp.asarray(depths, jnp.int32), shape),
        scores=jnp.zeros(shape, jnp.float32),
    )


def propose_loop(
    plan: Plan, tree: TreeConfig | StaticTree, weights: Weights, state: DecodeState, steps: jax.Array
) -> DecodeState:
    """Drafts `steps` trees: the extend step, and all that grows the tree, which may be another one than the plan's."""
    target, _ = plan.modules(weights)
    drafter = plan.drafter_of(tree, target, weights)
    slots = jnp.arange(plan.slots)

    def step(_: jax.Array, state: DecodeState) -> DecodeState:
        tree, memory = drafter.propose(state.draft, state.view)
        unlikely = jnp.isinf(tree.scores).any()
        states = aux_states(plan, target, drafter, plan.max_depth + 1) + unlikely.astype(target.dtype)
        memory = drafter.observe(memory, Outcome(state.lengths, state.lengths, tree.tokens, states))
        tokens = state.tokens.at[slots, state.lengths].set(tree.tokens[:, -1])  # the next root
        return dataclasses.replace(state, tokens=tokens, draft=drafter.assume(memory, state.lengths))

    return jax.lax.fori_loop(0, steps, step, state)


def aux_states(plan: Plan, target: Llama, drafter: Drafter, rows: int) -> jax.Array:
    """Auxiliary hidden states of zeros, `[B, rows, F]`."""
    return jnp.zeros((plan.slots, rows, len(drafter.aux_layers) * target.config.hidden_size), target.dtype)


def verify_loop(
    plan: Plan, weights: Weights, state: DecodeState, tree: DraftTree, steps: jax.Array
) -> tuple[DecodeState, jax.Array]:
    """Verifies a tree `steps` times; the cache is only read."""
    target, drafter = plan.modules(weights)

    def step(_: jax.Array, tokens: jax.Array) -> jax.Array:
        at = dataclasses.replace(tree, tokens=tokens)
        return verify(target, state, at, drafter.max_depth, drafter.aux_layers).choices

    return state, jax.lax.fori_loop(0, steps, step, tree.tokens)


def commit_loop(
    plan: Plan, weights: Weights, state: DecodeState, tree: DraftTree, rows: KVRows, steps: jax.Array
) -> DecodeState:
    """Accepts and commits `steps` times, as if the target had said something about the tree."""
    target, drafter = plan.modules(weights)
    states, start = aux_states(plan, target, drafter, tree.tokens.shape[1]), state

    def step(_: jax.Array, carry: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
        state, choices = carry
        ancestors = ancestor_mask(tree.parents, drafter.max_depth)
        output = TargetOutput(choices, states, rows, ancestors)
        acceptance = accept(tree, output, drafter.max_depth)
        new = commit(state, output, acceptance)
        path = jnp.take_along_axis(states, acceptance.path[..., None], axis=1)
        memory = drafter.observe(state.draft, Outcome(state.lengths, new.lengths, acceptance.tokens, path))
        choices = jnp.broadcast_to(new.lengths[:, None] % 2, choices.shape)
        kept = {name: getattr(start, name) for name in ("lengths", "finish", "unread")}
        return dataclasses.replace(new, draft=memory, **kept), choices

    return jax.lax.fori_loop(0, steps, step, (state, tree.tokens))[0]


def build_loop(config: TreeConfig, slots: int, scores: jax.Array, steps: jax.Array) -> jax.Array:
    """Keeps the best nodes of a dynamic tree `steps` times."""
    roots = jnp.zeros((slots,), jnp.int32)
    tokens = jnp.zeros(scores.shape, jnp.int32)
    parents = jnp.zeros(scores.shape, jnp.int32).at[:, : config.top_k].set(ROOT_PARENT)

    def step(_: jax.Array, scores: jax.Array) -> jax.Array:
        tree = keep_best(config, roots, tokens, scores, parents)
        return scores - (tree.depths.sum() + tree.parents.sum() + tree.scores.sum()) * 1e-9

    return jax.lax.fori_loop(0, steps, step, scores)


def copy_loop(x: jax.Array, steps: jax.Array) -> jax.Array:
    """Reads and writes an array `steps` times."""
    return jax.lax.fori_loop(0, steps, lambda i, x: x + 1, x)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Times of one step of a loop, in milliseconds."""

    ms: float
    """Median over the runs."""
    runs: list[float]
    steps: int
    """Steps of each run."""
    dispatch_ms: float
    """What a run takes besides its steps, the median."""


def measure(run: Callable[[int], tuple[float, int]], *, runs: int, steps: int | None = None) -> Measured:
    """Times a loop: what a run of several steps takes longer than one of a single step, so that no dispatch is counted.

    Args:
      run: runs a number of steps; returns the seconds, and the steps that were really run.
      runs: measured runs, after one that does not count.
      steps: counted steps of each run; None takes as many as make it last `LEAST_SECONDS`.
    """
    run(1)
    if steps is None:
        steps = int(np.clip(np.ceil(LEAST_SECONDS / step_seconds(run(5), run(1))), 8, MOST_STEPS))
    times, dispatches = [], []
    for _ in range(runs):
        long, short = run(steps + 1), run(1)
        times.append(step_seconds(long, short) * 1e3)
        dispatches.append(short[0] * 1e3 - short[1] * times[-1])
    return Measured(statistics.median(times), times, long[1] - short[1], statistics.median(dispatches))


def timed(program: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds that a program takes, and its result."""
    jax.block_until_ready(arguments)
    start = time.perf_counter()
    result = jax.block_until_ready(program(*arguments))
    return time.perf_counter() - start, result
