"""The golden models and traces."""

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.loading import Draft, Target, load_draft, load_target

COMMITTED = Path(__file__).parents[1] / "golden"
FOLDER = Path(os.environ.get("EAGLE_JAX_GOLDEN") or COMMITTED)
"""Another folder of the same layout can be tested by naming it in the environment."""


@functools.cache
def target(name: str) -> Target:
    return load_target(FOLDER / name, dtype="float32")


@functools.cache
def draft(name: str, target_name: str) -> Draft:
    return load_draft(FOLDER / name, target(target_name))


@dataclasses.dataclass(frozen=True)
class Trace:
    """A recorded run of the reference."""

    name: str
    data: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def prompt(self) -> list[int]:
        return self.data["prompt_ids"]

    @property
    def output(self) -> list[int]:
        """New tokens, the last bonus token included."""
        return [*self.data["output_ids"][len(self.prompt) :], self.data["rounds"][-1]["next_root"]]

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return self.data["rounds"]

    @property
    def tree(self) -> TreeConfig:
        return TreeConfig(total_tokens=self.data["total_token"], depth=self.data["depth"], top_k=self.data["top_k"])

    @property
    def group(self) -> tuple[str, str, TreeConfig]:
        """Traces of one group run in the same programs."""
        return self.data["target"], self.data["head"], self.tree


@functools.cache
def traces() -> tuple[Trace, ...]:
    """Every greedy trace in the folder."""
    out = []
    for path in sorted((FOLDER / "traces").glob("*.json")):
        data = json.loads(path.read_text())
        if data["sampling"]:
            continue
        arrays = dict(np.load(path.with_suffix(".npz"))) if path.with_suffix(".npz").exists() else {}
        out.append(Trace(path.stem, data, arrays))
    return tuple(out)
