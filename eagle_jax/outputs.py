"""What generation returns: requests in vLLM's shape, columns for the plain functions, deltas for streams."""

import dataclasses
from typing import Literal

from eagle_jax.metrics import AcceptanceMetrics, BatchMetrics, Timing

FinishReason = Literal["stop", "length", "abort"]
"""Ended by an end-of-sequence id, a stop id or a stop string; by the budget or the context; or by whoever asked for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logprob:
    """A token at one place of an output."""

    logprob: float
    """Natural logarithm of its probability; see `logprobs_mode` for which."""
    rank: int
    """1 for the likeliest; tokens that are exactly as likely count as likelier."""
    decoded_token: str | None
    """Its text alone; None where there is no text."""


PositionLogprobs = dict[int, Logprob]
"""By token id: the emitted token first, then the likeliest ones, best first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """The continuation of a prompt."""

    index: int
    """Always 0: there is one continuation a prompt."""
    text: str | None
    """None without a tokenizer, and with `detokenize=False`."""
    token_ids: list[int]
    """The token that ended the output included."""
    finish_reason: FinishReason | None
    """None in an output that goes on."""
    stop_reason: int | str | None
    """The stop id or stop string that ended the output; None for the model's end-of-sequence ids and for "length"."""
    seed: int | None = None
    """What the tokens were drawn with; None at temperature 0. The same prompt and seed give the same output."""
    logprobs: list[PositionLogprobs] | None = None
    """One entry a token, if they were asked for."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of the output as a whole, if log-probabilities were asked for."""
        if self.logprobs is None:
            return None
        return sum(at[id_].logprob for at, id_ in zip(self.logprobs, self.token_ids, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A prompt and its continuation."""

    request_id: str
    """What `AsyncLLM` was given; of `LLM`, the number of the request in its life."""
    prompt: str | None
    """The prompt as text, chats as their template renders them; None for token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """One entry."""
    metrics: AcceptanceMetrics
    """Counted when the output has ended."""
    finished: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """Columns with one entry a prompt, in the order of the prompts."""

    token_ids: list[list[int]]
    """Output tokens, the one that ended the output included."""
    texts: list[str | None]
    """Output texts; None where there is no tokenizer."""
    finish_reasons: list[FinishReason | None]
    stop_reasons: list[int | str | None]
    """See `CompletionOutput.stop_reason`."""
    prompt_token_ids: list[list[int]]
    metrics: BatchMetrics
    """Of each row; `metrics.total` of all rows together; `metrics.timing` of the call."""
    seeds: list[int | None]
    """What each output was drawn with; None at temperature 0."""
    logprobs: list[list[PositionLogprobs] | None]
    """See `CompletionOutput.logprobs`."""

    @property
    def timing(self) -> Timing:
        """What the call took."""
        return self.metrics.timing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """What was added to one output of a stream. The texts of its deltas concatenate to the output's text, the ids to its ids."""

    index: int
    """Place of the prompt in the call."""
    text: str
    """New text, whole characters only; always "" where there is no text."""
    token_ids: list[int]
    """New tokens. Text and ids that a stop string might still take back are held until that is decided."""
    finish_reason: FinishReason | None = None
    """Set in the last delta of an output."""
    stop_reason: int | str | None = None
    """See `CompletionOutput.stop_reason`; set in the last delta."""
    seed: int | None = None
    """See `CompletionOutput.seed`; set in the last delta."""
    logprobs: list[PositionLogprobs] | None = None
    """Of the new tokens, if log-probabilities were asked for."""
    metrics: AcceptanceMetrics | None = None
    """Set in the last delta."""
    request_id: str = ""
    """Which request it belongs to."""
    output: RequestOutput | None = None
    """The whole; set in the last delta."""
    error: Exception | None = None
    """Why the output could not go on, in the last delta of one that could not."""

    @property
    def finished(self) -> bool:
        """Whether it is the last one of its output."""
        return self.output is not None
