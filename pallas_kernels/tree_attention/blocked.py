"""Tree attention in plain XLA that walks the prefix in blocks of keys and stops at the longest committed length.

The reference reads the whole capacity of the cache; this reads what is committed, with one softmax kept up to date from block to
block (https://arxiv.org/abs/2112.05682). It serves where a short loop costs less than the unread part of the cache: on the CPU.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.tree_attention.reference import MASKED, group_queries, scaled_scores, ungroup

BLOCK = 256
"""Keys a step."""


def blocked_tree_attention(
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
    """See `pallas_kernels.tree_attention.api.tree_attention`.

    Raises:
      NotImplementedError: a cache whose capacity is not in whole blocks of keys.
    """
    length, capacity = queries.shape[1], cache_keys.shape[2]
    block = min(BLOCK, capacity)
    if capacity % block:
        raise NotImplementedError(f"the capacity {capacity} of the cache is no multiple of {block}")
    grouped = group_queries(queries, cache_keys.shape[1])  # [B, Hkv, G, T, Dh]

    # The tail comes first: every query sees at least itself, so the running maximum is finite from the start.
    if tail_mask is None:
        tail_mask = jnp.tril(jnp.ones((length, length), bool))[None]
    scores = scaled_scores(grouped, tail_keys, scale, soft_cap)
    scores = jnp.where(tail_mask[:, None, None], scores, MASKED)  # [B, Hkv, G, T, M]
    peak = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    mixed = _mix(weights, tail_values)  # [B, Hkv, G, T, Dh]

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        peak, total, mixed = carry
        start = i * block
        keys = jax.lax.dynamic_slice_in_dim(cache_keys, start, block, axis=2)
        values = jax.lax.dynamic_slice_in_dim(cache_values, start, block, axis=2)
        rows = start + jnp.arange(block, dtype=jnp.int32)
        committed = rows < lengths[:, None]  # [B, block]
        visible = committed[:, None]  # [B, 1, block]
        if prefix_start is not None:
            visible = visible & (rows >= prefix_start[..., None])  # [B, T, block]
        scores = scaled_scores(grouped, keys, scale, soft_cap)
        scores = jnp.where(visible[:, None, None], scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - new_peak)
        shrink = jnp.exp(peak - new_peak)
        # A weight of 0 does not silence a NaN beyond the length, so the values there are zeroed.
        values = jnp.where(committed[:, None, :, None], values, 0)
        return new_peak, total * shrink + weights.sum(-1, keepdims=True), mixed * shrink + _mix(weights, values)

    blocks = (jnp.max(lengths) + block - 1) // block
    _, total, mixed = jax.lax.fori_loop(0, blocks, step, (peak, total, mixed))
    return ungroup((mixed / total).astype(queries.dtype))


def _mix(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Float32 sums of values by weights `[B, Hkv, G, T, S]`."""
    return jnp.einsum("bhgts,bhsd->bhgtd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
