"""Time of the write of accepted rows into the caches of all layers: one kernel against XLA.

    python benchmarks/cache_write.py --out results.json

A program writes 50 times into caches that it updates in place; the figure is its time over 50, the loop's own cost included (some
20 to 30 us a turn on an H200), the median of several runs.
"""

import argparse
import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from pallas_kernels.cache_write import write_rows

WRITES = 50

CASES = {
    "8B, tree of 60": (64, 1, 8, 2048, 60, 8, 128),
    "8B, plain": (64, 1, 8, 2048, 1, 1, 128),
    "8B, tree of 60, 5 slots": (64, 5, 8, 512, 60, 8, 128),
    "70B, tree of 60": (160, 1, 8, 512, 60, 8, 128),
    "SmolLM2, chain of 3": (60, 1, 3, 2048, 4, 4, 64),
}
"""Buffers, slots, key/value heads, capacity, new rows, rows written, head_dim."""


def microseconds(case: tuple[int, ...], implementation: str, runs: int) -> list[float]:
    count, slots, heads, capacity, tokens, steps, head_dim = case
    caches = [jnp.zeros((slots, heads, capacity, head_dim), jnp.bfloat16) for _ in range(count)]
    rows = [jnp.full((slots, heads, tokens, head_dim), i, jnp.bfloat16) for i in range(count)]
    path = jnp.asarray(np.random.default_rng(0).integers(0, tokens, (slots, steps)), jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(caches: list[jax.Array], rows: list[jax.Array], path: jax.Array) -> list[jax.Array]:
        def body(turn: Any, caches: list[jax.Array]) -> list[jax.Array]:
            start = jnp.full((slots,), turn, jnp.int32)
            return write_rows(caches, rows, path, start, implementation=implementation)

        return jax.lax.fori_loop(0, WRITES, body, caches)

    times = []
    for _ in range(runs + 1):
        jax.block_until_ready(caches)
        begin = time.perf_counter()
        caches = jax.block_until_ready(run(caches, rows, path))
        times.append((time.perf_counter() - begin) / WRITES * 1e6)
    return times[1:]  # the first compiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementations", nargs="+", default=["mosaic_gpu", "xla"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="write all figures to this JSON file")
    args = parser.parse_args()
    device = jax.devices()[0].device_kind
    rows, table = [], Table("caches", *(f"{name} (us)" for name in args.implementations), title=device)
    for name, case in CASES.items():
        measured = {how: microseconds(case, how, args.runs) for how in args.implementations}
        table.add_row(name, *(f"{statistics.median(times):.1f}" for times in measured.values()))
        rows.append({"case": name, "shape": case, **measured})
    Console(width=100).print(table)
    if args.out:
        report = {"device": device, "jax": jax.__version__, "unit": "microseconds a write", "rows": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
