"""Seeds for requests that give none."""

import random

_BITS = 53
"""Seeds are reported, and this many bits survive every JSON reader."""


class SeedSource:
    """Draws a seed for each request that has none: from the system, or a reproducible sequence if given a seed itself."""

    def __init__(self, seed: int | None = None):
        self._random = random.SystemRandom() if seed is None else random.Random(seed)

    def draw(self) -> int:
        """A seed of at least 0."""
        return self._random.getrandbits(_BITS)
