"""Engines that outlive a call, so that the next one finds programs compiled and caches allocated."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax

from eagle_jax.decoding.engine import Engine
from eagle_jax.front.memory import InsufficientMemoryError

KEPT_ENGINES = 2
"""Enough to alternate between plain and speculative decoding, or between two lengths."""


class Stopwatch:
    """Adds up seconds."""

    seconds: float = 0.0


class TimedEngine(Engine):
    """An engine that measures its prefills."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.prefills = Stopwatch()
        """Wall time of all prefills since the caller last set it to 0."""
        self._timed = False

    def compile(self) -> float:
        """As in `Engine`; waits for each chunk from then on, since otherwise it could not be told from the rounds after it."""
        seconds = super().compile()
        if not self._timed:
            assert self._programs is not None
            self._programs = dataclasses.replace(self._programs, prefill=_timed(self._programs.prefill, self.prefills))
            self._timed = True
        return seconds


def _timed(prefill: Callable[..., Any], watch: Stopwatch) -> Callable[..., Any]:
    # Holds the watch and not the engine: a cycle would keep the caches of a dropped engine until the next garbage collection.
    def run(weights: Any, state: Any, chunk: Any) -> Any:
        jax.block_until_ready(state.finish)  # rounds that are still running are not part of the prefill
        start = time.perf_counter()
        state = prefill(weights, state, chunk)
        jax.block_until_ready(state.finish)
        watch.seconds += time.perf_counter() - start
        return state

    return run


class EnginePool:
    """Keeps the engines that were used last. Not many: caches are the largest thing besides the weights."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Hashable, TimedEngine] = {}  # the one used last comes last

    @contextlib.contextmanager
    def engine(self, key: Hashable, make: Callable[[], TimedEngine]) -> Iterator[TimedEngine]:
        """Lends the kept engine with that key, else a new one; nobody else gets it meanwhile.

        If there is no memory for a new one, the kept ones are dropped first. After an error the lent engine is dropped as well:
        its buffers may have been given to a program that did not return.
        """
        with self._lock:
            engine = self._idle.pop(key, None)
        if engine is None:
            engine = self._make(make)
        try:
            yield engine
        except GeneratorExit:  # the caller closed a stream: a regular end
            self._keep(key, engine)
            raise
        else:
            self._keep(key, engine)

    def _make(self, make: Callable[[], TimedEngine]) -> TimedEngine:
        try:
            return make()
        except InsufficientMemoryError:
            with self._lock:
                if not self._idle:
                    raise
                self._idle.clear()
        return make()

    def _keep(self, key: Hashable, engine: TimedEngine) -> None:
        with self._lock:
            self._idle[key] = engine
            while len(self._idle) > KEPT_ENGINES:
                del self._idle[next(iter(self._idle))]
