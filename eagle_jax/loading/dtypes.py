"""The dtype argument of the loaders."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = ("float32", "bfloat16", "float16")


def automatic_dtype(device: Any = None) -> str:
    """The dtype that "auto" means on a device.

    | device | dtype | because |
    |---|---|---|
    | CPU | float32 | bfloat16 arithmetic is emulated there |
    | NVIDIA GPUs before Ampere (compute capability below 8.0: T4, V100) | float16 | units for it, none for bfloat16 |
    | other GPUs, TPUs | bfloat16 | |

    Args:
      device: a `jax.Device`; None is the one that arrays go to by default.
    """
    if device is None:
        device = jax.config.jax_default_device or jax.devices()[0]  # type: ignore[attr-defined]
        if isinstance(device, str):  # a platform
            device = jax.devices(device)[0]
    if device.platform == "cpu":
        return "float32"
    capability = getattr(device, "compute_capability", None)  # "7.5"; AMD's are such as "gfx942"
    if isinstance(capability, str) and capability.replace(".", "", 1).isdigit() and float(capability) < 8:
        return "float16"
    return "bfloat16"


def parse_dtype(dtype: Any, argument: str = "dtype") -> jnp.dtype:
    """Turns "auto" (`automatic_dtype`), a name or a dtype into a dtype.

    Raises:
      ValueError: anything else than "auto", float32, bfloat16 or float16.
    """
    if isinstance(dtype, str) and dtype == "auto":
        dtype = automatic_dtype()
    try:
        name = jnp.dtype(dtype).name if dtype is not None else None
    except TypeError:
        name = None
    if name not in DTYPES:
        raise ValueError(f"{argument} must be 'auto' or one of {', '.join(DTYPES)}, not {dtype!r}")
    return np.dtype(jnp.dtype(name))
