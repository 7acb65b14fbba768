"""What is measured, and under which conditions."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from eagle_jax.decoding.rules import SEEDED, Rule
from eagle_jax.drafters.tree import StaticTree, TreeConfig
from eagle_jax.evaluation.errors import EvaluationError
from eagle_jax.speculative_config import check_shape

Shape = TreeConfig | StaticTree | Literal["auto"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """One way to decode: what is drafted a round, at which temperature, and how it is accepted there."""

    shape: Shape | None
    """Chain or tree; "auto" chooses one before each round; None decodes plainly."""
    temperature: float = 0.0
    rule: Rule = SEEDED
    """How drafts are accepted where tokens are sampled."""
    label: str | None = None
    """What to call the shape; None describes it (`describe_shape`)."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise EvaluationError(f"temperature must be at least 0, got {self.temperature}")
        if self.shape is not None:
            check_shape(self.rule, self.shape)

    @property
    def shape_name(self) -> str:
        """What `describe_shape` or the label says, with the rule where it is not the default."""
        name = self.label or describe_shape(self.shape)
        if self.shape is not None and self.temperature > 0 and self.rule != SEEDED:
            name += f", {self.rule.rejection_sample_method}, {self.rule.draft_sample_method} drafts"
        return name

    @property
    def name(self) -> str:
        """Tells it from all others of a run."""
        return f"{self.shape_name}, T={self.temperature:g}"

    @property
    def depth(self) -> int:
        """Drafts that one round can accept at most; 0 for "auto", where that depends on the device."""
        return 0 if self.shape is None or isinstance(self.shape, str) else self.shape.max_depth

    def to_json(self) -> dict[str, Any]:
        """Everything about it; equal for equal configurations."""
        shape: Any = self.shape
        if isinstance(self.shape, TreeConfig):
            shape = dataclasses.asdict(self.shape)
        elif isinstance(self.shape, StaticTree):
            shape = [list(path) for path in self.shape.paths]
        return {
            "name": self.name,
            "shape": shape,
            "temperature": self.temperature,
            "rejection_sample_method": None if self.shape is None else self.rule.rejection_sample_method,
            "draft_sample_method": None if self.shape is None else self.rule.draft_sample_method,
        }


def describe_shape(shape: Shape | None) -> str:
    """In a word or two: plain, auto, chain 3, tree 60/7/10 (total_tokens/depth/top_k), static tree 26."""
    if shape is None or isinstance(shape, str):
        return shape or "plain"
    if shape.total_tokens == shape.max_depth + 1:
        return f"chain {shape.total_tokens - 1}"
    if isinstance(shape, StaticTree):
        return f"static tree {shape.total_tokens}"
    return f"tree {shape.total_tokens}/{shape.depth}/{shape.top_k}"


def make_configurations(
    shapes: Sequence[Shape], temperatures: Sequence[float], *, plain: bool, rule: Rule = SEEDED
) -> list[Configuration]:
    """Every shape at every temperature, with plain decoding first if it is wanted.

    Raises:
      EvaluationError: nothing to measure, or the same thing twice.
      ValueError: a rule that does not go with a shape.
    """
    found = [
        Configuration(shape=shape, temperature=temperature, rule=rule if temperature > 0 else SEEDED)
        for temperature in temperatures
        for shape in ([None, *shapes] if plain else shapes)
    ]
    if not found:
        raise EvaluationError("there is nothing to measure: no shape and no plain decoding, or no temperature")
    names = [configuration.name for configuration in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise EvaluationError(f"{twice[0]} is asked for twice")
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Conditions that all configurations of an evaluation share."""

    turns: int = 1
    """Answers of each question that are measured: 1, or 2 for both turns of MT-bench. A later turn sees the model's own earlier
    answers of the same configuration."""
    output_len: int = 256
    """Most tokens of an answer."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    seed: int = 0
    """Question i of a set is sampled with seed + i, in every configuration."""
    ignore_eos: bool = False
    """Go on to `output_len` behind the end of the answer."""
    max_num_seqs: int = 1
    """Sequences decoded side by side. 1 times every request by itself."""
    max_model_len: int | None = None
    """Bound on prompt and output; requests that need more are left out, and reported. None takes what the model is made for."""

    def __post_init__(self) -> None:
        for name in ("turns", "output_len", "max_num_seqs"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise EvaluationError(f"{name} must be an integer of at least 1, got {value!r}")
