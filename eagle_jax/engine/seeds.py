"""Seeds for requests that give none."""

import random

from eagle_jax.parallel.hosts import int_of_first_process

_BITS = 53
"""Seeds are reported, and this many bits survive every JSON reader."""


class SeedSource:
    """Draws a seed for each request that has none: from the system, or a reproducible sequence if given a seed itself.

    `shared`: several processes decode together and must draw the same; those of the first are everybody's.
    """

    def __init__(self, seed: int | None = None, *, shared: bool = False):
        if seed is None and shared:
            seed = int_of_first_process(random.SystemRandom().getrandbits(_BITS))
        self._random = random.SystemRandom() if seed is None else random.Random(seed)

    def draw(self) -> int:
        """A seed of at least 0."""
        return self._random.getrandbits(_BITS)
