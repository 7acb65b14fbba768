"""Tree attention in plain XLA: the truth that kernels are compared with, and the backend that runs everywhere."""

import jax
import jax.numpy as jnp

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Score of an invisible row: finite, so that nothing becomes inf - inf; its exponential is exactly 0 beside a visible row."""


def group_queries(queries: jax.Array, kv_heads: int) -> jax.Array:
    """Puts the query heads that share a key/value head side by side: `[B, T, Hq, Dh]` to `[B, Hkv, G, T, Dh]`."""
    batch, length, query_heads, head_dim = queries.shape
    grouped = queries.reshape(batch, length, kv_heads, query_heads // kv_heads, head_dim)
    return grouped.transpose(0, 2, 3, 1, 4)


def ungroup(mixed: jax.Array) -> jax.Array:
    """The inverse of `group_queries`."""
    batch, kv_heads, group, length, head_dim = mixed.shape
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * group, head_dim)


def scaled_scores(grouped: jax.Array, keys: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """Float32 scores `[B, Hkv, G, T, S]` of grouped queries with keys `[B, Hkv, S, Dh]`."""
    raw = scale * jnp.einsum("bhgtd,bhsd->bhgts", grouped, keys, preferred_element_type=jnp.float32)
    return raw if soft_cap is None else soft_cap * jnp.tanh(raw / soft_cap)


def reference_tree_attention(
    queries: jax.Array,
    cache_keys: jax.Array,
    cache_values: jax.Array,
    lengths: jax.Array,
    tail_keys: jax.Array,
    tail_values: jax.Array,
    tail_mask: jax.Array | None,
    *,
    scale: float,
    prefix_start: jax.Array | None,
    soft_cap: float | None,
) -> jax.Array:
    """See `pallas_kernels.tree_attention.api.tree_attention`. Scores and softmax are float32; reads the whole capacity S."""
    length, capacity = queries.shape[1], cache_keys.shape[2]
    grouped = group_queries(queries, cache_keys.shape[1])  # [B, Hkv, G, T, Dh]
    rows = jnp.arange(capacity, dtype=jnp.int32)
    committed = rows < lengths[:, None]  # [B, S]
    visible = committed[:, None, :]  # [B, 1, S]
    if prefix_start is not None:
        visible = visible & (rows >= prefix_start[..., None])  # [B, T, S]
    if tail_mask is None:
        tail_mask = jnp.tril(jnp.ones((length, length), bool))[None]  # [1, T, T]
    prefix = scaled_scores(grouped, cache_keys, scale, soft_cap)
    prefix = jnp.where(visible[:, None, None], prefix, MASKED)  # [B, Hkv, G, T, S]
    tail = scaled_scores(grouped, tail_keys, scale, soft_cap)
    tail = jnp.where(tail_mask[:, None, None], tail, MASKED)  # [B, Hkv, G, T, M]

    peak = jnp.maximum(prefix.max(-1), tail.max(-1))[..., None]
    prefix, tail = jnp.exp(prefix - peak), jnp.exp(tail - peak)
    total = prefix.sum(-1) + tail.sum(-1)  # [B, Hkv, G, T]
    # Rows beyond the length may hold anything: a weight of 0 does not silence a NaN, so their values are zeroed.
    cache_values = jnp.where(committed[:, None, :, None], cache_values, 0)
    mixed = jnp.einsum(
        "bhgts,bhsd->bhgtd", prefix.astype(cache_values.dtype), cache_values, preferred_element_type=jnp.float32
    ) + jnp.einsum("bhgtm,bhmd->bhgtd", tail.astype(tail_values.dtype), tail_values, preferred_element_type=jnp.float32)
    return ungroup((mixed / total[..., None]).astype(queries.dtype))
