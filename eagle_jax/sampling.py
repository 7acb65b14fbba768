"""`SamplingParams`: how one prompt is continued, in the shape that vLLM users know."""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

# vLLM's parameters that change the distribution or ask for more output. Each is accepted at the value that asks for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (None, 1),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "bad_words": (None, [], ()),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is continued.

    Decoding is greedy: the token with the highest logit is taken, the lowest id of equal ones. `temperature` is therefore 0, also
    the default (vLLM's is 1), and what needs sampling or changed logits raises. At temperature 0 `seed`, `top_k`, `top_p`
    and `min_p` have no effect, as in vLLM; their range is still checked.

    The output ends at the first of these: an end-of-sequence id of the model, one of `stop_token_ids`, the completion of a stop
    string, `max_tokens`, the end of the context. `token_ids` include the token that ended it; the text does not show a stop
    string or the text of a stop id unless `include_stop_str_in_output`.

    Raises:
      ValueError: a value out of range, or one that asks for what greedy decoding cannot give.
      TypeError: a value of the wrong type, or an unknown parameter.
    """

    temperature: float = 0.0
    """0: greedy."""
    max_tokens: int | None = 16
    """Most tokens of the output; 0 gives an empty output, None goes on to the end of the context."""
    stop: str | Sequence[str] | None = None
    """Strings that end the output; the one completed first counts. Kept as a tuple."""
    stop_token_ids: Sequence[int] | None = None
    """Ids that end the output, besides the model's end-of-sequence ids. Kept as a tuple."""
    ignore_eos: bool = False
    """Whether to go on behind the model's end-of-sequence ids; `stop_token_ids` still count."""
    seed: int | None = None
    """No effect at temperature 0."""
    top_k: int = 0
    """0 or -1, or at least 1. No effect at temperature 0."""
    top_p: float = 1.0
    """In (0, 1]. No effect at temperature 0."""
    min_p: float = 0.0
    """In [0, 1]. No effect at temperature 0."""
    include_stop_str_in_output: bool = False
    """Whether the text shows the stop string, or the text of the stop id, that ended it."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    detokenize: bool = True
    """Whether there is a text at all."""
    n: int = 1
    """Only 1."""
    best_of: int | None = None
    """Only None or 1."""
    presence_penalty: float = 0.0
    """Only 0."""
    frequency_penalty: float = 0.0
    """Only 0."""
    repetition_penalty: float = 1.0
    """Only 1."""
    min_tokens: int = 0
    """Only 0."""
    logprobs: int | None = None
    """Only None."""
    prompt_logprobs: int | None = None
    """Only None."""
    bad_words: Sequence[str] | None = None
    """Only None."""
    logit_bias: dict[int, float] | None = None
    """Only None."""
    allowed_token_ids: Sequence[int] | None = None
    """Only None."""

    def __post_init__(self) -> None:
        self._check_sampling()
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name)
            if not any(value is allowed or value == allowed for allowed in neutral):
                raise ValueError(
                    f"{name} must be {neutral[0]!r}, got {value!r}: only plain greedy decoding is supported so far"
                )
            object.__setattr__(self, name, neutral[0])
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.max_tokens is not None and _integer("max_tokens", self.max_tokens) < 0:
            raise ValueError(f"max_tokens must be at least 0, got {self.max_tokens}")
        object.__setattr__(self, "stop", self._normal_stop())
        ids = () if self.stop_token_ids is None else tuple(_integer("stop_token_ids", i) for i in self.stop_token_ids)
        if ids and min(ids) < 0:
            raise ValueError(f"stop_token_ids must be ids of at least 0, got {min(ids)}")
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    def _check_sampling(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if math.isnan(self.temperature) or self.temperature < 0 or math.isinf(self.temperature):
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature}")
        if self.temperature > 0:
            raise ValueError(
                f"temperature must be 0, got {self.temperature}: only greedy decoding is supported so far, no sampling"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if _integer("top_k", self.top_k) < -1:
            raise ValueError(f"top_k must be 0 or -1 (all tokens) or at least 1, got {self.top_k}")
        if self.seed is not None:
            _integer("seed", self.seed)

    def _normal_stop(self) -> tuple[str, ...]:
        stops = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for stop in stops:
            if not isinstance(stop, str):
                raise TypeError(f"stop must be a string or strings, got {stop!r}")
            if not stop:
                raise ValueError("stop has an empty string, which would end every output before its first character")
        if stops and not self.detokenize:
            raise ValueError(f"stop {stops!r} needs the text, so detokenize must be True")
        return stops


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
