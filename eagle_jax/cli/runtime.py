"""The device that a command runs on, the cache of compiled programs, and what is said about both."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator


class DeviceError(RuntimeError):
    """The device asked for is not there."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """What computes."""

    platform: str
    """"cpu", "gpu" or "tpu"."""
    devices: tuple[str, ...]
    """Kind of each device, e.g. "NVIDIA H200"."""

    def __str__(self) -> str:
        kinds = sorted(set(self.devices))
        return f"{self.platform}, " + ", ".join(f"{self.devices.count(kind)} x {kind}" for kind in kinds)


def select_device(platform: str | None) -> Backend:
    """Makes JAX compute on a platform, its own choice if None. To be called before anything has touched a device.

    Raises:
      DeviceError: there is no such device; JAX alone would fall back to the CPU.
    """
    import jax

    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    try:
        devices = jax.devices() if platform is None else jax.devices(platform)
    except RuntimeError as error:
        raise DeviceError(_explain(platform, error)) from error
    if devices[0].platform != jax.default_backend():
        jax.config.update("jax_default_device", devices[0])
    return Backend(devices[0].platform, tuple(device.device_kind for device in devices))


def _explain(platform: str | None, error: RuntimeError) -> str:
    forced = os.environ.get("JAX_PLATFORMS")
    reason = " ".join(str(error).split())
    if forced:
        wanted = "JAX" if platform is None else f"--device {platform}"
        return f"{wanted} finds no device while JAX_PLATFORMS={forced} is set, which rules out all others: {reason}"
    if platform == "gpu":
        return f"--device gpu: JAX finds no GPU. It needs a driver and pip install 'eagle-jax[cuda]': {reason}"
    if platform == "tpu":
        return (
            "--device tpu: JAX finds no TPU. It needs pip install 'eagle-jax[tpu]', and only one process can hold a TPU: end "
            f"other notebooks and programs that use it: {reason}"
        )
    return f"JAX finds no device: {reason}"


@dataclasses.dataclass
class CompilationCount:
    """Programs that a process had to compile, and those that the cache held."""

    compiled: int = 0
    from_cache: int = 0
    seconds: float = 0.0
    """Spent in compiling, or in reading from the cache."""


@contextlib.contextmanager
def counting_compilations() -> Iterator[CompilationCount]:
    """Yields a count of the compilations inside the block."""
    from jax import monitoring

    count = CompilationCount()

    def on_event(event: str, **_: str | int) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            count.from_cache += 1

    def on_duration(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            count.compiled += 1
            count.seconds += duration_secs

    monitoring.register_event_listener(on_event)
    monitoring.register_event_duration_secs_listener(on_duration)
    try:
        yield count
    finally:
        monitoring.unregister_event_listener(on_event)
        monitoring.unregister_event_duration_listener(on_duration)
        count.compiled -= count.from_cache


@contextlib.contextmanager
def stage(title: str, *, quiet: bool = False) -> Iterator[None]:
    """Shows a spinner on standard error while the block runs, then one line with the seconds it took."""
    from rich.console import Console

    console = Console(stderr=True, quiet=quiet)
    start = time.perf_counter()
    with console.status(title):
        yield
    console.print(f"[dim]{title}: {time.perf_counter() - start:.1f} s[/dim]", highlight=False)
