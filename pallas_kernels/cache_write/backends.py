"""The backends of the write of rows, and which of them a program gets (see `pallas_kernels.backends`)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax

from pallas_kernels.backends import Choice, Device, first_that_does, kernel_module, require_hopper
from pallas_kernels.cache_write.reference import Part, reference_write_rows

Implementation = Literal["mosaic_gpu", "xla"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

ORDER: dict[str, tuple[Implementation, ...]] = {"cuda": ("mosaic_gpu", "xla")}
"""What is tried on each platform, first to last."""

ANYWHERE: tuple[Implementation, ...] = ("xla",)
"""What is tried on the platforms without an entry of their own."""


def choose(
    device: Device,
    buffers: Sequence[Any],
    rows: Sequence[Any],
    path: Any,
    start: Any,
    *,
    part: Part,
    implementation: Implementation | None = None,
) -> Choice:
    """Finds the first backend that does a call on a device, or checks that the one asked for does.

    Args:
      device: what the program is compiled for.
      buffers: this, `rows`, `path` and `start` are the arguments of `write_rows`, as arrays or `jax.ShapeDtypeStruct`s.
      rows: see there.
      path: see there.
      start: see there.
      part: where the new rows are in `rows`.
      implementation: the only backend allowed.

    Raises:
      NotImplementedError: no backend does it; the message gives each one's reason.
    """
    names = (implementation,) if implementation else ORDER.get(device.platform, ANYWHERE)
    arguments = (buffers, rows, path, start)
    return first_that_does("write_rows", names, lambda name: _prepared(name, device, part), arguments, device)


@functools.cache
def _prepared(name: Implementation, device: Device, part: Part) -> Callable[..., list[jax.Array]]:
    """The backend for a device, jitted so that it is traced once for equal shapes."""
    function = _load(name, device)

    def run(
        buffers: Sequence[jax.Array], rows: Sequence[jax.Array], path: jax.Array | None, start: jax.Array
    ) -> list[jax.Array]:
        return function(buffers, rows, path, start, part=part)

    run.__name__ = f"{name}_write_rows"
    return jax.jit(run)


def _load(name: Implementation, device: Device) -> Callable[..., list[jax.Array]]:
    if name == "xla":
        return reference_write_rows
    require_hopper(device)
    kernel: Callable[..., list[jax.Array]] = kernel_module(
        "pallas_kernels.cache_write.mosaic_gpu"
    ).mosaic_gpu_write_rows
    return kernel
