"""The backends of the write of rows, and which of them a program gets.

They are chosen as those of tree attention are (`pallas_kernels.tree_attention.backends`): once, while the program is lowered, and
the first that does not raise `NotImplementedError` is taken.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax

from pallas_kernels.tree_attention.backends import Choice, Device

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
    implementation: Implementation | None = None,
) -> Choice:
    """Finds the first backend that does a call on a device, or checks that the one asked for does.

    Args:
      device: what the program is compiled for.
      buffers: this, `rows`, `path` and `start` are the arguments of `write_rows`, as arrays or `jax.ShapeDtypeStruct`s.
      rows: see there.
      path: see there.
      start: see there.
      implementation: the only backend allowed.

    Raises:
      NotImplementedError: no backend does it; the message gives each one's reason.
    """
    names = (implementation,) if implementation else ORDER.get(device.platform, ANYWHERE)
    refusals: dict[str, str] = {}
    for name in names:
        try:
            function = _prepared(name, device)
            jax.eval_shape(function, buffers, rows, path, start)
        except NotImplementedError as error:
            refusals[name] = str(error)
        else:
            return Choice(name, refusals, function)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise NotImplementedError(f"write_rows cannot be done on {device.kind or device.platform}: {reasons}")


@functools.cache
def _prepared(name: Implementation, device: Device) -> Callable[..., list[jax.Array]]:
    """The backend for a device, jitted so that it is traced once for equal shapes."""
    function = _load(name, device)

    def run(
        buffers: Sequence[jax.Array], rows: Sequence[jax.Array], path: jax.Array | None, start: jax.Array
    ) -> list[jax.Array]:
        return function(buffers, rows, path, start)

    run.__name__ = f"{name}_write_rows"
    return jax.jit(run)


def _load(name: Implementation, device: Device) -> Callable[..., list[jax.Array]]:
    if name == "xla":
        from pallas_kernels.cache_write.reference import reference_write_rows

        return reference_write_rows
    if device.platform != "cuda":
        raise NotImplementedError(f"it runs on NVIDIA GPUs, and this program is compiled for {device.platform}")
    if device.compute_capability != "9.0":
        raise NotImplementedError(
            f"it needs a Hopper GPU (compute capability 9.0), and this is {device.kind or 'a GPU of unknown kind'} "
            f"({device.compute_capability or 'unknown'})"
        )
    try:
        module = importlib.import_module("pallas_kernels.cache_write.mosaic_gpu")
    except (
        ImportError,
        AttributeError,
    ) as error:  # kernel languages are experimental parts of JAX that move between versions
        raise NotImplementedError(f"it needs a part of JAX that this version lacks: {error}") from error
    return module.mosaic_gpu_write_rows
