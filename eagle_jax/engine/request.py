"""A request: one prompt to be continued, as the engine takes it."""

import dataclasses
import functools
from collections.abc import Sequence

from eagle_jax.models import LlamaConfig
from eagle_jax.sampling import SamplingMode, SamplingParams

GREEDY = SamplingParams()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to be continued."""

    request_id: str
    """No other request in the engine has it."""
    prompt_token_ids: Sequence[int]
    """At least one, each in the vocabulary."""
    max_new_tokens: int
    """Most tokens of the output; the sequence also ends at the engine's `max_model_len`. 0 gives an empty output."""
    params: SamplingParams = GREEDY
    """How tokens are chosen and what ends the output. Where tokens are drawn its seed is given, else that is 0."""
    eos_token_ids: Sequence[int] = ()
    """End-of-sequence ids of the model."""
    prompt: str | None = None
    """The prompt as text, for the output."""
    index: int = 0
    """Place of the prompt in its call, for the output."""
    least_mode: SamplingMode = SamplingMode.GREEDY
    """The request runs in rounds of this mode or a higher one, so that those of one call share their programs."""
    accept_limit: int | None = None
    """Most drafts that a round accepts, in a shape-invariant engine; 0 decodes plainly, None is no limit."""
    streaming: bool = False
    """Whether text is wanted before the output has ended."""
    rounds_per_dispatch: int | None = None
    """Most rounds between two looks at the tokens."""
    seconds_per_dispatch: float | None = None
    """About how long that may be, by the clock."""

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end the output; the id itself is part of it."""
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*eos, *(self.params.stop_token_ids or ()))))

    @functools.cached_property
    def mode(self) -> SamplingMode:
        """The least class of rounds that covers the request."""
        return max(self.params.mode, self.least_mode)


def check_params(params: SamplingParams, config: LlamaConfig, *, has_tokenizer: bool) -> None:
    """Raises ValueError for parameters that a model cannot honour: ids outside its vocabulary, text without a tokenizer."""
    if params.stop_strings and not has_tokenizer:
        raise ValueError(
            f"stop {list(params.stop_strings)!r} needs a tokenizer, which the target does not have; use stop_token_ids"
        )
    for name, ids in (
        ("stop_token_ids", list(params.stop_token_ids or ())),
        ("logit_bias", [id_ for id_, _ in params.biases]),
        ("allowed_token_ids", list(params.allowed_token_ids or ())),
    ):
        if beyond := [id_ for id_ in ids if id_ >= config.vocab_size]:
            raise ValueError(f"{name} has {beyond[0]}; ids of this model are 0 to {config.vocab_size - 1}")
    eos = () if params.ignore_eos else config.eos_token_ids
    allowed = params.allowed_token_ids
    if params.min_tokens and allowed is not None and set(allowed) <= {*eos, *(params.stop_token_ids or ())}:
        raise ValueError(
            f"allowed_token_ids {list(allowed)} are all ids that end the output, which leaves nothing to emit before "
            f"min_tokens {params.min_tokens}"
        )
