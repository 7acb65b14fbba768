"""The one entry point of the write of rows into caches: the contract and its checks."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backends import Choice, Device
from pallas_kernels.cache_write.backends import IMPLEMENTATIONS, Implementation, choose
from pallas_kernels.cache_write.operation import bind
from pallas_kernels.cache_write.reference import Part


def write_rows(
    buffers: Sequence[jax.Array],
    rows: Sequence[jax.Array],
    path: jax.Array | None,
    start: jax.Array,
    *,
    first: Sequence[int] | None = None,
    tokens: int | None = None,
    implementation: Implementation | None = None,
) -> list[jax.Array]:
    """Writes chosen rows of every slot behind each other into its part of each buffer.

    For each buffer i, slot b and step a: `buffers[i][b, :, start[b] + a] = rows[i][b, :, first[i] + path[b, a]]`. The buffers are
    updated in place wherever their old contents are not needed any more, as with `jax.lax.dynamic_update_slice`.

    Args:
      buffers: one `[B, Hkv, S, Dh]` for each cache of keys or values; their shapes may differ but for B.
      rows: arrays that hold the T new rows of each buffer, `[B, Hkv, R, Dh]` with its Hkv and Dh, cast to its dtype. Several
        buffers may have theirs in one array, which stands here once for each.
      path: which rows are written, int32 `[B, A]`, each in 0..T-1 (others are clipped); None writes all T in their order (A = T).
      start: the first row that is written, int32 `[B]`, each in 0..S-A (others are clipped).
      first: where the new rows of each buffer begin in its array; None: at 0.
      tokens: T; None: all rows from `first` on, which must be as many in each array.
      implementation: forces a backend: "mosaic_gpu" is a kernel for Hopper GPUs, "xla" plain XLA, a gather and an update for each
        buffer. None takes the first that does these shapes on the device for which the program is compiled (`ORDER` in
        `backends`).

    Returns:
      The buffers after the write.

    Raises:
      ValueError: shapes that do not fit together, or an unknown `implementation`.
      NotImplementedError: a forced `implementation` that cannot do this call; it says what is missing. Raised when the program is
        lowered, since only then is its device known.
    """
    part = check(buffers, rows, path, start, first=first, tokens=tokens, implementation=implementation)
    if not buffers:
        return []
    cast = [new.astype(buffer.dtype) for buffer, new in zip(buffers, rows, strict=True)]
    return bind(buffers, cast, path, start, part=part, implementation=implementation)


def chosen_backend(
    device: jax.Device | Device,
    buffers: Sequence[Any],
    rows: Sequence[Any],
    path: Any,
    start: Any,
    *,
    first: Sequence[int] | None = None,
    tokens: int | None = None,
    implementation: Implementation | None = None,
) -> Choice:
    """Says which backend `write_rows` gets on a device, and why not those before it. Nothing is compiled or run.

    Args:
      device: a device of this process or of a topology, or the description of one.
      buffers: this and the rest as for `write_rows`; `jax.ShapeDtypeStruct`s will do in place of arrays.

    Raises:
      ValueError: as `write_rows`.
      NotImplementedError: a forced `implementation` that cannot do this call; it says what is missing.
    """
    part = check(buffers, rows, path, start, first=first, tokens=tokens, implementation=implementation)
    described = device if isinstance(device, Device) else Device.of(device)
    new = [jax.ShapeDtypeStruct(x.shape, buffer.dtype) for x, buffer in zip(rows, buffers, strict=True)]
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (list(buffers), path, start))
    return choose(described, arrays[0], new, *arrays[1:], part=part, implementation=implementation)


def check(
    buffers: Sequence[Any],
    rows: Sequence[Any],
    path: Any,
    start: Any,
    *,
    first: Sequence[int] | None,
    tokens: int | None,
    implementation: str | None,
) -> Part:
    """Raises `ValueError` for arguments of `write_rows` that do not fit together; returns where the new rows are."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is unknown; choose one of {', '.join(IMPLEMENTATIONS)}")
    if len(buffers) != len(rows):
        raise ValueError(f"{len(buffers)} buffers need as many arrays of rows, and there are {len(rows)}")
    for name, x, axes in (("start", start, "[B]"), ("path", path, "[B, A]")):
        if x is not None and (len(x.shape) != axes.count(",") + 1 or not jnp.issubdtype(x.dtype, jnp.integer)):
            raise ValueError(f"{name} must be integers {axes}, and is {x.dtype} {x.shape}")
    (batch,) = start.shape
    if path is not None and path.shape[0] != batch:
        raise ValueError(f"path {path.shape} must be [B, A] with B = {batch} of start {start.shape}")
    if first is not None and len(first) != len(buffers):
        raise ValueError(f"first must have an entry for each of {len(buffers)} buffers, and is {first}")
    begins, count = (0,) * len(buffers) if first is None else tuple(first), tokens
    for buffer, new, begin in zip(buffers, rows, begins, strict=True):
        if len(buffer.shape) != 4 or len(new.shape) != 4:
            raise ValueError(
                f"a buffer must be [B, Hkv, S, Dh] and its rows [B, Hkv, R, Dh], and they are {buffer.shape}, {new.shape}"
            )
        slots, heads, capacity, head_dim = buffer.shape
        length = new.shape[2]
        if slots != batch or new.shape != (batch, heads, length, head_dim):
            raise ValueError(
                f"a buffer {buffer.shape} must be [B, Hkv, S, Dh] and its rows {new.shape} [B, Hkv, R, Dh] with B = {batch}"
            )
        here = length - begin if tokens is None else tokens
        count = here if count is None else count
        if not 0 <= begin <= begin + here <= length or here != count:
            raise ValueError(f"rows {new.shape} of a buffer must hold tokens = {count} rows from first = {begin} on")
        written = count if path is None else path.shape[1]
        if written > capacity:
            raise ValueError(f"{written} rows do not fit into a buffer {buffer.shape}")
    return Part(begins, count or 0)
