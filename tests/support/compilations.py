"""Counts what XLA compiles."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def counting() -> Iterator[list[str]]:
    """The names of the programs that are compiled meanwhile, stray operations of the host included."""
    names: list[str] = []

    def listen(event: str, duration: float, **details: Any) -> None:
        if event == COMPILED:
            names.append(details.get("fun_name", "?"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
