"""`SamplingParams`: how one prompt is continued, in the shape that vLLM users know."""

import dataclasses
import enum
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by them would only overflow."""

MAX_LOGPROBS = 20
"""Most alternatives whose log-probabilities can be asked for, as in vLLM."""

# vLLM's parameters that ask for more than there is. Each is accepted at the value that asks for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (None, 1),
    "prompt_logprobs": (None,),
    "bad_words": (None, [], ()),
}


class SamplingMode(enum.IntEnum):
    """What a compiled round can do. A batch runs in the least class that covers all its requests."""

    GREEDY = 0
    """The likeliest token; no random number is drawn."""
    SAMPLING = 1
    """Temperature, top_k, top_p, min_p."""
    FULL = 2
    """Also penalties, logit_bias, min_tokens, allowed_token_ids and log-probabilities."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is continued.

    At temperature 0, the default (vLLM's is 1), the token with the highest logit is taken, the lowest id of equal ones; `seed`,
    `top_k`, `top_p` and `min_p` then have no effect, as in vLLM, but their range is checked. At other temperatures the token is
    drawn from the *processed distribution*. Logits are processed in one order, the same for every token however it comes about:
    `logit_bias`, `repetition_penalty`, `frequency_penalty` and `presence_penalty`, `min_tokens` and `allowed_token_ids`, as in
    vLLM; then temperature, `top_k`, `top_p`, `min_p`, as in transformers.

    Which tokens come out depends on the seed alone, not on whether they were drafted: see `docs/sampling.md`.

    The output ends at the first of these: an end-of-sequence id of the model, one of `stop_token_ids`, the completion of a stop
    string, `max_tokens`, the end of the context. `token_ids` include the token that ended it; the text does not show a stop
    string or the text of a stop id unless `include_stop_str_in_output`.

    Raises:
      ValueError: a value out of range, or one that asks for what is not supported.
      TypeError: a value of the wrong type, or an unknown parameter.
    """

    temperature: float = 0.0
    """What logits are divided by; 0, like anything below 1e-5, is greedy."""
    max_tokens: int | None = 16
    """Most tokens of the output; 0 gives an empty output, None goes on to the end of the context."""
    stop: str | Sequence[str] | None = None
    """Strings that end the output; the one completed first counts. Kept as a tuple."""
    stop_token_ids: Sequence[int] | None = None
    """Ids that end the output, besides the model's end-of-sequence ids. Kept as a tuple."""
    ignore_eos: bool = False
    """Whether to go on behind the model's end-of-sequence ids; `stop_token_ids` still count."""
    seed: int | None = None
    """The same seed gives the same output; -2^63 to 2^63 - 1. None draws a fresh seed, which the output reports."""
    top_k: int = 0
    """Keep the tokens that are no less likely than the k-th likeliest; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep a token if all that are likelier (of those that `top_k` keeps) have less than this probability together; in (0, 1].
    Equally likely tokens stay or go together."""
    min_p: float = 0.0
    """Keep the tokens at least this times as likely as the likeliest; in [0, 1]."""
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
    """Taken from the logit of every token that the output holds; -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that the output holds it; -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides the positive, and multiplies the negative, logits of tokens that prompt or output hold; greater than 0."""
    min_tokens: int = 0
    """End-of-sequence ids, stop ids and stop strings do not count before the output has so many tokens."""
    logprobs: int | None = None
    """Report the log-probability of each output token, and of so many most likely ones (0 to 20) at its place."""
    prompt_logprobs: int | None = None
    """Only None."""
    bad_words: Sequence[str] | None = None
    """Only None."""
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    """Added to the logits of these ids. Kept as a tuple of pairs."""
    allowed_token_ids: Sequence[int] | None = None
    """No other ids are ever emitted. Kept as a tuple."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and _integer("max_tokens", self.max_tokens) < 0:
            raise ValueError(f"max_tokens must be at least 0, got {self.max_tokens}")
        self._check_numbers()
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name)
            if not any(value is allowed or value == allowed for allowed in neutral):
                raise ValueError(f"{name} must be {neutral[0]!r}, got {value!r}: it is not supported so far")
            object.__setattr__(self, name, neutral[0])
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        object.__setattr__(self, "stop", self._normal_stop())
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", self._normal_bias())
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ValueError("allowed_token_ids is empty, which leaves nothing to emit")
            object.__setattr__(self, "allowed_token_ids", allowed)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs of id and bias."""
        assert self.logit_bias is None or isinstance(self.logit_bias, tuple)
        return self.logit_bias or ()

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def mode(self) -> SamplingMode:
        """The least class of rounds that can do this."""
        controls = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1, self.min_tokens)
        if any(controls) or self.logit_bias or self.allowed_token_ids is not None or self.logprobs is not None:
            return SamplingMode.FULL
        return SamplingMode.GREEDY if self.greedy else SamplingMode.SAMPLING

    def _check_numbers(self) -> None:
        numbers = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        for name in numbers:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if math.isnan(self.temperature) or self.temperature < 0 or math.isinf(self.temperature):
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} must be in [-2, 2], got {getattr(self, name)}")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be a finite number above 0, got {self.repetition_penalty}")
        if _integer("top_k", self.top_k) < -1:
            raise ValueError(f"top_k must be 0 or -1 (all tokens) or at least 1, got {self.top_k}")
        if self.seed is not None:
            check_seed(self.seed)
        if _integer("min_tokens", self.min_tokens) < 0:
            raise ValueError(f"min_tokens must be at least 0, got {self.min_tokens}")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        if self.logprobs is not None and not 0 <= _integer("logprobs", self.logprobs) <= MAX_LOGPROBS:
            raise ValueError(f"logprobs must be None or 0 to {MAX_LOGPROBS}, got {self.logprobs}")

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

    def _normal_bias(self) -> tuple[tuple[int, float], ...] | None:
        if not self.logit_bias:
            return None
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        bias = {}
        for id_, value in pairs:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"logit_bias must hold numbers, got {value!r}")
            if not math.isfinite(value):
                raise ValueError(f"logit_bias must be finite, got {value} for {id_}")
            bias[_ids("logit_bias", (id_,))[0]] = float(value)
        return tuple(sorted(bias.items()))


def check_seed(seed: Any, name: str = "seed") -> int:
    """The seed, if it is one.

    Raises:
      TypeError: no integer.
      ValueError: an integer that does not fit into 64 bits with its sign.
    """
    value = _integer(name, seed)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must be in -2^63 .. 2^63 - 1, got {value}")
    return value


def _ids(name: str, values: Sequence[int]) -> tuple[int, ...]:
    ids = tuple(_integer(name, value) for value in values)
    if ids and min(ids) < 0:
        raise ValueError(f"{name} must be ids of at least 0, got {min(ids)}")
    return ids


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
