"""Statistics of speculative decoding: what a request accepted, what a call took, and counters under vLLM's names.

Definitions, the same as vLLM's where it has them:

- A *round* drafts a tree, verifies it in one forward of the target and emits the accepted drafts and one more token, the bonus.
  The first token of an output comes from the prefill and belongs to no round.
- *Accepted length* of a round: the tokens it emitted, bonus included, after cutting at a stop or the budget. So
  `len(token_ids) == 1 + sum(accepted_lengths)` for every output that is not empty.
- *Mean acceptance length*: their sum over the number of rounds. vLLM's `1 + accepted / drafts` is the same number as long as no
  round was cut.
- *Drafted*: nodes of the trees without the roots: `num_speculative_tokens` a round for a chain, `total_tokens - 1` for a tree.
- *Accepted*: drafted tokens that the target agreed with, without bonus tokens and before cutting, as vLLM counts them.
- *Acceptance at depth d* (counted from 1): rounds that accepted a draft at depth d, before cutting. The unconditional rate
  divides by all rounds (vLLM's per-position rate), the conditional one by the rounds that accepted a draft at depth d - 1.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import overload


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptanceMetrics:
    """What the rounds of one request, or of several together, accepted. Plain decoding drafts nothing: every round emits 1."""

    accepted_lengths: list[int]
    """Tokens emitted by each round, bonus included, after cutting; of several requests one after the other."""
    accepted_at_depth: list[int]
    """Rounds that accepted a draft at depth d + 1, before cutting; one entry for each depth a tree can accept."""
    drafted: int
    """Drafted tokens: nodes of all trees without their roots."""
    plain_rounds: int = 0
    """Rounds that drafted nothing, among those that could (adaptive speculation decodes plainly for a while)."""

    @staticmethod
    def total(parts: Iterable["AcceptanceMetrics"]) -> "AcceptanceMetrics":
        """All requests together."""
        parts = list(parts)
        depth = max((len(part.accepted_at_depth) for part in parts), default=0)
        at_depth = [0] * depth
        for part in parts:
            for d, count in enumerate(part.accepted_at_depth):
                at_depth[d] += count
        return AcceptanceMetrics(
            accepted_lengths=[length for part in parts for length in part.accepted_lengths],
            accepted_at_depth=at_depth,
            drafted=sum(part.drafted for part in parts),
            plain_rounds=sum(part.plain_rounds for part in parts),
        )

    @property
    def rounds(self) -> int:
        """Forwards of the target after the prefill."""
        return len(self.accepted_lengths)

    @property
    def drafts(self) -> int:
        """Rounds that drafted: vLLM's `num_drafts`."""
        return self.rounds - self.plain_rounds

    @property
    def accepted(self) -> int:
        """Drafted tokens that the target agreed with, before cutting."""
        return sum(self.accepted_at_depth)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round, bonus included; NaN if no round was run."""
        return sum(self.accepted_lengths) / self.rounds if self.rounds else math.nan

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted of the drafted tokens, 0 to 1; NaN if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else math.nan

    @property
    def acceptance_rates(self) -> list[float]:
        """Unconditional acceptance at each depth: rounds that accepted a draft there, of all rounds. NaN without rounds."""
        return [count / self.rounds if self.rounds else math.nan for count in self.accepted_at_depth]

    @property
    def conditional_acceptance_rates(self) -> list[float]:
        """Acceptance at each depth among the rounds that accepted one at the depth before; NaN where there are none."""
        before = [self.rounds, *self.accepted_at_depth]
        return [
            count / tried if tried else math.nan for count, tried in zip(self.accepted_at_depth, before, strict=False)
        ]

    @property
    def histogram(self) -> list[int]:
        """Rounds by accepted length: entry i counts those that emitted i + 1 tokens, for i = 0 up to the deepest depth."""
        counts = [0] * (len(self.accepted_at_depth) + 1)
        for length in self.accepted_lengths:
            counts[length - 1] += 1
        return counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Wall time of one call, in seconds. Compilation is apart, and 0 where the programs were there already."""

    compile_seconds: float
    prefill_seconds: float
    """From the first chunk of a prompt to its first token, over all prompts; rounds of other slots do not run meanwhile."""
    decode_seconds: float
    """Everything else: rounds, reading their tokens and, in a stream, the time the caller took between deltas."""
    prompt_tokens: int
    output_tokens: int
    decoded_tokens: int
    """Output tokens that came from rounds: all but the first of each output."""
    attention: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Backend of tree attention in the prefill ("prefill"), the verification ("verify") and the head ("draft"), by the names of
    `pallas_kernels.tree_attention`; empty if nothing was run."""

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second, prefill included and compilation not; NaN if nothing was run."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.output_tokens / seconds if seconds else math.nan

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens that came from rounds, a second of decoding; NaN if nothing was decoded."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else math.nan


FEW_ACCEPTED = 1.05
"""A mean acceptance length below it says that head and target hardly belong together."""
ALL_ACCEPTED = 0.98
"""A share of rounds above it that accept a draft at every depth is more than heads reach on ordinary text."""
_ENOUGH_ROUNDS = 100


def acceptance_warning(rounds: int, accepted_at_depth: Sequence[int]) -> str | None:
    """What is suspicious about an acceptance, in a sentence; None if nothing is, or after fewer than 100 rounds.

    Args:
      rounds: rounds that drafted.
      accepted_at_depth: those that accepted a draft at depth d + 1.
    """
    if rounds < _ENOUGH_ROUNDS or not accepted_at_depth:
        return None
    length = 1 + sum(accepted_at_depth) / rounds
    deepest = accepted_at_depth[-1] / rounds
    if length < FEW_ACCEPTED:
        return (
            f"the mean acceptance length is {length:.2f}, so the target rejects nearly every draft. The head may be one for "
            "another target, or read other layers than it was trained with: see `eagle-jax inspect`"
        )
    if deepest > ALL_ACCEPTED:
        return (
            f"{100 * deepest:.0f} % of the rounds accepted a draft at every depth, which no head does on "
            "ordinary text: the outputs may repeat themselves, or the draft is the target's own text"
        )
    return None


class BatchMetrics(Sequence[AcceptanceMetrics]):
    """The metrics of each row of a call, in order; of all rows together; and what the call took."""

    def __init__(self, rows: Iterable[AcceptanceMetrics], timing: Timing):
        self._rows = tuple(rows)
        self.total = AcceptanceMetrics.total(self._rows)
        self.timing = timing

    @overload
    def __getitem__(self, index: int) -> AcceptanceMetrics: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[AcceptanceMetrics]: ...

    def __getitem__(self, index: int | slice) -> AcceptanceMetrics | Sequence[AcceptanceMetrics]:
        """One row, or several."""
        return self._rows[index]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def __iter__(self) -> Iterator[AcceptanceMetrics]:
        """The rows in order."""
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"BatchMetrics(rows={list(self._rows)!r}, timing={self.timing!r})"

    @property
    def mean_acceptance_length(self) -> float:
        """That of all rows together: every round counts the same."""
        return self.total.mean_acceptance_length


@dataclasses.dataclass(frozen=True)
class Counter:
    """A number that only grows."""

    name: str
    value: int


@dataclasses.dataclass(frozen=True)
class Vector:
    """Numbers that only grow, one for each position."""

    name: str
    values: list[int]


class CumulativeCounters:
    """Counters over the life of an `LLM`, under vLLM's names. Requests count when they end; abandoned streams do not."""

    def __init__(self, depth: int | None):
        """Args: depth: drafts that one round can accept at most; None for plain decoding, which has no draft counters."""
        self._at_depth = None if depth is None else [0] * depth
        self._drafts = self._draft_tokens = self._prompt_tokens = self._generation_tokens = 0

    def add(self, metrics: AcceptanceMetrics | None, prompt_tokens: int, output_tokens: int) -> None:
        """Counts one finished request; without `metrics` its tokens alone, since its rounds were told to accept nothing."""
        self._prompt_tokens += prompt_tokens
        self._generation_tokens += output_tokens
        if self._at_depth is not None and metrics is not None:
            self._drafts += metrics.drafts
            self._draft_tokens += metrics.drafted
            self._at_depth = [a + b for a, b in zip(self._at_depth, metrics.accepted_at_depth, strict=True)]

    @property
    def warning(self) -> str | None:
        """What is suspicious about the acceptance so far (`acceptance_warning`)."""
        return acceptance_warning(self._drafts, self._at_depth or ())

    def read(self) -> list[Counter | Vector]:
        """The counters as they stand."""
        counters: list[Counter | Vector] = [
            Counter("vllm:prompt_tokens", self._prompt_tokens),
            Counter("vllm:generation_tokens", self._generation_tokens),
        ]
        if self._at_depth is not None:
            counters += [
                Counter("vllm:spec_decode_num_drafts", self._drafts),
                Counter("vllm:spec_decode_num_draft_tokens", self._draft_tokens),
                Counter("vllm:spec_decode_num_accepted_tokens", sum(self._at_depth)),
                Vector("vllm:spec_decode_num_accepted_tokens_per_pos", list(self._at_depth)),
            ]
        return counters
