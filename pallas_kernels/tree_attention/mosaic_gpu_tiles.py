"""Tile sizes of the Hopper kernel: how much fits into a multiprocessor, and how many shares of the prefix pay."""

import dataclasses
import functools
import importlib.resources
import json
from typing import Any

MOST_SPLITS = 64
"""Beyond it the terms of the join would be too many for one kernel of XLA's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a call is cut into pieces."""

    rows: int
    """Query rows of a program instance: 64 for each consumer warpgroup."""
    block: int
    """Keys of a step."""
    stages: int
    """Steps whose keys and values are in flight or in use."""
    splits: int
    """Shares of the prefix."""


@functools.cache
def device_figures() -> dict[str, Any]:
    """What was measured, and how: `mosaic_gpu_tiles.json`. Other Hopper devices get the same tiles."""
    return json.loads(importlib.resources.files(__package__).joinpath("mosaic_gpu_tiles.json").read_text())


def choose_tiles(batch: int, kv_heads: int, rows: int, head_dim: int, capacity: int) -> Tiles:
    """Tiles for a call.

    Args:
      batch: B.
      kv_heads: Hkv.
      rows: query rows of a key/value head, T times Hq / Hkv.
      head_dim: Dh.
      capacity: rows of the cache, S. Lengths are not known when a program is made; the number of shares is the best for full
        slots, where it matters most.
    """
    tile_rows = 64 if rows <= 64 or head_dim > 128 else 128
    block = 64 if head_dim > 128 or capacity % 128 else 128
    tiles = -(-rows // tile_rows)
    splits = _choose_splits(batch * kv_heads, tiles, rows * head_dim, -(-capacity // block))
    output_bytes = 2 if splits == 1 else 4
    fixed = tile_rows * head_dim * output_bytes + 2816  # the rest: sums, barriers, scratch of reductions, alignment
    stages = min(8, (device_figures()["shared_memory_bytes"] - fixed) // (2 * 2 * block * head_dim))
    return Tiles(rows=tile_rows, block=block, stages=stages, splits=splits)


def _choose_splits(heads: int, tiles: int, values: int, blocks: int) -> int:
    """The number of shares with the least estimated time: waves of instances, each as long as its share, and the join."""
    figures = device_figures()
    times = figures["microseconds"]

    def microseconds(splits: int) -> float:
        waves = -(-heads * tiles * splits // figures["multiprocessors"])
        run = waves * (times["start_of_an_instance"] + times["step"] * (1 + -(-blocks // splits)))
        if splits == 1:
            return run
        joined = 2 * 4 * splits * heads * values  # float32, written and read
        return run + times["join"] + joined / figures["join_bytes_per_microsecond"]

    return min(range(1, min(blocks, MOST_SPLITS) + 1), key=microseconds)
