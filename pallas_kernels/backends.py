"""What the operations share to choose a backend: the device, the choice, and what a backend may need.

The choice is made once, while the program is lowered: only then are the platform and the kind of device known for which it is
compiled, which need not be those of this process (ahead-of-time compilation). The platform's backends are tried in order; one
that cannot do the shapes, the dtypes or the device raises `NotImplementedError` while it is traced, and the next is tried.
"""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax


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

    name: str
    """The backend."""
    refusals: dict[str, str]
    """Reason of each backend that was tried first, by its name."""
    function: Callable[..., Any] = dataclasses.field(repr=False, compare=False)
    """The operation as a function of its arrays, in the order of its signature."""


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


def require_hopper(device: Device) -> None:
    """Raises NotImplementedError, saying what is missing, for any device but a Hopper GPU."""
    if device.platform != "cuda":
        raise NotImplementedError(f"it runs on NVIDIA GPUs, and this program is compiled for {device.platform}")
    if device.compute_capability != "9.0":
        raise NotImplementedError(
            f"it needs a Hopper GPU (compute capability 9.0), and this is {device.kind or 'a GPU of unknown kind'} "
            f"({device.compute_capability or 'unknown'})"
        )


def kernel_module(name: str) -> Any:
    """A module with a kernel, or NotImplementedError if this version of JAX lacks what it needs.

    Kernel languages are experimental parts of JAX that move between versions, modules and names in them alike.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(f"it needs a part of JAX that this version lacks: {error}") from error
