"""Comparing two reports of `eagle_jax.measurement.bench` by ratios, which machines share, and not by times."""

import dataclasses
from collections.abc import Mapping
from typing import Any

SMALLEST_SHARE = 0.02
"""Parts that take less of a plain step than this are too short to be compared."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A ratio in both reports; lower is better."""

    name: str
    before: float
    now: float

    def worse(self, tolerance: float) -> bool:
        """Whether it grew by more than that share."""
        return self.now > self.before * (1 + tolerance)


def ratios(report: Mapping[str, Any]) -> dict[str, float]:
    """Times in units of a plain step, and the plain step in units of the time that its bytes take to copy."""
    steps = {step["name"]: step for step in report["steps"]}
    plain = steps["plain step"]
    found = {"plain step / its bytes at copy bandwidth": plain["ms"] / plain["floor_ms"]}
    for part in [*(step for name, step in steps.items() if name != "plain step"), *report["parts"]]:
        if part["name"] != "rest":
            found[f"{part['name']} / plain step"] = part["ms"] / plain["ms"]
    return found


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The ratios that both reports have.

    Raises:
      ValueError: they measured different things, or have nothing in common.
    """
    settings = {key: (before["settings"].get(key), now["settings"].get(key)) for key in now["settings"]}
    for key in ("runs", "steps", "accepted_length"):  # how long was measured, and what is computed from it
        settings.pop(key)
    if different := [f"{key} {a!r} and {b!r}" for key, (a, b) in settings.items() if a != b]:
        raise ValueError(f"the reports are about different settings: {', '.join(different)}")
    old, new = ratios(before), ratios(now)
    changes = [Change(name, old[name], new[name]) for name in new if name in old]
    return [c for c in changes if c.before > SMALLEST_SHARE or c.now > SMALLEST_SHARE]
