"""The write of rows as a JAX primitive."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from pallas_kernels.backends import Device
from pallas_kernels.cache_write.backends import Implementation, choose
from pallas_kernels.cache_write.reference import Part, reference_write_rows
from pallas_kernels.primitive import register, vary_alike

write_rows_p = Primitive("write_rows")
write_rows_p.multiple_results = True


def bind(
    buffers: Sequence[jax.Array],
    rows: Sequence[jax.Array],
    path: jax.Array | None,
    start: jax.Array,
    *,
    part: Part,
    implementation: Implementation | None,
) -> list[jax.Array]:
    """Puts the operation into the program."""
    chosen = [] if path is None else [path]
    operands = vary_alike([*buffers, *rows, *chosen, start])
    with jax.named_scope("write_rows"):
        return _call(*operands, part=part, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("part", "implementation"), inline=True)
def _call(*operands: jax.Array, part: Part, implementation: Implementation | None) -> list[jax.Array]:
    """A program of its own outside of programs, so that the backend is chosen there too."""
    return write_rows_p.bind(*operands, part=part, implementation=implementation)


def _arguments(operands: Sequence[Any], part: Part) -> tuple[list[Any], list[Any], Any, Any]:
    """Buffers, rows, path and start."""
    count = len(part.first)
    *path, start = operands[2 * count :]
    return list(operands[:count]), list(operands[count : 2 * count]), path[0] if path else None, start


def _reference(*operands: jax.Array, part: Part, **_: Any) -> list[jax.Array]:
    return reference_write_rows(*_arguments(operands, part), part=part)


def _prepare(
    device: Device, shapes: Sequence[Any], *, part: Part, implementation: Implementation | None
) -> Callable[..., list[jax.Array]]:
    function = choose(device, *_arguments(shapes, part), part=part, implementation=implementation).function
    return lambda *operands: function(*_arguments(operands, part))


register(
    write_rows_p,
    reference=_reference,
    result=lambda *operands, part, **_: list(operands[: len(part.first)]),
    prepare=_prepare,
)
