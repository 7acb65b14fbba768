"""The write of rows in plain XLA: for each buffer a gather of the rows, if they are chosen, and an update in place."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Part:
    """Where the new rows of the buffers are in the arrays that hold them."""

    first: tuple[int, ...]
    """The first one of each buffer."""
    tokens: int
    """How many they are: T."""


def reference_write_rows(
    buffers: Sequence[jax.Array], rows: Sequence[jax.Array], path: jax.Array | None, start: jax.Array, *, part: Part
) -> list[jax.Array]:
    """See `pallas_kernels.cache_write.api.write_rows`."""
    new = [x[:, :, begin : begin + part.tokens] for x, begin in zip(rows, part.first, strict=True)]
    return [_put(buffer, _take(x, path), start) for buffer, x in zip(buffers, new, strict=True)]


def _take(rows: jax.Array, path: jax.Array | None) -> jax.Array:
    if path is None:
        return rows
    path = jnp.clip(path, 0, rows.shape[2] - 1)
    if rows.shape[0] == 1:
        return jnp.take(rows, path[0], axis=2, mode="clip")
    return jnp.take_along_axis(rows, path[:, None, :, None], axis=2, mode="clip")


def _put(buffer: jax.Array, update: jax.Array, start: jax.Array) -> jax.Array:
    start = jnp.clip(start, 0, buffer.shape[2] - update.shape[2])
    # A mapped update is a scatter. Of a single slot XLA would make three operations of it: a slice, a choice and an update.
    if buffer.shape[0] == 1:
        zero = jnp.zeros((), start.dtype)
        at = (zero, zero, start[0], zero)
        return jax.lax.dynamic_update_slice(buffer, update, at, allow_negative_indices=False)

    def one(slot: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
        zero = jnp.zeros((), at.dtype)
        return jax.lax.dynamic_update_slice(slot, new, (zero, at, zero), allow_negative_indices=False)

    return jax.vmap(one)(buffer, update, start)
