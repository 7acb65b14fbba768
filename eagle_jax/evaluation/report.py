"""What an evaluation found: numbers by configuration, dataset, category and turn, warnings, and which setting to use."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from eagle_jax.evaluation.rows import Group, Row
from eagle_jax.evaluation.run import Evaluation
from eagle_jax.evaluation.settings import Configuration
from eagle_jax.evaluation.statistics import Acceptance, Interval, Speed, SpeedUp
from eagle_jax.metrics import acceptance_warning


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One configuration on some of the requests."""

    acceptance: Acceptance
    speed: Speed | None
    """None for a part of calls: with one slot every request is a call, otherwise calls mix categories."""
    speed_up: SpeedUp | None
    """Over plain decoding at the same temperature, where that was measured in the same run."""

    def to_json(self) -> dict[str, Any]:
        """Counts, rates and speeds; null where there was nothing to divide by."""
        metrics = self.acceptance.metrics
        out: dict[str, Any] = {
            "requests": self.acceptance.requests,
            "output_tokens": self.acceptance.output_tokens,
            "rounds": metrics.rounds,
            "drafted": metrics.drafted,
            "accepted": metrics.accepted,
            "mean_acceptance_length": _number(metrics.mean_acceptance_length),
            "mean_acceptance_length_interval": _interval(self.acceptance.interval),
            "vllm_mean_acceptance_length": self.acceptance.vllm_acceptance_length,
            "draft_acceptance_rate": _number(metrics.draft_acceptance_rate),
            "accepted_at_depth": metrics.accepted_at_depth,
            "acceptance_rates": [_number(rate) for rate in metrics.acceptance_rates],
            "conditional_acceptance_rates": [_number(rate) for rate in metrics.conditional_acceptance_rates],
            "histogram": metrics.histogram,
        }
        if self.speed is not None:
            out |= {name: _number(value) for name, value in dataclasses.asdict(self.speed).items()}
        if self.speed_up is not None:
            out |= {"speed_up": self.speed_up.ratio, "speed_up_interval": _interval(self.speed_up.interval)}
        return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Which of the measured settings to use at a temperature."""

    temperature: float
    best: Configuration
    """The fastest."""
    speed_up: SpeedUp | None
    """Its, over plain decoding; None if that was not measured."""
    as_fast: tuple[Configuration, ...]
    """Others whose difference to the best is within the interval of the measurement."""

    @property
    def text(self) -> str:
        """In a sentence or two."""
        if self.best.shape is None:
            first = "Decode plainly: every draft that was measured made it slower."
        elif self.speed_up is None:
            first = (
                f"Draft {_what(self.best)}: it gave the most tokens a second of the shapes measured. Whether it beats plain "
                "decoding was not measured."
            )
        else:
            first = f"Draft {_what(self.best)}: {_times(self.speed_up)} the tokens a second of plain decoding."
        if self.as_fast:
            names = ", ".join(c.shape_name for c in self.as_fast)
            first += f" Within the precision of this measurement equally fast: {names}."
        return first

    @property
    def option(self) -> str:
        """What to give to `eagle-jax generate`, and its like."""
        shape = self.best.shape
        if shape is None or isinstance(shape, str):
            return "--no-draft" if shape is None else f"--tree {shape}"
        if shape.total_tokens == shape.max_depth + 1:
            return f"--num-speculative-tokens {shape.total_tokens - 1}"
        depth = getattr(shape, "depth", None)
        return self.best.shape_name if depth is None else f"--tree {shape.total_tokens},{depth},{shape.top_k}"


class Report:
    """The figures of an evaluation.

    Args:
      evaluation: what was measured.
    """

    def __init__(self, evaluation: Evaluation):
        self.evaluation = evaluation
        self.configurations = evaluation.configurations
        self.datasets: list[str] = list(evaluation.settings["datasets"])
        self._rows: dict[str, list[Row]] = {c.name: [] for c in self.configurations}
        self._groups: dict[str, list[Group]] = {c.name: [] for c in self.configurations}
        for row in evaluation.rows.requests:
            self._rows[row.configuration].append(row)
        for group in evaluation.rows.groups:
            self._groups[group.configuration].append(group)
        self._one_by_one = evaluation.settings["max_num_seqs"] == 1

    def plain(self, temperature: float) -> Configuration | None:
        """Plain decoding at a temperature, if it was measured."""
        return next((c for c in self.configurations if c.shape is None and c.temperature == temperature), None)

    def total(self, configuration: Configuration) -> Part:
        """Everything together."""
        return self._part(configuration)

    def dataset(self, configuration: Configuration, dataset: str) -> Part:
        """One dataset."""
        return self._part(configuration, dataset=dataset)

    def measured(self, dataset: str) -> bool:
        """Whether anything of a dataset was measured; an evaluation that is not complete may lack some."""
        return any(row.dataset == dataset for row in self.evaluation.rows.requests)

    def categories(self, dataset: str) -> list[str]:
        """Categories of a dataset in which something was measured; empty if it has one at most."""
        found = [row.category for row in self.evaluation.rows.requests if row.dataset == dataset]
        names = list(dict.fromkeys(found))
        return names if len(names) > 1 else []

    def category(self, configuration: Configuration, dataset: str, category: str) -> Part:
        """One category of a dataset."""
        return self._part(configuration, dataset=dataset, category=category)

    def turn(self, configuration: Configuration, dataset: str, turn: int) -> Part:
        """One turn of a dataset."""
        return self._part(configuration, dataset=dataset, turn=turn)

    def _part(
        self,
        configuration: Configuration,
        *,
        dataset: str | None = None,
        category: str | None = None,
        turn: int | None = None,
    ) -> Part:
        key = (configuration.name, dataset, category, turn)
        if key not in self._parts:
            self._parts[key] = self._make_part(configuration, dataset, category, turn)
        return self._parts[key]

    @functools.cached_property
    def _parts(self) -> dict[tuple[str, str | None, str | None, int | None], Part]:
        return {}

    def _make_part(
        self, configuration: Configuration, dataset: str | None, category: str | None, turn: int | None
    ) -> Part:
        rows = [
            row
            for row in self._rows[configuration.name]
            if dataset in (None, row.dataset) and category in (None, row.category) and turn in (None, row.turn)
        ]
        acceptance = Acceptance.of(rows, configuration.depth)
        if configuration.shape is None:  # every round emits one token
            acceptance = dataclasses.replace(acceptance, interval=None)
        if category is not None and not self._one_by_one:
            return Part(acceptance=acceptance, speed=None, speed_up=None)
        groups = self._select(configuration, dataset, category, turn)
        plain = self.plain(configuration.temperature)
        speed_up = None
        if plain is not None and configuration.shape is not None:
            speed_up = SpeedUp.of(groups, self._select(plain, dataset, category, turn))
        return Part(acceptance=acceptance, speed=Speed.of(groups), speed_up=speed_up)

    def _select(
        self, configuration: Configuration, dataset: str | None, category: str | None, turn: int | None
    ) -> list[Group]:
        groups = [
            group
            for group in self._groups[configuration.name]
            if dataset in (None, group.dataset) and turn in (None, group.turn) and group.requests
        ]
        if category is None:
            return groups
        wanted = {
            (row.turn, row.group)
            for row in self._rows[configuration.name]
            if row.dataset == dataset and row.category == category
        }
        return [group for group in groups if (group.turn, group.index) in wanted]

    @property
    def warnings(self) -> list[str]:
        """What the reader should know before believing or using the figures."""
        found = []
        for configuration in self.configurations:
            if configuration.shape is None:
                continue
            part = self.total(configuration)
            metrics = part.acceptance.metrics
            if (text := acceptance_warning(metrics.drafts, metrics.accepted_at_depth)) is not None:
                found.append(f"{configuration.name}: {text}")
            if part.speed_up is not None and loses(part.speed_up):
                found.append(
                    f"{configuration.name}: speculation loses against plain decoding here, {_times(part.speed_up)} its tokens a "
                    "second: the drafts that are accepted do not pay for drafting and verifying. Try shorter drafts."
                )
        left_out = self.evaluation.rows.left_out
        if left_out:
            questions = {(entry.dataset, entry.question_id, entry.turn) for entry in left_out}
            found.append(f"{len(questions)} requests were left out; the first: {left_out[0].reason}")
        if not self.evaluation.complete:
            found.append("The evaluation is not complete: the time limit came first. The same command goes on with it.")
        return found

    @property
    def recommendations(self) -> list[Recommendation]:
        """For each temperature, the fastest of the measured settings."""
        found = []
        for temperature in dict.fromkeys(c.temperature for c in self.configurations):
            candidates = [c for c in self.configurations if c.temperature == temperature and self._groups[c.name]]
            if not candidates:
                continue
            best = max(candidates, key=lambda c: self._speed(c).tokens_per_second)
            as_fast = []
            for other in candidates:
                ratio = None if other == best else SpeedUp.of(self._groups[best.name], self._groups[other.name])
                if ratio is not None and ratio.interval is not None and ratio.interval[0] <= 1:
                    as_fast.append(other)
            found.append(
                Recommendation(
                    temperature=temperature, best=best, speed_up=self.total(best).speed_up, as_fast=tuple(as_fast)
                )
            )
        return found

    def _speed(self, configuration: Configuration) -> Speed:
        speed = self.total(configuration).speed
        assert speed is not None
        return speed

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "settings": self.evaluation.settings,
            "complete": self.evaluation.complete,
            "warnings": self.warnings,
            "recommendations": [
                {
                    "temperature": r.temperature,
                    "configuration": r.best.name,
                    "option": r.option,
                    "text": r.text,
                    "as_fast": [c.name for c in r.as_fast],
                }
                for r in self.recommendations
            ],
            "configurations": [self._configuration_json(c) for c in self.configurations],
            "left_out": [dataclasses.asdict(entry) for entry in self.evaluation.rows.left_out],
        }

    def _configuration_json(self, configuration: Configuration) -> dict[str, Any]:
        datasets = {}
        for name in self.datasets:
            entry = self.dataset(configuration, name).to_json()
            entry["categories"] = {
                category: self.category(configuration, name, category).to_json() for category in self.categories(name)
            }
            if (turns := self.evaluation.settings["turns"]) > 1:
                entry["turns"] = {
                    str(turn): self.turn(configuration, name, turn).to_json() for turn in range(1, turns + 1)
                }
            datasets[name] = entry
        return {**configuration.to_json(), "total": self.total(configuration).to_json(), "datasets": datasets}


def loses(speed_up: SpeedUp) -> bool:
    """Whether speculation was measured to be slower than plain decoding, beyond the interval if there is one."""
    return speed_up.ratio < 1 if speed_up.interval is None else speed_up.interval[1] < 1


def vllm_lines(acceptance: Acceptance) -> list[str]:
    """The lines that vLLM's spec_decode_offline.py prints."""
    metrics = acceptance.metrics
    return [
        "-" * 50,
        f"total_num_output_tokens: {acceptance.output_tokens}",
        f"num_drafts: {metrics.drafts}",
        f"num_draft_tokens: {metrics.drafted}",
        f"num_accepted_tokens: {metrics.accepted}",
        f"mean acceptance length: {acceptance.vllm_acceptance_length:.2f}",
        "-" * 50,
        *(
            f"acceptance at token {i}: {count / metrics.drafts if metrics.drafts else 0:.2f}"
            for i, count in enumerate(metrics.accepted_at_depth)
        ),
    ]


def interval_text(value: float, interval: Interval | None, digits: int = 2) -> str:
    """A value with its interval: 2.31 (2.25 to 2.38)."""
    if math.isnan(value):
        return "-"
    ends = "" if interval is None else f" ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})"
    return f"{value:.{digits}f}{ends}"


def _what(configuration: Configuration) -> str:
    shape = configuration.shape
    assert shape is not None
    if isinstance(shape, str):
        return "plain rounds, chains or trees as it pays (tree auto)"
    if shape.total_tokens == shape.max_depth + 1:
        count = shape.total_tokens - 1
        return f"a chain of {count} token{'s' if count > 1 else ''} a round"
    return f"with {configuration.shape_name}"


def _times(speed_up: SpeedUp) -> str:
    ends = "" if speed_up.interval is None else f" (95 %: {speed_up.interval[0]:.2f} to {speed_up.interval[1]:.2f})"
    return f"{speed_up.ratio:.2f} times{ends}"


def names_of(configurations: Sequence[Configuration]) -> list[str]:
    """How to call configurations beside each other: without the temperature where all have the same."""
    if len({c.temperature for c in configurations}) == 1:
        return [c.shape_name for c in configurations]
    return [c.name for c in configurations]


def _interval(interval: Interval | None) -> list[float] | None:
    return None if interval is None else list(interval)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
