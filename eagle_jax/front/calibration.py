"""Times of the rungs of a ladder on the user's own device, measured once and kept in the user's cache directory.

The compiled rounds themselves are timed: costs that leave no choice make the program run one rung only. So a calibration takes no
compilation, and what it measures is what will be run. Its file is small JSON that people can read, change or delete.
"""

import dataclasses
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

from eagle_jax.decoding.engine import Engine
from eagle_jax.decoding.ladder import Ladder, forced
from eagle_jax.decoding.tree import StaticTree, TreeConfig
from eagle_jax.loading.demo_target import cache_folder
from eagle_jax.measurement.loops import at_length

RUNS = 5
SECONDS = 0.1
"""A measured run takes about so long, but no fewer than `LEAST_ROUNDS`."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 64

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured times of a ladder."""

    key: dict[str, Any]
    """What they depend on: device, models, dtypes, slots, capacity, class of rounds, version of JAX, rungs."""
    ms: list[float]
    """Time of a round of each rung, in milliseconds; the first is plain decoding."""

    @property
    def file(self) -> Path:
        """Where it is kept."""
        return calibration_file(self.key)

    def to_dict(self) -> dict[str, Any]:
        """What the file holds."""
        plain = self.ms[0]
        rungs = [
            {"rung": name, "ms": round(ms, 4), "plain_rounds": round(ms / plain, 3)}
            for name, ms in zip(self.key["rungs"], self.ms, strict=True)
        ]
        return {"rungs": rungs, **{name: value for name, value in self.key.items() if name != "rungs"}}

    @staticmethod
    def read(path: Path, key: dict[str, Any]) -> "Calibration | None":
        """What an earlier run measured for the same key; None if there is nothing that can be read."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            rungs = found.pop("rungs")
            if {**found, "rungs": [entry["rung"] for entry in rungs]} != key:
                return None
            ms = [float(entry["ms"]) for entry in rungs]
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


def rung_name(rung: TreeConfig | StaticTree | None) -> str:
    """A rung in words."""
    if rung is None:
        return "plain"
    if rung.total_tokens == rung.max_depth + 1:
        return f"chain {rung.max_depth}"
    if isinstance(rung, TreeConfig):
        return f"tree {rung.total_tokens}/{rung.depth}/{rung.top_k}"
    return f"static tree {hashlib.sha256(repr(rung.paths).encode()).hexdigest()[:8]}"


def calibration_key(engine: Engine) -> dict[str, Any]:
    """Everything that the times of an engine's rungs depend on, as JSON can hold it."""
    plan = engine.plan
    assert isinstance(plan.tree, Ladder)
    device = min(jax.tree.leaves(engine.weights)[0].devices(), key=lambda device: device.id)
    shapes = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(engine.weights)]
    weights = jax.tree.leaves(engine.weights)
    return {
        "device": device.device_kind,
        "devices": len(weights[0].sharding.device_set),
        "cpus": os.cpu_count() if device.platform == "cpu" else None,
        "jax": jax.__version__,
        "model": engine.geometry,
        "weights": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
        "batch": plan.slots,
        "max_length": plan.max_length,
        "features": plan.features.name.lower(),
        "rungs": [rung_name(rung) for rung in plan.tree.rungs],
    }


def calibration_file(key: dict[str, Any]) -> Path:
    """The file of a key: a name that tells the device, and a digest of everything."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    device = "".join(c if c.isalnum() else "-" for c in key["device"]).strip("-").lower()
    return cache_folder() / "calibration" / f"{device}-batch{key['batch']}-{key['max_length']}-{digest}.json"


def calibrate(engine: Engine, *, again: bool = False) -> Calibration:
    """The calibration of an engine whose tree is a ladder: from its file, else measured and written to it.

    Args:
      engine: not serving.
      again: measure even if there is a file.
    """
    key = calibration_key(engine)
    found = None if again else Calibration.read(calibration_file(key), key)
    if found is None:
        found = Calibration(key=key, ms=measure_rungs(engine))
        found.write()
        _log.info("calibrated %s", ", ".join(f"{r['rung']} {r['ms']} ms" for r in found.to_dict()["rungs"]))
    return found


def measure_rungs(engine: Engine) -> list[float]:
    """Milliseconds of a round of each rung, all slots half full: medians of runs in which the rungs take turns."""
    ladder = engine.plan.tree
    assert isinstance(ladder, Ladder)
    rungs = range(len(ladder.rungs))
    rounds = [2] * len(ladder.rungs)
    first = [_seconds(engine, ladder, rung, rounds[rung]) for rung in rungs]  # warms up
    for rung in rungs:
        first[rung] = _seconds(engine, ladder, rung, rounds[rung])
        rounds[rung] = int(np.clip(SECONDS / first[rung], LEAST_ROUNDS, MOST_ROUNDS))
    times = [[_seconds(engine, ladder, rung, rounds[rung]) for rung in rungs] for _ in range(RUNS)]
    return [statistics.median(run[rung] for run in times) * 1e3 for rung in rungs]


def _seconds(engine: Engine, ladder: Ladder, rung: int, rounds: int) -> float:
    """Of one round, in a run of at most so many."""
    plan, programs = engine.plan, engine.programs
    length = plan.max_length // 2
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
    seconds = time.perf_counter() - start
    return seconds / int(jnp.max(report.rounds))
