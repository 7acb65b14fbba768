"""One array for all that a step of attention has new: queries, keys and values of each key/value head behind each other.

The Hopper kernel reads its new rows from such an array. Whoever keeps the keys and values of a step does well to keep this array:
on a GPU each array that a program computes costs a kernel, 1 to 2 us however small it is. XLA finds the array that the kernel
packs and the one that is kept to be the same (common subexpressions).
"""

import jax
import jax.numpy as jnp

ALIGNMENT = 8
"""Rows in whole eights, as shared memory is tiled for tensor cores: a copy begins at the first row of a tile."""


def pack(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Queries `[B, T, Hq, Dh]`, keys and values `[B, Hkv, M, Dh]` in one array `[B, Hkv, R, Dh]`.

    First come the T * G rows of the G = Hq / Hkv query heads of a key/value head, token by token; then its M keys; then its M
    values. Each of the three is filled up with zeros to a multiple of `ALIGNMENT`.
    """
    batch, length, query_heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    group = query_heads // kv_heads
    grouped = queries.reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    parts = (grouped.reshape(batch, kv_heads, length * group, head_dim), keys, values)
    filled = [jnp.pad(x, ((0, 0), (0, 0), (0, aligned(x.shape[2]) - x.shape[2]), (0, 0))) for x in parts]
    return jnp.concatenate(filled, axis=2)


def key_and_value_rows(rows: int, tokens: int) -> tuple[int, int]:
    """The first rows of keys and of values in an array of R = `rows` whose step has M = `tokens` of each."""
    return rows - 2 * aligned(tokens), rows - aligned(tokens)


def aligned(rows: int) -> int:
    """The multiple of `ALIGNMENT` that holds so many rows."""
    return -(-rows // ALIGNMENT) * ALIGNMENT
