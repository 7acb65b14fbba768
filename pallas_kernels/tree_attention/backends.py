"""The backends of tree attention, and which of them a program gets.

The choice is made once, while the program is lowered: only then are the platform and the kind of device known for which it is
compiled, which need not be those of this process (ahead-of-time compilation). The platform's backends are tried in order; one
that cannot do the shapes, the dtypes or the device raises `NotImplementedError` while it is traced, and the next is tried.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

Implementation = Literal["mosaic_tpu", "mosaic_gpu", "xla_blocked", "xla_positioned", "xla"]
Function = Callable[..., jax.Array]

ORDER: dict[str, tuple[Implementation, ...]] = {
    "tpu": ("mosaic_tpu", "xla_blocked"),
    "cuda": ("mosaic_gpu", "xla_blocked"),
}
"""What is tried on each platform, first to last."""

ANYWHERE: tuple[Implementation, ...] = ("xla_blocked",)
"""What is tried on the platforms without an entry of their own, among them the CPU."""


@dataclasses.dataclass(frozen=True)
class Device:
    """What a program is compiled for."""

    platform: str
    """As JAX names it: "cpu", "tpu", "cuda", "rocm"."""
    kind: str | None = None
    """`jax.Device.device_kind`; None if it is not known (a program exported for several platforms)."""
    compute_capability: str | None = None
    """Of NVIDIA GPUs, such as "9.0"; None elsewhere, or if it is not known."""

    @staticmethod
    def of(device: Any, platform: str | None = None) -> "Device":
        """Describes a `jax.Device`, real or of a topology; its platform is known to its client unless it is given."""
        platform = platform or device.client.platform
        if platform == "gpu":  # what the CUDA and ROCm clients of JAX 0.11 call themselves
            platform = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
        return Device(platform, device.device_kind, getattr(device, "compute_capability", None))


@dataclasses.dataclass(frozen=True)
class Choice:
    """A backend, and why those before it were passed over."""

    name: Implementation
    """The backend."""
    refusals: dict[str, str]
    """Reason of each backend that was tried first, by its name."""
    function: Callable[..., Any] = dataclasses.field(repr=False, compare=False)
    """The operation: takes the arrays of `tree_attention` as they stand in its signature, and its options by name. Of
    `pallas_kernels.cache_write` likewise those of `write_rows`."""


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


def first_that_does(
    operation: str,
    names: Sequence[Any],
    prepared: Callable[[Any], Callable[..., Any]],
    arguments: Sequence[Any],
    device: Device,
) -> Choice:
    """The first backend of an operation that is traced with these arguments; one that cannot raises `NotImplementedError`.

    Args:
      operation: its name, for the message.
      names: of the backends, first to last.
      prepared: gives the function of a backend.
      arguments: arrays or `jax.ShapeDtypeStruct`s.
      device: what the program is compiled for.

    Raises:
      NotImplementedError: no backend does it; the message gives each one's reason.
    """
    refusals: dict[str, str] = {}
    for name in names:
        try:
            function = prepared(name)
            jax.eval_shape(function, *arguments)
        except NotImplementedError as error:
            refusals[name] = str(error)
        else:
            return Choice(name, refusals, function)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise NotImplementedError(f"{operation} cannot be done on {device.kind or device.platform}: {reasons}")


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


def require_hopper(device: Device) -> None:
    """Raises NotImplementedError, saying what is missing, for any device but a Hopper GPU."""
    if device.platform != "cuda":
        raise NotImplementedError(f"it runs on NVIDIA GPUs, and this program is compiled for {device.platform}")
    if device.compute_capability != "9.0":
        raise NotImplementedError(
            f"it needs a Hopper GPU (compute capability 9.0), and this is {device.kind or 'a GPU of unknown kind'} "
            f"({device.compute_capability or 'unknown'})"
        )


def _kernel(name: str) -> Function:
    return getattr(kernel_module(f"pallas_kernels.tree_attention.{name}"), f"{name}_tree_attention")


def kernel_module(name: str) -> Any:
    """A module with a kernel, or NotImplementedError if this version of JAX lacks what it needs.

    Kernel languages are experimental parts of JAX that move between versions, modules and names in them alike.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(f"it needs a part of JAX that this version lacks: {error}") from error


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
