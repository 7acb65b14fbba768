"""Engines are kept for the next call, lent to one caller at a time, and let go when they must."""

import gc
import weakref

import pytest

from eagle_jax.front.engines import KEPT_ENGINES, EnginePool, TimedEngine
from eagle_jax.front.memory import InsufficientMemoryError


class FakeEngine:
    pass


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


def test_engine_is_dropped_after_an_error_and_kept_after_an_abandoned_stream():
    pool = EnginePool()
    first = use(pool, "a")
    with pytest.raises(KeyboardInterrupt), pool.engine("a", FakeEngine):
        raise KeyboardInterrupt
    second = use(pool, "a")
    assert second is not first

    def stream():
        with pool.engine("a", FakeEngine) as engine:
            yield engine

    left = stream()
    assert next(left) is second
    left.close()
    assert use(pool, "a") is second


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
    engine = TimedEngine(target.model, None, tree=None, slots=4, max_length=256, prefill_chunk=64)
    engine.compile()
    engine.compile()
    gone = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert gone() is None
    finally:
        gc.enable()
