"""Times of the rungs of a ladder.

The compiled rounds themselves are timed: costs that leave no choice make the program run one rung only. So nothing is compiled,
and what is measured is what will be run.
"""

import dataclasses
import hashlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.decoding.engine import Engine
from eagle_jax.decoding.ladder import Ladder, forced
from eagle_jax.decoding.tree import StaticTree, TreeConfig
from eagle_jax.measurement.loops import at_length, step_seconds

RUNS = 5
SECONDS = 0.1
"""A measured run takes about so long, but no fewer than `LEAST_ROUNDS`, and one round on top that is not counted."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 64


def rung_name(rung: TreeConfig | StaticTree | None) -> str:
    """A rung in words."""
    if rung is None:
        return "plain"
    if rung.total_tokens == rung.max_depth + 1:
        return f"chain {rung.max_depth}"
    if isinstance(rung, TreeConfig):
        return f"tree {rung.total_tokens}/{rung.depth}/{rung.top_k}"
    return f"static tree {hashlib.sha256(repr(rung.paths).encode()).hexdigest()[:8]}"


def measure_rungs(engine: Engine, length: int | None = None) -> list[float]:
    """Milliseconds of a round of each rung: medians of runs in which the rungs take turns.

    Of two runs, of which one has a single round (`step_seconds`), so that no dispatch is counted.

    Args:
      engine: one whose tree is a ladder, not serving.
      length: committed tokens of each slot at the start; None fills the slots by half.
    """
    ladder = engine.plan.tree
    assert isinstance(ladder, Ladder)
    rungs = range(len(ladder.rungs))
    length = engine.plan.max_length // 2 if length is None else length
    rounds = [2] * len(ladder.rungs)
    for rung in rungs:
        _run(engine, ladder, rung, rounds[rung], length)  # warms up
        estimate = step_seconds(*(_run(engine, ladder, rung, count, length) for count in (rounds[rung] + 1, 1)))
        rounds[rung] = int(np.clip(SECONDS / estimate, LEAST_ROUNDS, MOST_ROUNDS))
    times: list[list[float]] = [[] for _ in rungs]
    for _ in range(RUNS):
        for rung in rungs:
            long = _run(engine, ladder, rung, rounds[rung] + 1, length)
            times[rung].append(step_seconds(long, _run(engine, ladder, rung, 1, length)))
    return [statistics.median(runs) * 1e3 for runs in times]


def _run(engine: Engine, ladder: Ladder, rung: int, rounds: int, length: int) -> tuple[float, int]:
    """Seconds of a run of at most so many rounds, and how many they were."""
    plan, programs = engine.plan, engine.programs
    state = programs.init(engine.weights)
    placement = jax.tree.map(lambda x: x.sharding, state)
    state = jax.device_put(at_length(state, length, plan.max_length), placement)
    assert state.ladder is not None
    costs = jax.device_put(forced(ladder, rung), state.ladder.costs.sharding)
    state = dataclasses.replace(state, ladder=dataclasses.replace(state.ladder, costs=costs))
    active = np.ones((plan.slots,), bool)
    # However many drafts are accepted, no slot may end before the last round.
    most = max(1, (plan.max_length - length - 1) // (ladder.depths[rung] + 1))
    jax.block_until_ready(state)
    start = time.perf_counter()
    _, report = jax.block_until_ready(
        programs.decode(engine.weights, state, active, np.int32(min(rounds, most)), np.bool_(False))
    )
    return time.perf_counter() - start, int(jnp.max(report.rounds))
