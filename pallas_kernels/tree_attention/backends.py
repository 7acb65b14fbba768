"""The backends of tree attention, and which of them a program gets (see `pallas_kernels.backends`)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from pallas_kernels.backends import Choice, Device, first_that_does, kernel_module, require_hopper

Implementation = Literal["mosaic_tpu", "mosaic_gpu", "xla_blocked", "xla_positioned", "xla"]
Function = Callable[..., jax.Array]

ORDER: dict[str, tuple[Implementation, ...]] = {
    "tpu": ("mosaic_tpu", "xla_blocked"),
    "cuda": ("mosaic_gpu", "xla_blocked"),
}
"""What is tried on each platform, first to last."""

ANYWHERE: tuple[Implementation, ...] = ("xla_blocked",)
"""What is tried on the platforms without an entry of their own, among them the CPU."""


def choose(
    device: Device, arrays: Sequence[Any], options: dict[str, Any], implementation: Implementation | None = None
) -> Choice:
    """Finds the first backend that does a call on a device, or checks that the one asked for does.

    Args:
      device: what the program is compiled for.
      arrays: the arguments of `tree_attention` up to `tail_mask`, and `prefix_start`, as arrays or `jax.ShapeDtypeStruct`s.
      options: its `scale` and `soft_cap`.
      implementation: the only backend allowed.

    Raises:
      NotImplementedError: no backend does it; the message gives each one's reason.
    """
    names = (implementation,) if implementation else ORDER.get(device.platform, ANYWHERE)
    fixed = tuple(options.items())
    return first_that_does("tree_attention", names, lambda name: _prepared(name, device, fixed), arrays, device)


@functools.cache
def _prepared(name: Implementation, device: Device, options: tuple[tuple[str, Any], ...]) -> Function:
    """The backend for a device as a function of the arrays alone, jitted so that it is traced once for equal shapes."""
    function = _LOADERS[name](device)

    def run(*arrays: Any) -> jax.Array:
        *first, prefix_start = arrays
        return function(*first, prefix_start=prefix_start, **dict(options))

    run.__name__ = f"{name}_tree_attention"
    return jax.jit(run)


def _mosaic_tpu(device: Device) -> Function:
    if device.platform != "tpu":
        raise NotImplementedError(f"it runs on TPUs, and this program is compiled for {device.platform}")
    return functools.partial(_kernel("mosaic_tpu"), device_kind=device.kind)


def _mosaic_gpu(device: Device) -> Function:
    require_hopper(device)
    return _kernel("mosaic_gpu")


def _kernel(name: str) -> Function:
    return getattr(kernel_module(f"pallas_kernels.tree_attention.{name}"), f"{name}_tree_attention")


def _xla_blocked(device: Device) -> Function:
    from pallas_kernels.tree_attention.blocked import block_of, blocked_tree_attention

    return functools.partial(blocked_tree_attention, block=block_of(device.platform))


def _xla_positioned(device: Device) -> Function:
    del device
    from pallas_kernels.tree_attention.positioned import positioned_tree_attention

    return positioned_tree_attention


def _xla(device: Device) -> Function:
    del device
    from pallas_kernels.tree_attention.reference import reference_tree_attention

    return reference_tree_attention


_LOADERS: dict[Implementation, Callable[[Device], Function]] = {
    "mosaic_tpu": _mosaic_tpu,
    "mosaic_gpu": _mosaic_gpu,
    "xla_blocked": _xla_blocked,
    "xla_positioned": _xla_positioned,
    "xla": _xla,
}
"""Each gives the backend's function for a device. What it needs is imported there, so that nobody loads another platform's."""

IMPLEMENTATIONS = tuple(_LOADERS)
