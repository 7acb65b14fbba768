"""Times of the rungs of a ladder on the user's own device, measured once and kept in the user's cache directory.

Its file is small JSON that people can read, change or delete.
"""

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import jax

from eagle_jax.decoding.engine import Engine
from eagle_jax.decoding.ladder import Ladder
from eagle_jax.loading.demo_target import cache_folder
from eagle_jax.measurement.rungs import measure_rungs, rung_name

_log = logging.getLogger(__name__)

DIGITS = 4
"""Decimals of the milliseconds, in the file and in use: the process that measures chooses as those do that read the file."""


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
            {"rung": name, "ms": ms, "plain_rounds": round(ms / plain, 3)}
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
        "mode": plan.mode.name.lower(),
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
        found = Calibration(key=key, ms=[round(ms, DIGITS) for ms in measure_rungs(engine)])
        found.write()
        _log.info("calibrated %s", ", ".join(f"{r['rung']} {r['ms']} ms" for r in found.to_dict()["rungs"]))
    return found
