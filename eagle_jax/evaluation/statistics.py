"""Statistics of rows: acceptance with its interval, and speed."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from eagle_jax.evaluation.rows import Group, Row
from eagle_jax.metrics import AcceptanceMetrics

RESAMPLES = 2000
CONFIDENCE = 0.95

Interval = tuple[float, float]
"""Lower and upper end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What some rows accepted. Terms are those of `eagle_jax.metrics`."""

    requests: int
    output_tokens: int
    metrics: AcceptanceMetrics
    interval: Interval | None
    """Of the mean acceptance length: 95 %, by resampling questions; None for a single question."""

    @staticmethod
    def of(rows: Sequence[Row], depth: int) -> "Acceptance":
        """Statistics of rows of one configuration, whose rounds accept `depth` drafts at most."""
        nothing = AcceptanceMetrics(accepted_lengths=[], accepted_at_depth=[0] * depth, drafted=0)
        by_question: dict[tuple[str, str], tuple[int, int]] = {}
        for row in rows:
            # Both turns of a question belong together.
            key = (row.dataset, row.question_id)
            emitted, rounds = by_question.get(key, (0, 0))
            by_question[key] = (emitted + sum(row.accepted_lengths), rounds + len(row.accepted_lengths))
        pairs = list(by_question.values())
        return Acceptance(
            requests=len(rows),
            output_tokens=sum(len(row.token_ids) for row in rows),
            metrics=AcceptanceMetrics.total([nothing, *(row.metrics for row in rows)]),
            interval=ratio_interval([emitted for emitted, _ in pairs], [rounds for _, rounds in pairs]),
        )

    @property
    def vllm_acceptance_length(self) -> float:
        """1 + accepted / drafts, before cutting, as vLLM reports it; 1 without a round."""
        return 1 + self.metrics.accepted / self.metrics.drafts if self.metrics.drafts else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """What some calls took."""

    seconds: float
    """Prefill and rounds, without compilation."""
    tokens_per_second: float
    """Output tokens a second, reading prompts included; NaN without a call."""
    decode_tokens_per_second: float
    """Tokens of rounds, a second of decoding."""

    @staticmethod
    def of(groups: Sequence[Group]) -> "Speed":
        """All calls together."""
        seconds, decoding = sum(g.seconds for g in groups), sum(g.decode_seconds for g in groups)
        return Speed(
            seconds=seconds,
            tokens_per_second=sum(g.output_tokens for g in groups) / seconds if seconds else math.nan,
            decode_tokens_per_second=sum(g.decoded_tokens for g in groups) / decoding if decoding else math.nan,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """Tokens a second of one configuration over those of another, in the calls that both have."""

    ratio: float
    interval: Interval | None
    """95 %, by resampling calls; None with fewer than two."""

    @staticmethod
    def of(groups: Sequence[Group], baseline: Sequence[Group]) -> "SpeedUp | None":
        """None if they have no call in common."""
        others = {(g.dataset, g.turn, g.index): g for g in baseline if g.seconds}
        pairs = [(g, others[key]) for g in groups if g.seconds and (key := (g.dataset, g.turn, g.index)) in others]
        if not pairs:
            return None
        counts = np.array([[a.output_tokens, a.seconds, b.output_tokens, b.seconds] for a, b in pairs], np.float64)

        def ratio(sums: np.ndarray) -> np.ndarray:
            return sums[..., 0] / sums[..., 1] * sums[..., 3] / sums[..., 2]

        interval = None
        if len(pairs) > 1:
            interval = _percentiles(ratio(_resampled_sums(counts)))
        return SpeedUp(ratio=float(ratio(counts.sum(axis=0))), interval=interval)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval | None:
    """Bootstrap interval of sum(numerators) / sum(denominators) over clusters; None if fewer than two have a denominator.

    Percentiles of `RESAMPLES` draws with replacement, from a fixed seed.
    """
    counts = np.array([(a, b) for a, b in zip(numerators, denominators, strict=True) if b], np.float64)
    if len(counts) < 2:
        return None
    sums = _resampled_sums(counts)
    return _percentiles(sums[:, 0] / sums[:, 1])


def _resampled_sums(counts: np.ndarray) -> np.ndarray:
    """Column sums of `RESAMPLES` resamplings of the rows, `[RESAMPLES, columns]`."""
    n = len(counts)
    weights = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    return weights @ counts


def _percentiles(values: np.ndarray) -> Interval:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)
