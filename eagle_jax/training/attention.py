"""Attention over packed documents, and the diagonal attention of training-time test."""

from typing import Literal

import jax
import jax.numpy as jnp

PackedImplementation = Literal["xla", "cudnn"]

QUERY_CHUNK = 256
"""Query rows whose scores are alive at once; keys behind the chunk's last row are not even multiplied."""

_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def packed_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    segments: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    step: int = 0,
    diagonals: tuple[tuple[jax.Array, jax.Array], ...] = (),
) -> jax.Array:
    """Causal attention within documents, plus one key of each earlier draft step for every query.

    In step k of training-time test, query t sees the keys of step 0 up to t, those of its own document, and of each step
    j = 1..k the single key that was written for the same t. These k scores are computed element by element and share the softmax
    with the T x T ones, so no mask or score array of T x (k + 1) T exists.

    Args:
      queries: rotated queries of step `step`, `[B, T, Hq, Dh]`.
      keys: rotated keys of step 0, `[B, T, Hkv, Dh]`.
      values: their values, `[B, T, Hkv, Dh]`.
      segments: int32 `[B, T]`, see `PackedBatch`.
      positions: positions of the keys of step 0, int32 `[B, T]`.
      scale: factor on the scores.
      window: how many tokens a query looks back, itself included; None means everything.
      step: k; the query at t stands at position `positions[t] + k`.
      diagonals: keys and values of the steps 1..k, `[B, T, Hkv, Dh]` each.

    Returns:
      `[B, T, Hq, Dh]` in the dtype of `queries`; scores and softmax are float32.
    """
    length, kv_heads = queries.shape[1], keys.shape[2]
    grouped = queries.reshape(*queries.shape[:2], kv_heads, -1, queries.shape[-1])  # [B, T, Hkv, G, Dh]
    seen_diagonals = [pair for j, pair in enumerate(diagonals, start=1) if window is None or step - j < window]
    out = []
    for start in range(0, length, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, length)
        rows = slice(start, stop)
        seen = segments[:, rows, None] == segments[:, None, :stop]  # [B, C, S]
        seen &= jnp.arange(start, stop)[:, None] >= jnp.arange(stop)
        if window is not None:
            seen &= positions[:, rows, None] + step - positions[:, None, :stop] < window
        out.append(
            _mix(
                grouped[:, rows],
                keys[:, :stop],
                values[:, :stop],
                seen,
                [(k[:, rows], v[:, rows]) for k, v in seen_diagonals],
                scale,
            )
        )
    return jnp.concatenate(out, axis=1).reshape(queries.shape)


def _mix(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    seen: jax.Array,
    diagonals: list[tuple[jax.Array, jax.Array]],
    scale: float,
) -> jax.Array:
    """One chunk of queries `[B, C, Hkv, G, Dh]` over keys `[B, S, Hkv, Dh]` and diagonals `[B, C, Hkv, Dh]`."""
    scores = scale * jnp.einsum("bchgd,bshd->bhgcs", queries, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], scores, _MASKED)  # [B, Hkv, G, C, S]
    peak = scores.max(-1)  # [B, Hkv, G, C]
    own = []
    for key, _ in diagonals:
        products = queries.astype(jnp.float32) * key[:, :, :, None].astype(jnp.float32)  # [B, C, Hkv, G, Dh]
        own.append(scale * products.sum(-1).transpose(0, 2, 3, 1))  # [B, Hkv, G, C]
        peak = jnp.maximum(peak, own[-1])
    peak = jax.lax.stop_gradient(peak)
    weights = jnp.exp(scores - peak[..., None])
    total = weights.sum(-1)
    mixed = jnp.einsum("bhgcs,bshd->bchgd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    for score, (_, value) in zip(own, diagonals, strict=True):
        weight = jnp.exp(score - peak)
        total = total + weight
        mixed = mixed + weight.transpose(0, 3, 1, 2)[..., None] * value[:, :, :, None].astype(jnp.float32)
    return (mixed / total.transpose(0, 3, 1, 2)[..., None]).astype(queries.dtype)


def cudnn_packed_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    segments: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    window: int | None = None,
) -> jax.Array:
    """`packed_attention` of step 0 by cuDNN's flash attention, for the frozen target: no gradient is taken through it."""
    length = queries.shape[1]
    rows = jnp.arange(length)
    seen = (segments[:, :, None] == segments[:, None]) & (rows[:, None] >= rows)
    if window is not None:
        seen &= positions[:, :, None] - positions[:, None] < window
    return jax.nn.dot_product_attention(queries, keys, values, mask=seen[:, None], scale=scale, implementation="cudnn")


def cudnn_refusal(heads: int, kv_heads: int, head_dim: int, dtype: jnp.dtype, length: int) -> str | None:
    """Why cuDNN cannot do packed attention of these shapes on the default device; None if it compiles there."""
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        return f"it runs on NVIDIA GPUs, and this is {device.platform}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {jnp.dtype(dtype).name}"

    def shape(count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, length, count, head_dim), dtype)

    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        return cudnn_packed_attention(q, k, v, segments, positions, scale=head_dim**-0.5)

    try:
        jax.jit(run).lower(shape(heads), shape(kv_heads), shape(kv_heads), ids, ids).compile()
    except Exception as error:  # cuDNN refuses shapes, versions and devices with errors of many types
        return " ".join(str(error).split())[:300]
    return None
