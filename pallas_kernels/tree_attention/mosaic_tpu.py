"""Tree attention as a Pallas kernel for TPUs.

The work is one flat list of blocks of committed keys, slot after slot, as long as the lengths make it: the grid ends there, so
time grows with what is committed and not with the capacity, and a slot of 100 rows costs nothing of what its neighbour of 100,000
does. Pallas moves the blocks of the next step into VMEM while one is worked on, over the border between slots too.
A slot begins with its tail, whose mask stands in VMEM; every query sees at least itself there, so the running maximum of the
softmax is finite from the start. The query heads that share a key/value head and the T queries of a slot are the rows of one
matrix, so keys and values are read once for all of them.

XLA keeps arrays `[..., S, Dh]` whose head_dim is not in whole tiles of 128 lanes with S along the lanes, where nothing is
padded. The kernel takes them as they lie, as `[..., Dh, S]`: anything else would copy the whole cache.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tree_attention.mosaic_tpu_tiles import LANES, Tiles, choose_tiles, keys_across_lanes
from pallas_kernels.tree_attention.reference import MASKED

DTYPES = (jnp.bfloat16, jnp.float32)
LARGEST_HEAD = 256


def mosaic_tpu_tree_attention(
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
    device_kind: str | None = None,
    tiles: Tiles | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `pallas_kernels.tree_attention.api.tree_attention`. Products of float32 are of the highest precision.

    Args:
      queries: this and the rest as there.
      device_kind: decides the size of the tiles.
      tiles: the tiles themselves, instead.
      interpret: as for `pallas_call`.

    Raises:
      NotImplementedError: a dtype or head_dim without a kernel, or a tail that does not fit VMEM.
    """
    batch, length, query_heads, head_dim = queries.shape
    kv_heads, capacity = cache_keys.shape[1:3]
    tail_rows = tail_keys.shape[2]
    group = query_heads // kv_heads
    dtype = queries.dtype
    if dtype not in DTYPES or any(x.dtype != dtype for x in (cache_keys, cache_values, tail_keys, tail_values)):
        found = ", ".join(str(x.dtype) for x in (queries, cache_keys, cache_values, tail_keys, tail_values))
        raise NotImplementedError(f"queries, keys and values must all be bfloat16 or all float32, got {found}")
    if head_dim % 8 or head_dim > LARGEST_HEAD:
        raise NotImplementedError(f"head_dim must be a multiple of 8 up to {LARGEST_HEAD}, got {head_dim}")
    if tiles is None:
        tiles = choose_tiles(
            device_kind, queries=length, group=group, kv_heads=kv_heads, capacity=capacity, tail=tail_rows,
            head_dim=head_dim, dtype=dtype, tail_mask=tail_mask is not None, windows=prefix_start is not None,
        )  # fmt: skip
    query_tiles = pl.cdiv(length, tiles.queries)

    def rows(x: jax.Array) -> jax.Array:
        """`[..., T * G, C]` to `[..., query_tiles * rows, C]`: whole tiles, each padded to whole sublanes."""
        *lead, total, columns = x.shape
        x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, query_tiles * tiles.queries * group - total), (0, 0)])
        x = x.reshape(*lead, query_tiles, tiles.queries * group, columns)
        x = jnp.pad(x, [(0, 0)] * (len(lead) + 1) + [(0, tiles.rows - tiles.queries * group), (0, 0)])
        return x.reshape(*lead, query_tiles * tiles.rows, columns)

    # Row t * G + g is query t of head g of the group.
    packed = queries.reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    packed = rows(packed.reshape(batch, kv_heads, length * group, head_dim))  # [B, Hkv, query_tiles * rows, Dh]

    lengths = lengths.astype(jnp.int32)
    scalars, shift = _work(lengths, prefix_start, capacity, tiles.block)
    total = scalars[0]
    across = keys_across_lanes(head_dim)
    caches = [x.swapaxes(2, 3) if across else x for x in (cache_keys, cache_values)]
    operands = [packed, *caches, tail_keys, tail_values]

    def at_slot(*where: Any) -> Any:
        """Index map that puts the step's slot first, then "heads" and "tile" for the coordinates of these axes."""

        def index(heads: Any, tile: Any, step: Any, items: Any, *_: Any) -> tuple[Any, ...]:
            slot = jax.lax.shift_right_logical(items[step], shift)
            return (slot, *({"heads": heads, "tile": tile}.get(axis, axis) for axis in where))

        return index

    def at_block(heads: Any, tile: Any, step: Any, items: Any, *_: Any) -> tuple[Any, ...]:
        slot, block = jax.lax.shift_right_logical(items[step], shift), items[step] & ((1 << shift) - 1)
        return (slot, heads, 0, block) if across else (slot, heads, block, 0)

    query_spec = pl.BlockSpec((None, tiles.heads, tiles.rows, head_dim), at_slot("heads", "tile", 0))
    rows_and_columns = (head_dim, tiles.block) if across else (tiles.block, head_dim)
    cache_spec = pl.BlockSpec((None, tiles.heads, *rows_and_columns), at_block)
    # Products are over whole tiles of lanes: blocks may stick out of the cache and of the tail, whose rows there are masked.
    tail_block = pl.cdiv(tail_rows, LANES) * LANES
    tail_spec = pl.BlockSpec((None, tiles.heads, tail_block, head_dim), at_slot("heads", 0, 0))
    in_specs = [query_spec, cache_spec, cache_spec, tail_spec, tail_spec]
    if tail_mask is not None:
        operands.append(rows(jnp.repeat(tail_mask.astype(jnp.int8), group, axis=1)))  # [B, query_tiles * rows, M]
        in_specs.append(pl.BlockSpec((None, tiles.rows, tail_block), at_slot("tile", 0)))
    if prefix_start is not None:
        operands.append(rows(jnp.repeat(prefix_start.astype(jnp.int32), group, axis=1)[..., None]))
        in_specs.append(pl.BlockSpec((None, tiles.rows, 1), at_slot("tile", 0)))
    kernel = functools.partial(
        _kernel, shift=shift, group=group, scale=scale, soft_cap=soft_cap, masked=tail_mask is not None,
        windowed=prefix_start is not None, tile_queries=tiles.queries, tail_rows=tail_rows,
        across=across,
    )  # fmt: skip
    mixed = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars) - 1,
            grid=(kv_heads // tiles.heads, query_tiles, total),
            in_specs=in_specs,
            out_specs=query_spec,
            scratch_shapes=[
                pltpu.VMEM((tiles.heads, tiles.rows, head_dim), jnp.float32),
                pltpu.VMEM((tiles.heads, tiles.rows, 1), jnp.float32),
                pltpu.VMEM((tiles.heads, tiles.rows, 1), jnp.float32),
            ],
        ),
        out_shape=jax.typeof(packed),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=tiles.vmem_bytes
        ),
        name=f"tree_attention_{tiles.heads}x{tiles.rows}x{tiles.block}",
        interpret=interpret,
    )(*scalars[1:], *operands)  # [B, Hkv, query_tiles * rows, Dh]
    mixed = mixed.reshape(batch, kv_heads, query_tiles, tiles.rows, head_dim)[:, :, :, : tiles.queries * group]
    mixed = mixed.reshape(batch, kv_heads, query_tiles * tiles.queries, group, head_dim)[:, :, :length]
    return mixed.transpose(0, 2, 1, 3, 4).reshape(batch, length, query_heads, head_dim)


def _work(
    lengths: jax.Array, prefix_start: jax.Array | None, capacity: int, block: int
) -> tuple[tuple[jax.Array, ...], int]:
    """The list of blocks to be read, at least one for each slot (its tail has to be done).

    Returns:
      The length of the list; the list, int32 `[B * blocks]`, each `slot << shift | block`; and of each slot, int32 `[B]`: its
      length, its first block, its last block, and the first row that all of its queries see. Then the shift.
    """
    batch, most = lengths.shape[0], pl.cdiv(capacity, block)
    shift = (most - 1).bit_length()
    seen = lengths * 0 if prefix_start is None else jnp.max(prefix_start, axis=1)
    begin = lengths * 0 if prefix_start is None else jnp.clip(jnp.min(prefix_start, axis=1), 0, lengths)
    last = jnp.maximum(lengths - 1, 0) // block
    first = jnp.minimum(begin // block, last)
    ends = jnp.cumsum(last - first + 1)
    steps = jnp.arange(batch * most, dtype=jnp.int32)
    # Slot of each step: how many slots have ended before it. Steps behind the last are never run.
    slots = jnp.minimum(jnp.sum(steps[:, None] >= ends, axis=1), batch - 1)
    blocks = steps - (ends - 1 - last)[slots]
    items = (slots << shift) | blocks
    return (ends[-1], items.astype(jnp.int32), lengths, first, last, seen), shift


def _kernel(
    items: Any, lengths: Any, first: Any, last: Any, seen: Any, *refs: Any, shift: int, group: int, scale: float,
    soft_cap: float | None, masked: bool, windowed: bool, tile_queries: int, tail_rows: int,
    across: bool,
) -> None:  # fmt: skip
    """One step: a block of one slot's keys and values, for some of its heads and queries.

    Args:
      items: see `_work`, as the following five; all in SMEM.
      lengths: see above.
      first: see above.
      last: see above.
      seen: see above.
      refs: in VMEM: queries `[heads, rows, Dh]`; keys and values `[heads, block, Dh]`, or `[heads, Dh, block]` if `across`; those
        of the tail `[heads, M, Dh]`; if `masked` the tail's mask, int8 `[rows, M]`; if `windowed` the first row that each query
        sees, int32 `[rows, 1]`; the output; then the softmax in progress: weighted sum `[heads, rows, Dh]`, maximum and total
        `[heads, rows, 1]`.
      shift: see `_work`.
      group: query heads that share a key/value head.
      scale: see `tree_attention`.
      soft_cap: see `tree_attention`.
      masked: whether there is a tail mask.
      windowed: whether there are first rows.
      tile_queries: queries in a tile.
      tail_rows: M; the blocks of the tail are longer, up to whole tiles of lanes, and hold anything there.
      across: whether the blocks of the cache have their keys along the lanes.
    """
    query_ref, key_ref, value_ref, tail_key_ref, tail_value_ref, *rest = refs
    mask_ref = rest.pop(0) if masked else None
    start_ref = rest.pop(0) if windowed else None
    out_ref, mixed_ref, peak_ref, total_ref = rest
    item = items[pl.program_id(2)]
    slot, block = jax.lax.shift_right_logical(item, shift), item & ((1 << shift) - 1)
    heads, rows, _ = query_ref.shape
    keys = key_ref.shape[2 if across else 1]
    float32 = query_ref.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if float32 else jax.lax.Precision.DEFAULT

    def score(head: Any, ref: Any, across: bool) -> jax.Array:
        """Float32 scores `[rows, keys]` of one head."""
        raw = scale * jax.lax.dot_general(
            query_ref[head], ref[head], (((1,), (0 if across else 1,)), ((), ())), precision=precision,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return raw if soft_cap is None else soft_cap * jnp.tanh(raw / soft_cap)

    def mix(weights: jax.Array, values: jax.Array, across: bool) -> jax.Array:
        """Float32 sums of values `[rows, Dh]`."""
        return jax.lax.dot_general(
            weights.astype(values.dtype), values, (((1,), (1 if across else 0,)), ((), ())), precision=precision,
            preferred_element_type=jnp.float32,
        )  # fmt: skip

    def each_head(work: Any) -> None:
        def body(head: Any, carry: None) -> None:
            work(head)
            return carry

        # A few rows leave the units idle unless the heads overlap; with many rows that would only lengthen the program.
        jax.lax.fori_loop(0, heads, body, None, unroll=rows * keys <= 64 * 512)

    @pl.when(block == first[slot])
    def _tail() -> None:
        block_rows = tail_key_ref.shape[1]
        column = jax.lax.broadcasted_iota(jnp.int32, (rows, block_rows), 1)
        if mask_ref is not None:
            visible = (mask_ref[...].astype(jnp.int32) != 0) & (column < tail_rows)
        else:
            # Query t sees tail rows 0..t, and is in rows t * G to t * G + G - 1.
            row = jax.lax.broadcasted_iota(jnp.int32, (rows, block_rows), 0)
            visible = (row >= (column - pl.program_id(1) * tile_queries) * group) & (column < tail_rows)
        present = jax.lax.broadcasted_iota(jnp.int32, (block_rows, 1), 0) < tail_rows

        def work(head: Any) -> None:
            scores = jnp.where(visible, score(head, tail_key_ref, False), MASKED)
            peak = scores.max(axis=1, keepdims=True)
            weights = jnp.exp(scores - peak)
            peak_ref[head] = peak
            total_ref[head] = weights.sum(axis=1, keepdims=True)
            values = tail_value_ref[head]
            mixed_ref[head] = mix(weights, jnp.where(present, values, jnp.zeros_like(values)), False)

        each_head(work)

    def prefix(partly: bool) -> None:
        """Adds the block; `partly` if some of its rows are not seen by some query."""
        start = block * keys
        visible: jax.Array | None = None
        committed: jax.Array | None = None
        if partly:
            row = start + jax.lax.broadcasted_iota(jnp.int32, (rows, keys), 1)
            visible = row < lengths[slot]
            if start_ref is not None:
                visible = visible & (row >= start_ref[...])
            along, axis = ((1, keys), 1) if across else ((keys, 1), 0)
            committed = start + jax.lax.broadcasted_iota(jnp.int32, along, axis) < lengths[slot]

        def work(head: Any) -> None:
            scores, values = score(head, key_ref, across), value_ref[head]
            if visible is not None and committed is not None:
                scores = jnp.where(visible, scores, MASKED)
                # A weight of 0 does not silence a NaN beyond the length.
                values = jnp.where(committed, values, jnp.zeros_like(values))
            peak = peak_ref[head]
            new_peak = jnp.maximum(peak, scores.max(axis=1, keepdims=True))
            shrink, weights = jnp.exp(peak - new_peak), jnp.exp(scores - new_peak)
            peak_ref[head] = new_peak
            total_ref[head] = total_ref[head] * shrink + weights.sum(axis=1, keepdims=True)
            mixed_ref[head] = mixed_ref[head] * shrink + mix(weights, values, across)

        each_head(work)

    whole = (block * keys + keys <= lengths[slot]) & (block * keys >= seen[slot])

    @pl.when(whole)
    def _inner_block() -> None:
        prefix(partly=False)

    @pl.when(jnp.logical_not(whole) & (block * keys < lengths[slot]))
    def _edge_block() -> None:
        prefix(partly=True)

    @pl.when(block == last[slot])
    def _finish() -> None:
        out_ref[...] = (mixed_ref[...] / total_ref[...]).astype(out_ref.dtype)
