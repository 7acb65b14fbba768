"""Tree attention on Hopper GPUs: a Pallas Mosaic GPU kernel that streams the committed prefix once, at memory speed.

One program instance ("block" in CUDA's words) serves one key/value head of one slot, one tile of query rows and one share of the
prefix. The G query heads that share a key/value head are packed with the T new tokens into rows, so a tree of 16 nodes with G = 4
fills the 64 rows of one tensor core product and every key is read once for all of them. A producer warpgroup keeps the copy
engine busy with a ring of key and value blocks; one or two consumer warpgroups run the online softmax
(https://arxiv.org/abs/2205.14135) in float32. The tail is the first block of the first share and the only one with a mask.
Where slots and heads alone do not fill the device the prefix is split (https://pytorch.org/blog/flash-decoding/) and the
shares are joined by log-sum-exp afterwards.
"""

import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_attention.mosaic_gpu_tiles import Tiles, choose_tiles
from pallas_kernels.tree_attention.packing import aligned, key_and_value_rows, pack

WARPGROUP_ROWS = 64
"""Rows of one tensor core product."""
_LOG2E = math.log2(math.e)
_EMPTY = -1e30
"""Base-2 log-sum-exp of no row at all: finite, so that differences of two of them are."""


def mosaic_gpu_tree_attention(
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
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.tree_attention.api.tree_attention`.

    Args:
      queries: as there, like everything not named here.
      tiles: sizes of the kernel's tiles; None chooses by shape.
      interpret: `InterpretGPUParams` runs the kernel on the CPU.

    Raises:
      NotImplementedError: a dtype, head_dim or capacity that the kernel does not take.
    """
    batch, length, query_heads, head_dim = queries.shape
    kv_heads, capacity = cache_keys.shape[1:3]
    check_supported(queries.dtype, cache_keys.dtype, tail_keys.dtype, head_dim, capacity)
    group = query_heads // kv_heads
    rows = length * group
    if tiles is None:
        tiles = choose_tiles(batch, kv_heads, rows, head_dim, capacity)
    rows_padded = -(-rows // tiles.rows) * tiles.rows
    tail = tail_keys.shape[2]
    # A product's contraction comes in whole swizzled rows of 64. Of a short tail only the rows that exist are copied.
    tail_block = min(tiles.block, -(-tail // WARPGROUP_ROWS) * WARPGROUP_ROWS)
    tail_copied = min(tail_block, aligned(tail))
    tail_blocks = -(-tail // tail_copied)

    def pad(x: jax.Array, axis: int, size: int) -> jax.Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, size - x.shape[axis])
        return jnp.pad(x, widths) if size > x.shape[axis] else x

    # One array for all that is new: XLA makes it in one kernel, rotation and layout included, and three would cost 2 us each.
    # Copies of whole blocks run on into the part that follows, or beyond the array, where they find zeros. Of what they bring too
    # much, queries are not stored, keys are masked, and values are silenced: a weight of 0 is not enough for a NaN.
    new = pack(queries, tail_keys, tail_values)
    optional: dict[str, jax.Array] = {}
    if tail_mask is not None:
        seen = jnp.repeat(tail_mask.astype(queries.dtype), group, axis=1)  # [B, rows, M]
        optional["tail_mask"] = pad(pad(seen, 2, tail_blocks * tail_block), 1, rows_padded)
    first = jnp.zeros_like(lengths)
    if prefix_start is not None:
        optional["starts"] = pad(jnp.repeat(prefix_start.astype(jnp.int32), group, axis=1), 1, rows_padded)
        first = jnp.maximum(jnp.min(prefix_start, axis=1), 0).astype(jnp.int32) // tiles.block
    blocks = jnp.stack([first, lengths.astype(jnp.int32)], axis=1)  # [B, 2]

    stored_rows = rows_padded if tiles.splits == 1 else min(rows_padded, aligned(rows))
    kernel = functools.partial(
        _kernel,
        tiles=tiles,
        group=group,
        tail_block=tail_block,
        tail_copied=tail_copied,
        tail_blocks=tail_blocks,
        tail=tail,
        tail_starts=key_and_value_rows(new.shape[2], tail),
        stored_rows=stored_rows,
        scale=scale,
        soft_cap=soft_cap,
        optional=tuple(optional),
    )
    dtype = queries.dtype
    split = tiles.splits > 1
    out_dtype = jnp.float32 if split else dtype
    out_type = [jax.ShapeDtypeStruct((batch, kv_heads, tiles.splits, stored_rows, head_dim), out_dtype)]
    if split:
        out_type.append(jax.ShapeDtypeStruct((batch, kv_heads, tiles.splits, rows_padded), jnp.float32))

    swizzle = plgpu.find_swizzle(head_dim * 16)
    transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    out_swizzle = plgpu.find_swizzle(head_dim * jnp.dtype(out_dtype).itemsize * 8)
    out_transforms = (
        plgpu.TilingTransform((8, out_swizzle // jnp.dtype(out_dtype).itemsize)),
        plgpu.SwizzleTransform(out_swizzle),
    )
    groups = tiles.rows // WARPGROUP_ROWS
    query_shape, output_shape = shared_shapes(groups, head_dim, dtype, out_dtype)
    scratch: Any = {
        "k_smem": plgpu.SMEM((tiles.stages, tiles.block, head_dim), dtype, transforms=transforms),
        "v_smem": plgpu.SMEM((tiles.stages, tiles.block, head_dim), dtype, transforms=transforms),
        # A consumer's output takes the place of its queries.
        "q_out_smem": plgpu.RefUnion(
            plgpu.SMEM(query_shape, dtype, transforms=transforms),
            plgpu.SMEM(output_shape, out_dtype, transforms=out_transforms),
        ),
        "lse_smem": plgpu.SMEM((groups, WARPGROUP_ROWS), jnp.float32),
        "q_full": plgpu.Barrier(num_barriers=groups),
        "k_full": plgpu.Barrier(num_barriers=tiles.stages),
        "v_full": plgpu.Barrier(num_barriers=tiles.stages),
        "k_free": plgpu.Barrier(num_arrivals=groups, num_barriers=tiles.stages),
        "v_free": plgpu.Barrier(num_arrivals=groups, num_barriers=tiles.stages),
    }
    call = plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch,
        # The tiles of one key/value head run side by side, so that its keys come from memory once and from the L2 cache after.
        grid=(rows_padded // tiles.rows, tiles.splits, kv_heads, batch),
        grid_names=("tile", "split", "head", "slot"),
        num_threads=groups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
        **({} if interpret is None else {"interpret": interpret}),
    )
    outs = call(blocks, new, cache_keys, cache_values, *optional.values())
    mixed = _join(outs[0][:, :, :, :rows], outs[1][..., :rows]) if split else outs[0][:, :, 0, :rows]
    mixed = mixed.reshape(batch, kv_heads, length, group, head_dim).transpose(0, 2, 1, 3, 4)
    return mixed.reshape(batch, length, query_heads, head_dim).astype(dtype)


def shared_shapes(groups: int, head_dim: int, dtype: Any, out_dtype: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the consumers' queries and outputs, which share memory: entry g of both begins at the same byte.

    Each begins at the first byte of the union, without padding, as references in shared memory do.
    Consumers end at different times. An output that reached into the next consumer's queries would replace what that one may
    still be reading.
    """
    wider = jnp.dtype(out_dtype).itemsize // jnp.dtype(dtype).itemsize
    return (groups, wider, WARPGROUP_ROWS, head_dim), (groups, WARPGROUP_ROWS, head_dim)


def check_supported(dtype: Any, cache_dtype: Any, tail_dtype: Any, head_dim: int, capacity: int) -> None:
    """Raises NotImplementedError, saying what is missing, unless the kernel takes these."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"mosaic_gpu takes bfloat16 and float16, not {jnp.dtype(dtype).name}: its float32 products would be TF32"
        )
    if not dtype == cache_dtype == tail_dtype:
        raise NotImplementedError(
            f"mosaic_gpu needs one dtype for queries ({dtype}), cache ({cache_dtype}) and tail ({tail_dtype})"
        )
    if head_dim % 16 or head_dim > 256:
        raise NotImplementedError(f"mosaic_gpu takes head_dim in multiples of 16 up to 256, not {head_dim}")
    if capacity == 0 or capacity % 64:
        raise NotImplementedError(f"mosaic_gpu reads the cache in whole blocks of 64 rows, and it has {capacity}")


def _join(outs: jax.Array, sums: jax.Array) -> jax.Array:
    """Joins shares `[B, Hkv, splits, R, Dh]` with base-2 log-sum-exps `[B, Hkv, splits, R]`.

    The shares are written out as terms, so that XLA makes one elementwise kernel of it together with the reordering that follows.
    """
    splits = outs.shape[2]
    each = [sums[:, :, split, :, None] for split in range(splits)]
    peak = functools.reduce(jnp.maximum, each)
    weights = [jnp.exp2(value - peak) for value in each]
    mixed = [weight * outs[:, :, split] for split, weight in enumerate(weights)]
    return functools.reduce(jnp.add, mixed) / functools.reduce(jnp.add, weights)


def _kernel(
    blocks_ref,
    new_ref,
    k_ref,
    v_ref,
    *refs,
    q_out_smem,
    k_smem,
    v_smem,
    lse_smem,
    q_full,
    k_full,
    v_full,
    k_free,
    v_free,
    tiles: Tiles,
    group: int,
    tail_block: int,
    tail_copied: int,
    tail_blocks: int,
    tail: int,
    tail_starts: tuple[int, int],
    stored_rows: int,
    scale: float,
    soft_cap: float | None,
    optional: tuple[str, ...],
):
    q_smem, out_smem = q_out_smem
    inputs, outputs = dict(zip(optional, refs, strict=False)), refs[len(optional) :]
    out_ref, lse_ref = outputs if len(outputs) == 2 else (outputs[0], None)
    mask_ref, starts_ref = inputs.get("tail_mask"), inputs.get("starts")
    tile, split, head, slot = (lax.axis_index(name) for name in ("tile", "split", "head", "slot"))
    consumers = tiles.rows // WARPGROUP_ROWS
    block, stages = tiles.block, tiles.stages
    rows, head_dim = WARPGROUP_ROWS, q_smem.shape[-1]
    dtype = q_smem.dtype

    # This share of the prefix: blocks start .. stop - 1 of the slot's cache.
    first, length = blocks_ref[slot, 0], blocks_ref[slot, 1]
    end = lax.div(length + (block - 1), block)
    share = lax.div(jnp.maximum(end - first, 0) + (tiles.splits - 1), tiles.splits)
    start = first + split * share
    stop = jnp.minimum(start + share, end)
    prefix_blocks = jnp.maximum(stop - start, 0)
    tail_steps = jnp.where(split == 0, tail_blocks, 0)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == consumers)
    def _produce():
        if consumers > 1:
            plgpu.set_max_registers(40, action="decrease")

        def load(step, source_k, source_v, into):
            slot_index = lax.rem(step, stages)

            @pl.when(step >= stages)
            def _():
                plgpu.barrier_wait(k_free.at[slot_index])

            plgpu.copy_gmem_to_smem(source_k, into(k_smem, slot_index), k_full.at[slot_index])

            @pl.when(step >= stages)
            def _():
                plgpu.barrier_wait(v_free.at[slot_index])

            plgpu.copy_gmem_to_smem(source_v, into(v_smem, slot_index), v_full.at[slot_index])

        @pl.loop(0, tail_steps)
        def _tail(i):
            keys, values = (
                new_ref.at[slot, head, pl.ds(first + i * tail_copied, tail_copied)] for first in tail_starts
            )
            load(i, keys, values, lambda ref, s: ref.at[s, pl.ds(0, tail_copied)])

        @pl.loop(0, prefix_blocks)
        def _prefix(i):
            at = (slot, head, pl.ds((start + i) * block, block))
            load(tail_steps + i, k_ref.at[at], v_ref.at[at], lambda ref, s: ref.at[s])

    @pl.when(warpgroup < consumers)
    def _consume():
        if consumers > 1:  # alone, a consumer has as many registers as a thread can name
            plgpu.set_max_registers(232, action="increase")
        row0 = tile * tiles.rows + warpgroup * rows
        q, out = q_smem.at[warpgroup, 0], out_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(new_ref.at[slot, head, pl.ds(row0, rows)], q, q_full.at[warpgroup])
        starts = None
        if starts_ref is not None:
            starts = _load(starts_ref.at[slot, pl.ds(row0, rows)], plgpu.Layout.WGMMA.reduce(1), optimized=False)
        plgpu.barrier_wait(q_full.at[warpgroup])

        def attend(step, carry, size, visible, clean):
            """One block of `size` rows: scores, softmax, mix. `visible` maps to a mask, `clean` silences poisoned values."""
            mixed, peak, total = carry
            place = lax.rem(step, stages)
            keys = k_smem.at[place] if size == block else k_smem.at[place, pl.ds(0, size)]
            values = v_smem.at[place] if size == block else v_smem.at[place, pl.ds(0, size)]
            plgpu.barrier_wait(k_full.at[place])

            def product(acc):
                plgpu.wgmma(acc, q, _transposed(keys))
                return acc[...]

            raw = pl.run_scoped(product, plgpu.ACC((rows, size), jnp.float32))
            plgpu.barrier_arrive(k_free.at[place])
            scores = (
                raw * (scale * _LOG2E) if soft_cap is None else jnp.tanh(raw * (scale / soft_cap)) * (soft_cap * _LOG2E)
            )
            if visible is not None:
                scores = jnp.where(visible(size), scores, -jnp.inf)
            new_peak = jnp.maximum(peak, scores.max(axis=1))
            shrink = jnp.exp2(peak - new_peak)
            weights = jnp.exp2(scores - lax.broadcast_in_dim(new_peak, (rows, size), [0]))
            total = total * shrink + weights.sum(axis=1)
            mixed = mixed * lax.broadcast_in_dim(shrink, (rows, head_dim), [0])
            narrow = weights.astype(dtype)
            plgpu.barrier_wait(v_full.at[place])
            if clean is not None:
                clean(values)

            def mix(acc):
                plgpu.wgmma(acc, narrow, values)

            mixed = pl.run_state(mix)(plgpu.ACC.init(mixed))
            plgpu.barrier_arrive(v_free.at[place])
            return mixed, new_peak, total

        def columns(size):
            return plgpu.broadcasted_iota(jnp.int32, (rows, size), 1, layout=plgpu.Layout.WGMMA)

        def silence(values, size, count):
            """Zeroes the rows from `count` on: a weight of 0 does not silence a NaN. Every consumer writes the same zeros."""
            row = plgpu.broadcasted_iota(jnp.int32, (size, head_dim), 0, layout=plgpu.Layout.WGMMA)
            held = _load(values, plgpu.Layout.WGMMA)
            values[...] = jnp.where(row < count, held, jnp.zeros_like(held))
            plgpu.commit_smem()

        def tail_step(i, carry):
            clean = None
            if tail_blocks * tail_block > aligned(tail):  # up to there are zeros
                clean = lambda values: silence(values, tail_block, tail - i * tail_block)  # noqa: E731
            if mask_ref is not None:
                at = (slot, pl.ds(row0, rows), pl.ds(i * tail_block, tail_block))
                seen = _load(mask_ref.at[at], plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
                return attend(i, carry, tail_block, lambda _: seen > 0.5, clean)

            def causal(size):
                row = plgpu.broadcasted_iota(jnp.int32, (rows, size), 0, layout=plgpu.Layout.WGMMA) + row0
                return columns(size) + i * tail_block <= lax.div(row, group)

            return attend(i, carry, tail_block, causal, clean)

        def prefix_step(i, carry, edge):
            base = (start + i) * block

            def visible(size):
                column = columns(size) + base
                seen = column < length
                if starts is not None:
                    seen = seen & (column >= lax.broadcast_in_dim(starts, (rows, size), [0]))
                return seen

            def clean(values):
                silence(values, block, length - base)

            masked = edge or starts is not None
            return attend(tail_steps + i, carry, block, visible if masked else None, clean if edge else None)

        row_layout = plgpu.Layout.WGMMA.reduce(1)
        carry = (
            plgpu.layout_cast(jnp.zeros((rows, head_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((rows,), _EMPTY, jnp.float32), row_layout),
            plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), row_layout),
        )
        carry = lax.fori_loop(0, tail_steps, tail_step, carry)
        # Only the block in which the length lies needs a mask.
        whole = jnp.clip(lax.div(length, block) - start, 0, prefix_blocks)
        carry = lax.fori_loop(0, whole, functools.partial(prefix_step, edge=False), carry)
        mixed, peak, total = lax.fori_loop(whole, prefix_blocks, functools.partial(prefix_step, edge=True), carry)

        total = jnp.maximum(total, 1e-30)  # a share without a visible row: log-sum-exp far below all others, output 0
        out[...] = (mixed / lax.broadcast_in_dim(total, (rows, head_dim), [0])).astype(out.dtype)
        if lse_ref is not None:
            lse_smem.at[warpgroup][...] = peak + jnp.log(total) * _LOG2E
        plgpu.commit_smem()
        stored = min(stored_rows, rows)  # below one tile only the rows that exist are written
        plgpu.copy_smem_to_gmem(
            out if stored == rows else out.at[pl.ds(0, stored)],
            out_ref.at[slot, head, split, pl.ds(row0, stored)],
        )
        if lse_ref is not None:
            plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_ref.at[slot, head, split, pl.ds(row0, rows)])
        plgpu.wait_smem_to_gmem(0)


def _transposed(ref: Any) -> Any:
    if hasattr(ref, "transpose"):
        return ref.transpose((1, 0))
    return plgpu.transpose_ref(ref, (1, 0))


def _load(ref: Any, layout: Any, optimized: bool = True) -> Any:
    # Before jax 0.11 `load` took the index apart from the reference, and demanded one; since 0.12 it takes none.
    index = inspect.signature(plgpu.load).parameters.get("idx")
    needed = index is not None and index.default is inspect.Parameter.empty
    return plgpu.load(ref, *([...] if needed else []), layout=layout, optimized=optimized)
