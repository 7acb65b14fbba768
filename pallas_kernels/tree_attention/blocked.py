"""Tree attention in plain XLA that walks the prefix in blocks of keys and stops at the longest committed length.

The reference reads the whole capacity of the cache; this reads what is committed, with one softmax kept up to date from block to
block (https://arxiv.org/abs/2112.05682), and its scores are those of one block. It serves where there is no kernel.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.tree_attention.reference import MASKED, group_queries, scaled_scores, ungroup

BLOCK = 2048
"""Keys a step, unless `block_of` names others."""


def block_of(platform: str) -> int:
    """Keys a step on a platform, as JAX names it.

    On a CPU a step costs little. On a GPU it launches half a dozen kernels: for 32/8 heads of 128 on an H200, 8192 keys in steps
    of 2048 took 100 us (1 token, one slot) to 184 us (64 tokens), and 28 to 121 us at once.
    """
    return {"cpu": 256, "gpu": 8192, "cuda": 8192, "rocm": 8192}.get(platform, BLOCK)


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
    block: int = BLOCK,
) -> jax.Array:
    """See `pallas_kernels.tree_attention.api.tree_attention`; `block` is the number of keys a step."""
    length, capacity = queries.shape[1], cache_keys.shape[2]
    block = min(block, capacity)
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

    def step(i: jax.Array | int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        peak, total, mixed = carry
        # The last block of a capacity that is not in whole blocks starts early, and passes over what the one before it had.
        first = i * block
        start = jnp.minimum(first, capacity - block)
        keys = jax.lax.dynamic_slice_in_dim(cache_keys, start, block, axis=2)
        values = jax.lax.dynamic_slice_in_dim(cache_values, start, block, axis=2)
        rows = start + jnp.arange(block, dtype=jnp.int32)
        committed = (rows >= first) & (rows < lengths[:, None])  # [B, block]
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

    if capacity == block:
        _, total, mixed = step(0, (peak, total, mixed))
    else:
        begin = 0 if prefix_start is None else jnp.clip(jnp.min(prefix_start), 0, capacity) // block
        end = (jnp.max(lengths) + block - 1) // block
        _, total, mixed = jax.lax.fori_loop(begin, end, step, (peak, total, mixed))
    return ungroup((mixed / total).astype(queries.dtype))


def _mix(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Float32 sums of values by weights `[B, Hkv, G, T, S]`."""
    return jnp.einsum("bhgts,bhsd->bhgtd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
