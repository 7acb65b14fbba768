"""What the commands say about outputs: a line for people, numbers for programs."""

import dataclasses
import math
from typing import Any

from eagle_jax.cli.session import Session, tree_to_json
from eagle_jax.metrics import AcceptanceMetrics, Timing
from eagle_jax.outputs import RequestOutput


def summary(outputs: list[RequestOutput], timing: Timing) -> str:
    """One line about the speed and, where something was drafted, the acceptance."""
    total = total_metrics(outputs)
    speed = f"{timing.output_tokens} tokens, {timing.tokens_per_second:.1f} tokens/s"
    acceptance = f", accepted length {total.mean_acceptance_length:.2f}" if total.drafted else ""
    return f"{speed}{acceptance}{seed_of(outputs)}; compiled in {timing.compile_seconds:.1f} s before"


def seed_of(outputs: list[RequestOutput]) -> str:
    """The seed of a single output that was sampled, to be said behind something else."""
    seed = outputs[0].outputs[0].seed if len(outputs) == 1 else None
    return "" if seed is None else f", seed {seed}"


def total_metrics(outputs: list[RequestOutput]) -> AcceptanceMetrics:
    """Of all outputs together."""

    return AcceptanceMetrics.total(output.metrics for output in outputs)


def to_json(session: Session, outputs: list[RequestOutput], timing: Timing) -> dict[str, Any]:
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
                "prompt": output.prompt,
                "prompt_token_ids": output.prompt_token_ids,
                "text": output.outputs[0].text,
                "token_ids": output.outputs[0].token_ids,
                "finish_reason": output.outputs[0].finish_reason,
                "stop_reason": output.outputs[0].stop_reason,
                "seed": output.outputs[0].seed,
                "accepted_lengths": output.metrics.accepted_lengths,
            }
            for output in outputs
        ],
        "metrics": metrics_to_json(total_metrics(outputs)),
        "timing": timing_to_json(timing),
    }


def metrics_to_json(metrics: AcceptanceMetrics) -> dict[str, Any]:
    """Counts and rates; null where there was nothing to divide by."""
    return {
        "rounds": metrics.rounds,
        "drafted": metrics.drafted,
        "accepted": metrics.accepted,
        "mean_acceptance_length": _number(metrics.mean_acceptance_length),
        "acceptance_rates": [_number(rate) for rate in metrics.acceptance_rates],
        "histogram": metrics.histogram,
    }


def timing_to_json(timing: Timing) -> dict[str, Any]:
    """Every field and both rates."""
    return {
        **dataclasses.asdict(timing),
        "tokens_per_second": _number(timing.tokens_per_second),
        "decode_tokens_per_second": _number(timing.decode_tokens_per_second),
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
