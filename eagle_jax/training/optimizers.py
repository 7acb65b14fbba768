"""Optimisers and the course of the learning rate."""

import dataclasses
from typing import Literal

import optax

OptimizerKind = Literal["adamw", "muon"]
OPTIMIZERS: tuple[OptimizerKind, ...] = ("adamw", "muon")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How the head's arrays are changed."""

    kind: OptimizerKind = "adamw"
    """"muon" orthogonalises the updates of matrices inside the head (`optax.contrib.muon`); norms and output head take AdamW."""
    learning_rate: float = 1e-3
    """At its peak; of AdamW."""
    muon_learning_rate: float = 1e-2
    """At its peak; of Muon."""
    warmup: float = 0.04
    """Share of the steps over which it rises from 0."""
    final: float = 0.1
    """Share of the peak at which it ends, by a cosine."""
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.0
    clip: float = 1.0
    """Norm to which the gradient is cut; 0 cuts nothing."""

    def __post_init__(self) -> None:
        if self.kind not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(map(repr, OPTIMIZERS))}, not {self.kind!r}")
        for name in ("learning_rate", "muon_learning_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, not {getattr(self, name)!r}")
        for name, below in (("warmup", 1), ("final", 1.0001), ("b1", 1), ("b2", 1)):
            if not 0 <= getattr(self, name) < below:
                raise ValueError(f"{name} must be at least 0 and below {below}, not {getattr(self, name)!r}")
        for name in ("weight_decay", "clip"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)!r}")


def schedule(config: OptimizerConfig, peak: float, steps: int) -> optax.Schedule:
    """The learning rate after each of `steps` steps: a linear rise, then a cosine."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup else peak,
        peak_value=peak,
        warmup_steps=max(1, round(config.warmup * steps)) if config.warmup else 0,
        decay_steps=max(steps, 2),
        end_value=config.final * peak,
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimiser of a run of `steps` steps, over parameters in a dictionary by path."""
    adamw = optax.adamw(
        schedule(config, config.learning_rate, steps), b1=config.b1, b2=config.b2, weight_decay=config.weight_decay
    )
    inner = adamw
    if config.kind == "muon":
        muon = optax.contrib.muon(schedule(config, config.muon_learning_rate, steps), weight_decay=config.weight_decay)
        inner = optax.partition({"muon": muon, "adamw": adamw}, _labels)
    if config.clip:
        inner = optax.chain(optax.clip_by_global_norm(config.clip), inner)
    return inner


def _labels(parameters: dict) -> dict[str, str]:
    return {
        path: "muon" if value.ndim == 2 and not path.startswith(("lm_head.", "embed.")) else "adamw"
        for path, value in parameters.items()
    }
