"""Engines that outlive a call, so that the next one finds programs compiled and caches allocated."""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator

from eagle_jax.engine.core import EngineCore
from eagle_jax.engine.memory import InsufficientMemoryError

KEPT_ENGINES = 2
"""Enough to alternate between plain and speculative decoding, or between two lengths."""


class EnginePool:
    """Keeps the engines that were used last. Not many: caches are the largest thing besides the weights."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Hashable, EngineCore] = {}  # the one used last comes last

    @contextlib.contextmanager
    def engine(self, key: Hashable, make: Callable[[], EngineCore]) -> Iterator[EngineCore]:
        """Lends the kept engine with that key, else a new one; nobody else gets it meanwhile.

        If there is no memory for a new one, the kept ones are dropped first. An engine comes back without requests, also after an
        error or when a stream is closed.
        """
        with self._lock:
            engine = self._idle.pop(key, None)
        if engine is None:
            engine = self._make(make)
        try:
            yield engine
        finally:
            engine.reset()
            with self._lock:
                self._idle[key] = engine
                while len(self._idle) > KEPT_ENGINES:
                    del self._idle[next(iter(self._idle))]

    def _make(self, make: Callable[[], EngineCore]) -> EngineCore:
        try:
            return make()
        except InsufficientMemoryError:
            with self._lock:
                if not self._idle:
                    raise
                self._idle.clear()
        return make()
