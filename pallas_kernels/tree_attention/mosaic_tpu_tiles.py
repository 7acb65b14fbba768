"""Tile sizes of the TPU kernel: what a call needs of VMEM, and the largest tiles that fit a device generation."""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp

LANES = 128
LARGEST_BLOCK = 2048
"""Most keys a step: the last block of a slot is read whole, so larger ones would be read in vain for short slots."""
SMALLEST_BLOCK = LANES
SUBLANES = 16
"""Query rows of a tile are a multiple of this: the second-minor tile of bfloat16."""

COMPILER_BYTES = 128 * 2**10
"""VMEM that the compiler takes for itself: up to 90 KiB were seen, for v5p."""


@functools.cache
def _generations() -> dict[str, dict[str, int]]:
    generations: dict[str, dict[str, int]] = json.loads(Path(__file__).with_name("mosaic_tpu_tiles.json").read_text())[
        "tiles"
    ]
    return generations


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one call is cut up."""

    heads: int
    """Key/value heads a step."""
    rows: int
    """Query rows a step and head: `queries` of each of the heads that share the key/value head, padded to whole sublanes."""
    queries: int
    """Queries (new tokens) a step."""
    block: int
    """Keys a step."""
    vmem_bytes: int
    """VMEM that the kernel takes, an upper bound that the compiler is given as its limit."""


def keys_across_lanes(head_dim: int) -> bool:
    """Whether XLA lays the rows of a cache `[B, Hkv, S, Dh]` along the lanes, as it does when head_dim does not fill them."""
    return head_dim % LANES != 0


def _padded(rows: int, columns: int, itemsize: int) -> int:
    """Bytes of an array in VMEM, where the last two dimensions are in whole tiles of 8 rows of 4 bytes by 128 lanes."""
    sublanes = 8 * max(1, 4 // itemsize)
    return math.ceil(rows / sublanes) * sublanes * math.ceil(columns / LANES) * LANES * itemsize


def vmem_bytes(
    heads: int, rows: int, block: int, *, tail: int, head_dim: int, itemsize: int, tail_mask: bool, windows: bool
) -> int:
    """VMEM that a step takes: buffers in pairs, the softmax in progress, and the scores of one head."""
    tail = math.ceil(tail / LANES) * LANES
    one = _padded(*((head_dim, block) if keys_across_lanes(head_dim) else (block, head_dim)), itemsize)
    keys = 2 * 2 * heads * one
    tail_keys = 2 * 2 * heads * _padded(tail, head_dim, itemsize)
    queries = 2 * 2 * heads * _padded(rows, head_dim, itemsize)  # and the output
    masks = 2 * tail_mask * _padded(rows, tail, 1) + 2 * windows * _padded(rows, 1, 4)
    softmax = heads * (_padded(rows, head_dim, 4) + 2 * _padded(rows, 1, 4))
    columns = max(block, tail)
    # Scores, their exponentials, the visible ones, and one product before it is added; float32 products keep split operands.
    products = _padded(rows, head_dim, 4) + (3 if itemsize == 4 else 1) * one
    # With windows the row of each key and the comparison with its query's first come on top.
    scores = (3 + 2 * windows) * _padded(rows, columns, 4) + _padded(rows, columns, itemsize) + products
    return keys + tail_keys + queries + masks + softmax + scores + COMPILER_BYTES


def choose_tiles(
    device_kind: str | None,
    *,
    queries: int,
    group: int,
    kv_heads: int,
    capacity: int,
    tail: int,
    head_dim: int,
    dtype: Any,
    tail_mask: bool,
    windows: bool,
) -> Tiles:
    """The tiles of a call on a kind of device; the smallest of all generations if the kind is not known.

    Raises:
      NotImplementedError: the smallest tiles do not fit VMEM.
    """
    generations = _generations()
    if device_kind in generations:
        limits = generations[device_kind]
    else:
        limits = {key: min(entry[key] for entry in generations.values()) for key in next(iter(generations.values()))}
    itemsize = jnp.dtype(dtype).itemsize
    measure = functools.partial(
        vmem_bytes, tail=tail, head_dim=head_dim, itemsize=itemsize, tail_mask=tail_mask, windows=windows
    )

    def read(heads: int, block: int) -> int:
        return 2 * heads * block * head_dim * itemsize

    # A device of several cores splits the steps of different heads between them.
    shares = min(limits["cores"], kv_heads)
    divisors = [heads for heads in range(1, kv_heads // shares + 1) if kv_heads % heads == 0]
    limit = limits["rows"]
    while True:
        per_tile = _queries_per_tile(queries, group, limit)
        rows = math.ceil(per_tile * group / SUBLANES) * SUBLANES
        fits = [
            (heads, block)
            for heads in divisors
            for block in _blocks(capacity)
            if measure(heads, rows, block) <= limits["vmem_bytes"]
            and (read(heads, block) <= limits["block_bytes"] or (heads, block) == (1, SMALLEST_BLOCK))
        ]
        if fits:
            # With all the heads that make blocks of a good size: short blocks waste little behind the end of a slot.
            enough = [pair for pair in fits if 2 * read(*pair) > limits["block_bytes"]]
            heads, block = max(enough) if enough else max(fits, key=lambda pair: read(*pair))
            return Tiles(heads, rows, per_tile, block, measure(heads, rows, block))
        if per_tile == _queries_per_tile(queries, group, limit // 2):
            least = measure(1, rows, SMALLEST_BLOCK)
            raise NotImplementedError(
                f"{rows} query rows and {tail} tail rows of head_dim {head_dim} take {least} bytes of VMEM, more than "
                f"{limits['vmem_bytes']}"
            )
        limit //= 2


def _blocks(capacity: int) -> list[int]:
    """Numbers of keys that a step may have, none of which reaches more than once beyond the capacity."""
    sizes = [SMALLEST_BLOCK]
    while sizes[-1] < min(capacity, LARGEST_BLOCK):
        sizes.append(2 * sizes[-1])
    return sizes


def _queries_per_tile(queries: int, group: int, limit: int) -> int:
    """All queries if their rows are within the limit, else as many as make whole sublanes of rows."""
    if queries * group <= limit:
        return queries
    step = SUBLANES // math.gcd(SUBLANES, group)
    return max(limit // (group * step), 1) * step
