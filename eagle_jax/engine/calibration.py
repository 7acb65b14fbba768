"""What rounds of adaptive speculation cost on the user's own device, measured once and kept in the user's cache directory.

The compiled rounds themselves are timed: costs that leave no choice make the program run one candidate only. So nothing is
compiled, and what is measured is what will be run. The file is small JSON that people can read, change or delete.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.decoding.adaptive import AdaptiveSpeculation, forced
from eagle_jax.decoding.plan import Plan, Weights
from eagle_jax.decoding.state import RUNNING, DecodeState
from eagle_jax.drafters.tree import StaticTree, TreeConfig
from eagle_jax.engine.programs import Programs
from eagle_jax.engine.scheduler import UNBOUNDED
from eagle_jax.loading.demo_target import cache_folder
from eagle_jax.sampling.params import SamplingMode

_log = logging.getLogger(__name__)

DIGITS = 4
"""Decimals of the milliseconds, in the file and in use: the process that measures chooses as those do that read the file."""
RUNS = 5
SECONDS = 0.1
"""A measured run takes about so long, but no fewer than `LEAST_ROUNDS`, and one round on top that is not counted."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured times."""

    key: dict[str, Any]
    """What they depend on: device, models, dtypes, slots, capacity, class of rounds, version of JAX, candidates."""
    ms: list[float]
    """Time of a round of each candidate, in milliseconds; the first is plain decoding."""

    @property
    def file(self) -> Path:
        """Where it is kept."""
        return calibration_file(self.key)

    def to_dict(self) -> dict[str, Any]:
        """What the file holds."""
        plain = self.ms[0]
        candidates = [
            {"candidate": name, "ms": ms, "plain_rounds": round(ms / plain, 3)}
            for name, ms in zip(self.key["candidates"], self.ms, strict=True)
        ]
        return {"candidates": candidates, **{name: value for name, value in self.key.items() if name != "candidates"}}

    @staticmethod
    def read(path: Path, key: dict[str, Any]) -> "Calibration | None":
        """What an earlier run measured for the same key; None if there is nothing that can be read."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            candidates = found.pop("candidates")
            if {**found, "candidates": [entry["candidate"] for entry in candidates]} != key:
                return None
            ms = [float(entry["ms"]) for entry in candidates]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return Calibration(key=key, ms=ms) if all(0 < value < float("inf") for value in ms) else None

    def write(self) -> None:
        """Keeps it; where that is not possible the next process measures again."""
        path = self.file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Another process may read meanwhile, so the file appears as a whole.
            handle, name = tempfile.mkstemp(dir=path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(self.to_dict(), file, indent=1)
            os.replace(name, path)
        except OSError as error:
            _log.warning("the calibration cannot be kept in %s: %s", path, error)


def calibration_key(programs: Programs, mode: SamplingMode) -> dict[str, Any]:
    """Everything that the times of the candidates depend on, as JSON can hold it."""
    plan, weights = programs.plan, jax.tree.leaves(programs.weights)
    assert isinstance(plan.tree, AdaptiveSpeculation)
    shapes = [(leaf.shape, str(leaf.dtype)) for leaf in weights]
    return {
        "device": programs.device.device_kind,
        "devices": len(weights[0].sharding.device_set),
        "cpus": os.cpu_count() if programs.device.platform == "cpu" else None,
        "jax": jax.__version__,
        "model": programs.geometry,
        "weights": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
        "batch": plan.slots,
        "max_length": plan.max_length,
        "mode": mode.name.lower(),
        "candidates": [candidate_name(candidate) for candidate in plan.tree.candidates],
    }


def calibration_file(key: dict[str, Any]) -> Path:
    """The file of a key: a name that tells the device, and a digest of everything."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    device = "".join(c if c.isalnum() else "-" for c in key["device"]).strip("-").lower()
    return cache_folder() / "calibration" / f"{device}-batch{key['batch']}-{key['max_length']}-{digest}.json"


def calibrate(programs: Programs, mode: SamplingMode, *, again: bool = False) -> Calibration:
    """The calibration of programs with adaptive speculation: from its file, else measured and written to it.

    Args:
      programs: of an engine that does not run.
      mode: of the rounds.
      again: measure even if there is a file.
    """
    key = calibration_key(programs, mode)
    found = None if again else Calibration.read(calibration_file(key), key)
    if found is None:
        found = Calibration(key=key, ms=[round(ms, DIGITS) for ms in measure_candidates(programs, mode)])
        found.write()
        _log.info("calibrated %s", ", ".join(f"{r['candidate']} {r['ms']} ms" for r in found.to_dict()["candidates"]))
    return found


def candidate_name(candidate: TreeConfig | StaticTree | None) -> str:
    """A candidate in words."""
    if candidate is None:
        return "plain"
    if candidate.total_tokens == candidate.max_depth + 1:
        return f"chain {candidate.max_depth}"
    if isinstance(candidate, TreeConfig):
        return f"tree {candidate.total_tokens}/{candidate.depth}/{candidate.top_k}"
    return f"static tree {hashlib.sha256(repr(candidate.paths).encode()).hexdigest()[:8]}"


def measure_candidates(programs: Programs, mode: SamplingMode, length: int | None = None) -> list[float]:
    """Milliseconds of a round of each candidate: medians of runs in which the candidates take turns.

    Of two runs, of which one has a single round (`step_seconds`), so that no dispatch is counted.

    Args:
      programs: those of an engine that does not run, with adaptive speculation.
      mode: of the rounds.
      length: committed tokens of each slot at the start; None fills the slots by half.
    """
    speculation = programs.plan.tree
    assert isinstance(speculation, AdaptiveSpeculation)
    candidates = range(len(speculation.candidates))
    length = programs.plan.max_length // 2 if length is None else length
    rounds = [2] * len(speculation.candidates)
    for candidate in candidates:
        _run(programs, mode, speculation, candidate, rounds[candidate], length)  # warms up
        estimate = step_seconds(
            *(_run(programs, mode, speculation, candidate, count, length) for count in (rounds[candidate] + 1, 1))
        )
        rounds[candidate] = int(np.clip(SECONDS / estimate, LEAST_ROUNDS, MOST_ROUNDS))
    times: list[list[float]] = [[] for _ in candidates]
    for _ in range(RUNS):
        for candidate in candidates:
            long = _run(programs, mode, speculation, candidate, rounds[candidate] + 1, length)
            times[candidate].append(step_seconds(long, _run(programs, mode, speculation, candidate, 1, length)))
    return [statistics.median(runs) * 1e3 for runs in times]


def _run(
    programs: Programs, mode: SamplingMode, speculation: AdaptiveSpeculation, candidate: int, rounds: int, length: int
) -> tuple[float, int]:
    """Seconds of a run of at most so many rounds, and how many they were."""
    plan = programs.plan
    state = programs.init()
    placement = jax.tree.map(lambda x: x.sharding, state)
    state = jax.device_put(at_length(plan, programs.weights, state, length), placement)
    assert state.adaptive is not None
    costs = jax.device_put(forced(speculation, candidate), state.adaptive.costs.sharding)
    state = dataclasses.replace(state, adaptive=dataclasses.replace(state.adaptive, costs=costs))
    # However many drafts are accepted, no slot may end before the last round.
    most = max(1, (plan.max_length - length - 1) // (speculation.depths[candidate] + 1))
    return run_rounds(programs, mode, state, min(rounds, most))[1]


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
def at_length(plan: Plan, weights: Weights, state: DecodeState, length: jax.Array | int) -> DecodeState:
    """A state whose slots all hold `length` committed rows of zeros and run on up to the longest sequence."""
    lengths = jnp.full_like(state.lengths, length)
    return dataclasses.replace(
        state,
        lengths=lengths,
        prompt_lengths=lengths,
        limits=jnp.full_like(lengths, plan.max_length),
        finish=jnp.full_like(lengths, RUNNING),
        draft=plan.modules(weights)[1].assume(state.draft, lengths),
    )


def run_rounds(
    programs: Programs, mode: SamplingMode, state: DecodeState, rounds: int
) -> tuple[DecodeState, tuple[float, int]]:
    """The state after one dispatch for all slots, its seconds, and the rounds it had: fewer than asked for if the report was full
    before."""
    jax.block_until_ready(state)
    start = time.perf_counter()
    state, report = programs.decode(state, range(programs.plan.slots), mode, rounds=rounds, max_ended=UNBOUNDED)
    jax.block_until_ready(report)
    seconds = time.perf_counter() - start
    return state, (seconds, max(len(slot.round_lengths) for slot in programs.read(report).values()))


def step_seconds(long: tuple[float, int], short: tuple[float, int]) -> float:
    """Seconds of a step by two runs, of each the seconds and the steps.

    It is what the longer one takes more; where that is nothing, because steps are much shorter than the noise of a dispatch, the
    dispatch is counted.
    """
    seconds, steps = long[0] - short[0], long[1] - short[1]
    return seconds / steps if seconds > 0 and steps > 0 else long[0] / long[1]
