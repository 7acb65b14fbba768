"""How many rounds a dispatch has, where its tokens are to be read every so often."""

import time

FIRST_ROUNDS = 4
"""Rounds of a dispatch whose length in seconds is given, before anything is known of their time; in several processes,
always."""


class Pace:
    """How many rounds a dispatch has: always as many, or as many as take `seconds`."""

    def __init__(self, rounds: int, seconds: float | None = None):
        self.rounds, self._seconds = rounds, seconds
        self._last: float | None = None
        self._left_out = 0.0

    def after(self, rounds: int) -> None:
        """To be called whenever a dispatch has been read, with the number of its rounds.

        The next dispatch runs while this one is read, so the time since the last call, less what the reader of the updates took,
        is that of a dispatch or what was left to wait for of it. Prefills in between count too; the dispatch after them is
        shorter for once.
        """
        if self._seconds is None:
            return
        now = time.perf_counter()
        if self._last is not None and rounds > 0:
            took = max(now - self._last - self._left_out, 1e-9)
            self.rounds = max(1, min(int(self._seconds * rounds / took), 2 * self.rounds))
        self._last, self._left_out = now, 0.0

    def leave_out(self, seconds: float) -> None:
        """Time since the last call of `after` that the dispatch is not to blame for."""
        self._left_out += seconds
