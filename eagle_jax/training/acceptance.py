"""The accepted length that a head will have, read off the training forward.

A greedy chain accepts the drafts that equal the text that follows, up to the first that does not. Until then the head has seen
what it sees in the training forward, so on a text that the target wrote the rounds can be walked without decoding: start behind
the prompt, emit what is accepted and one token more, go on from there.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedRounds:
    """The rounds that a chain of drafts would take over some texts."""

    rounds: int
    emitted: int
    """Tokens that the rounds emit; the first token of each text comes from the prefill and belongs to no round."""
    accepted_at_depth: tuple[int, ...]
    """Rounds whose draft at depth d + 1 was accepted."""

    @property
    def accepted_length(self) -> float:
        """Tokens a round, the bonus token included; NaN without a round."""
        return self.emitted / self.rounds if self.rounds else float("nan")

    @property
    def rate_at_depth(self) -> tuple[float, ...]:
        """The share of rounds whose draft at depth d + 1 was accepted."""
        return tuple(count / self.rounds if self.rounds else float("nan") for count in self.accepted_at_depth)

    def __add__(self, other: "SimulatedRounds") -> "SimulatedRounds":
        depths = zip(self.accepted_at_depth, other.accepted_at_depth, strict=True)
        return SimulatedRounds(
            rounds=self.rounds + other.rounds,
            emitted=self.emitted + other.emitted,
            accepted_at_depth=tuple(a + b for a, b in depths),
        )


def walk(matches: np.ndarray, first: int, end: int, depth: int) -> SimulatedRounds:
    """Walks the rounds of one text.

    Args:
      matches: drafts that equal the text, all depths before included: their number for a draft from each position, int `[T]`. The
        row at t drafts from token t + 1, so its first draft is compared with token t + 2.
      first: index of the first token of the answer.
      end: index behind its last token.
      depth: drafts of a round, at most the number of steps `matches` was computed with.
    """
    root, rounds, emitted = first, 0, 0
    accepted_at_depth = [0] * depth
    while root < end - 1:
        accepted = min(int(matches[root - 1]), depth)
        # Cut at the end of the text, but what a round accepted beyond it is not known: it counts as accepted where it matched.
        for level in range(accepted):
            accepted_at_depth[level] += 1
        emit = min(accepted + 1, end - 1 - root)
        rounds, emitted, root = rounds + 1, emitted + emit, root + emit
    return SimulatedRounds(rounds=rounds, emitted=emitted, accepted_at_depth=tuple(accepted_at_depth))


def spans(segments: np.ndarray, assistant: np.ndarray) -> Sequence[tuple[int, int, int]]:
    """The answers in one packed row: (first token, end, segment) of each run of assistant tokens.

    Args:
      segments: int `[T]`.
      assistant: bool `[T]`.
    """
    marked = np.where(assistant, segments, 0)
    edges = np.flatnonzero(np.diff(marked, prepend=0, append=0))
    return [(int(a), int(b), int(marked[a])) for a, b in itertools.pairwise(edges) if marked[a]]
