"""The dtype argument of the loaders."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = ("float32", "bfloat16", "float16")


def parse_dtype(dtype: Any, argument: str = "dtype") -> jnp.dtype:
    """Turns "auto", a name or a dtype into a dtype.

    "auto" is float32 on CPU, where bfloat16 arithmetic is slow, and bfloat16 on accelerators.

    Raises:
      ValueError: anything else than "auto", float32, bfloat16 or float16.
    """
    if isinstance(dtype, str) and dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    try:
        name = jnp.dtype(dtype).name if dtype is not None else None
    except TypeError:
        name = None
    if name not in DTYPES:
        raise ValueError(f"{argument} must be 'auto' or one of {', '.join(DTYPES)}, not {dtype!r}")
    return np.dtype(jnp.dtype(name))
