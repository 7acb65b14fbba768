"""Engines are kept for the next call, lent to one caller at a time, and let go when they must."""

import gc
import weakref

import pytest
from support.drive import make_engine, make_request, serve

from eagle_jax.engine.memory import InsufficientMemoryError
from eagle_jax.engine.pool import KEPT_ENGINES, EnginePool


class FakeEngine:
    requests = 0

    def reset(self):
        self.requests = 0


def use(pool, key):
    with pool.engine(key, FakeEngine) as engine:
        return engine


def test_engine_is_kept_for_the_same_key():
    pool = EnginePool()
    first = use(pool, "a")
    assert use(pool, "a") is first
    assert use(pool, "b") is not first
    assert use(pool, "a") is first


def test_two_callers_never_share_an_engine():
    pool = EnginePool()
    with pool.engine("a", FakeEngine) as outer, pool.engine("a", FakeEngine) as inner:
        assert outer is not inner


def test_only_the_last_ones_are_kept():
    pool = EnginePool()
    engines = [weakref.ref(use(pool, key)) for key in range(KEPT_ENGINES + 2)]
    gc.collect()
    assert [engine() is not None for engine in engines] == [False] * 2 + [True] * KEPT_ENGINES


def test_an_engine_comes_back_without_requests_after_an_error_and_after_an_abandoned_stream():
    pool = EnginePool()
    first = use(pool, "a")
    first.requests = 3
    with pytest.raises(KeyboardInterrupt), pool.engine("a", FakeEngine):
        raise KeyboardInterrupt
    assert first.requests == 0

    def stream():
        with pool.engine("a", FakeEngine) as engine:
            engine.requests = 2
            yield engine

    left = stream()
    assert next(left) is first
    left.close()
    assert first.requests == 0
    assert use(pool, "a") is first


def test_kept_engines_make_room_for_one_that_would_not_fit():
    pool = EnginePool()
    kept = weakref.ref(use(pool, "a"))

    def make():
        if kept() is not None:
            raise InsufficientMemoryError("full")
        return FakeEngine()

    gc.disable()  # a cycle would keep the engine's caches
    try:
        with pool.engine("b", make) as engine:
            assert engine is not None
    finally:
        gc.enable()

    def never():
        raise InsufficientMemoryError("full")

    with pytest.raises(InsufficientMemoryError), EnginePool().engine("a", never):
        pass


def test_dropped_engine_leaves_at_once(tiny):
    target, _ = tiny
    engine = make_engine(target.model, None, slots=4, max_length=256, prefill_chunk=64)
    serve(engine, [make_request([1, 2], 3)])
    gone = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert gone() is None
    finally:
        gc.enable()
