"""What the commands say about outputs: a line for people, numbers for programs."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from eagle_jax.cli.session import Session, tree_to_json

if TYPE_CHECKING:
    from eagle_jax.front.rows import RowResult
    from eagle_jax.metrics import AcceptanceMetrics, Timing


def summary(rows: "list[RowResult]", timing: "Timing") -> str:
    """One line about the speed and, where something was drafted, the acceptance."""
    total = total_metrics(rows)
    speed = f"{timing.output_tokens} tokens, {timing.tokens_per_second:.1f} tokens/s"
    acceptance = f", accepted length {total.mean_acceptance_length:.2f}" if total.drafted else ""
    return f"{speed}{acceptance}{seed_of(rows)}; compiled in {timing.compile_seconds:.1f} s before"


def seed_of(rows: "list[RowResult]") -> str:
    """The seed of a single output that was sampled, to be said behind something else."""
    return f", seed {rows[0].seed}" if len(rows) == 1 and rows[0].seed is not None else ""


def total_metrics(rows: "list[RowResult]") -> "AcceptanceMetrics":
    """Of all rows together."""
    from eagle_jax.metrics import AcceptanceMetrics

    return AcceptanceMetrics.total(row.metrics for row in rows)


def to_json(session: Session, rows: "list[RowResult]", timing: "Timing") -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "model": session.target.name,
        "draft": None if session.draft is None else session.draft.name,
        "tree": tree_to_json(session.tree),
        "dtype": str(session.target.model.dtype),
        "backend": dataclasses.asdict(session.backend),
        "attention": dict(timing.attention),
        "outputs": [
            {
                "prompt": row.prompt.text,
                "prompt_token_ids": row.prompt.token_ids,
                "text": row.text,
                "token_ids": row.token_ids,
                "finish_reason": row.finish_reason,
                "stop_reason": row.stop_reason,
                "seed": row.seed,
                "accepted_lengths": row.metrics.accepted_lengths,
            }
            for row in rows
        ],
        "metrics": metrics_to_json(total_metrics(rows)),
        "timing": timing_to_json(timing),
    }


def metrics_to_json(metrics: "AcceptanceMetrics") -> dict[str, Any]:
    """Counts and rates; null where there was nothing to divide by."""
    return {
        "rounds": metrics.rounds,
        "drafted": metrics.drafted,
        "accepted": metrics.accepted,
        "mean_acceptance_length": _number(metrics.mean_acceptance_length),
        "acceptance_rates": [_number(rate) for rate in metrics.acceptance_rates],
        "histogram": metrics.histogram,
    }


def timing_to_json(timing: "Timing") -> dict[str, Any]:
    """Every field and both rates."""
    return {
        **dataclasses.asdict(timing),
        "tokens_per_second": _number(timing.tokens_per_second),
        "decode_tokens_per_second": _number(timing.decode_tokens_per_second),
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
