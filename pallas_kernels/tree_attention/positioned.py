"""Tree attention in plain XLA whose sums do not depend on where the committed prefix ends.

The other backends reduce prefix and tail apart, so a row of a chain gets other last digits than the same row would once its
ancestors are committed. Here row m of the tail is put at position `lengths + m` among the keys, and keys are reduced in blocks of
fixed size at fixed positions, first to last. A block that a query does not see changes nothing, not even a bit. So for a chain,
whose row m belongs at that position, the result is the same bit for bit whichever of its rows are committed, on a backend whose
matrix products give a row the same bits wherever it stands among the others.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.tree_attention.reference import MASKED, group_queries, scaled_scores, ungroup

BLOCK = 256
"""Keys a step, the same on every device."""


def positioned_tree_attention(
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
    """See `pallas_kernels.tree_attention.api.tree_attention`; every slot needs room for its tail, `lengths + M <= S`."""
    batch, length = queries.shape[:2]
    capacity, tail_rows = cache_keys.shape[2], tail_keys.shape[2]
    block = min(BLOCK, capacity)
    grouped = group_queries(queries, cache_keys.shape[1])  # [B, Hkv, G, T, Dh]
    if tail_mask is None:
        tail_mask = jnp.tril(jnp.ones((length, length), bool))[None]
    tail_mask = jnp.broadcast_to(tail_mask, (batch, length, tail_rows))

    def step(i: jax.Array | int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        peak, total, mixed = carry
        # The last block of a capacity that is not in whole blocks starts early, and passes over what the one before it had.
        first = i * block
        start = jnp.minimum(first, capacity - block)
        rows = start + jnp.arange(block, dtype=jnp.int32)
        committed = (rows >= first) & (rows < lengths[:, None])  # [B, block]
        place = rows - lengths[:, None]  # in the tail, [B, block]
        in_tail = (rows >= first) & (place >= 0) & (place < tail_rows)
        place = jnp.clip(place, 0, tail_rows - 1)

        def overlaid(cache: jax.Array, tail: jax.Array) -> jax.Array:
            here = jax.lax.dynamic_slice_in_dim(cache, start, block, axis=2)
            new = jnp.take_along_axis(tail, place[:, None, :, None], axis=2)
            here = jnp.where(in_tail[:, None, :, None], new, here)
            # A weight of 0 does not silence a NaN beyond the rows, so what is there is zeroed.
            return jnp.where((committed | in_tail)[:, None, :, None], here, 0)

        visible = jnp.broadcast_to(committed[:, None], (batch, length, block))
        if prefix_start is not None:
            visible = visible & (rows >= prefix_start[..., None])
        visible = visible | (in_tail[:, None] & jnp.take_along_axis(tail_mask, place[:, None], axis=2))
        scores = scaled_scores(grouped, overlaid(cache_keys, tail_keys), scale, soft_cap)
        scores = jnp.where(visible[:, None, None], scores, MASKED)  # [B, Hkv, G, T, block]
        new_peak = jnp.maximum(peak, scores.max(-1, keepdims=True))
        # While nothing was seen the weights are 1 and mean nothing; the first visible key shrinks them to exactly 0.
        weights = jnp.exp(scores - new_peak)
        shrink = jnp.exp(peak - new_peak)
        values = overlaid(cache_values, tail_values)
        added = jnp.einsum(
            "bhgts,bhsd->bhgtd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
        )
        return new_peak, total * shrink + weights.sum(-1, keepdims=True), mixed * shrink + added

    shape = grouped.shape[:-1]
    start = (
        jnp.full((*shape, 1), MASKED, jnp.float32),
        jnp.zeros((*shape, 1), jnp.float32),
        jnp.zeros(grouped.shape, jnp.float32),
    )
    end = (jnp.max(lengths) + tail_rows + block - 1) // block
    _, total, mixed = jax.lax.fori_loop(0, jnp.minimum(end, -(-capacity // block)), step, start)
    return ungroup((mixed / total).astype(queries.dtype))
