"""Tree attention in plain XLA: the truth that kernels are compared with, and the backend that runs everywhere."""

import jax
import jax.numpy as jnp

# Scores of invisible rows. Finite, so that a slot with an empty prefix gives exp(-huge) = 0 and never inf - inf.
_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


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
    batch, length, query_heads, head_dim = queries.shape
    kv_heads, capacity = cache_keys.shape[1:3]
    group = query_heads // kv_heads
    # The query heads of one key/value head become rows of one product: [B, Hkv, G, T, Dh].
    grouped = queries.reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)

    def scores(keys: jax.Array) -> jax.Array:
        raw = scale * jnp.einsum("bhgtd,bhsd->bhgts", grouped, keys, preferred_element_type=jnp.float32)
        return raw if soft_cap is None else soft_cap * jnp.tanh(raw / soft_cap)

    rows = jnp.arange(capacity, dtype=jnp.int32)
    committed = rows < lengths[:, None]  # [B, S]
    visible = committed[:, None, :]  # [B, 1, S]
    if prefix_start is not None:
        visible = visible & (rows >= prefix_start[..., None])  # [B, T, S]
    if tail_mask is None:
        tail_mask = jnp.tril(jnp.ones((length, length), bool))[None]  # [1, T, T]
    prefix = jnp.where(visible[:, None, None], scores(cache_keys), _MASKED)  # [B, Hkv, G, T, S]
    tail = jnp.where(tail_mask[:, None, None], scores(tail_keys), _MASKED)  # [B, Hkv, G, T, M]

    peak = jnp.maximum(prefix.max(-1), tail.max(-1))[..., None]
    prefix, tail = jnp.exp(prefix - peak), jnp.exp(tail - peak)
    total = prefix.sum(-1) + tail.sum(-1)  # [B, Hkv, G, T]
    # Rows beyond the length may hold anything: a weight of 0 does not silence a NaN, so their values are zeroed.
    cache_values = jnp.where(committed[:, None, :, None], cache_values, 0)
    mixed = jnp.einsum(
        "bhgts,bhsd->bhgtd", prefix.astype(cache_values.dtype), cache_values, preferred_element_type=jnp.float32
    ) + jnp.einsum("bhgtm,bhmd->bhgtd", tail.astype(tail_values.dtype), tail_values, preferred_element_type=jnp.float32)
    out = (mixed / total[..., None]).astype(queries.dtype)  # [B, Hkv, G, T, Dh]
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, query_heads, head_dim)
