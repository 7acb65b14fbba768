"""The near-tie rule: two correct float32 programs may choose differently where the target itself is undecided."""

from collections.abc import Callable, Sequence

import numpy as np

RELATIVE_GAP = 1e-5
TOKENS_PER_TIE = 10_000


class NearTies:
    """Compares token sequences, forgives near-ties, and counts them.

    Args:
      logits: float64 logits `[V]` after a prefix of token ids.
    """

    def __init__(self, logits: Callable[[Sequence[int]], np.ndarray] | None = None):
        self.logits = logits
        self.tokens = 0
        self.ties = 0

    def compare(
        self,
        got: Sequence[int],
        wanted: Sequence[int],
        prompt: Sequence[int],
        logits: Callable[[Sequence[int]], np.ndarray] | None = None,
    ) -> bool:
        """Asserts that both continuations of the prompt are the same, up to the first near-tie if there is one.

        Returns:
          True if they are the same as a whole.
        """
        got, wanted = list(got), list(wanted)
        self.tokens += len(wanted)
        if got == wanted:
            return True
        pairs = zip(got, wanted, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(wanted)))
        assert at < min(len(got), len(wanted)), f"lengths differ: {len(got)} tokens, {len(wanted)} wanted"
        measure = logits or self.logits
        assert measure is not None
        values = measure([*prompt, *wanted[:at]])
        gap = abs(values[got[at]] - values[wanted[at]]) / np.abs(values).max()
        others = np.delete(values, [got[at], wanted[at]])
        # Both must be the best two: a tie between losers excuses nothing.
        top = (
            not others.size
            or min(values[got[at]], values[wanted[at]]) >= others.max() - RELATIVE_GAP * np.abs(values).max()
        )
        assert all((gap < RELATIVE_GAP, top)), (
            f"token {at} is {got[at]} instead of {wanted[at]}; their logits are {gap:.1e} of the largest apart, which is no tie"
        )
        self.ties += 1
        print(
            f"near-tie at token {at} of a continuation of {len(prompt)} tokens: {got[at]} or {wanted[at]}, {gap:.1e} apart"
        )
        return False

    def check(self) -> None:
        """Fails if there were more ties than chance explains."""
        print(f"{self.ties} near-ties in {self.tokens} tokens")
        assert self.ties * TOKENS_PER_TIE <= self.tokens, f"{self.ties} near-ties in {self.tokens} tokens are too many"
