"""Time of tree attention on a GPU: the Hopper kernel, the XLA paths, JAX's own attention, and the time to read the keys.

    python benchmarks/attention.py --out results.json

Each case is a program of several calls on caches that together exceed the L2 cache. The figure is the device time of a call, all
its kernels counted, from one profiler trace of all cases. JAX's own attention gets the new keys inside its cache, which spares it
the tail, and a dense mask where there is a tree.
"""

import argparse
import collections
import concurrent.futures
import functools
import glob
import gzip
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Loops inside CUDA graphs and the profiler do not go together: the first such program ended with a launch failure.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pallas_kernels.tree_attention import tree_attention

BANDWIDTH = 4.26e12
"""Bytes a second that a copy reaches on an H200."""
CALLS = 8
"""Calls of a program."""
RUNS = 3
"""Runs of a program in the trace; their mean counts."""


def ours(implementation: str) -> Callable[..., jax.Array]:
    def call(queries: jax.Array, keys: jax.Array, values: jax.Array, *rest: Any) -> jax.Array:
        scale = queries.shape[-1] ** -0.5
        return tree_attention(queries, keys, values, *rest, scale=scale, implementation=implementation)

    return call


def jax_own(implementation: str) -> Callable[..., jax.Array]:
    def call(queries, keys, values, lengths, tail_keys, tail_values, tail_mask):
        del tail_keys, tail_values
        size, tokens = keys.shape[1], queries.shape[1]
        if tail_mask is None:
            return jax.nn.dot_product_attention(
                queries, keys, values, key_value_seq_lengths=lengths + 1, implementation=implementation
            )
        column = jnp.arange(size) - lengths[:, None, None]  # [B, 1, S]
        inside = jnp.take_along_axis(tail_mask, jnp.clip(column, 0, tokens - 1), axis=2)
        mask = (column < 0) | ((column < tokens) & inside)
        return jax.nn.dot_product_attention(queries, keys, values, mask=mask[:, None], implementation=implementation)

    return call


CONTENDERS: dict[str, Callable[..., jax.Array]] = {
    "mosaic_gpu": ours("mosaic_gpu"),
    "xla_blocked": ours("xla_blocked"),
    "xla": ours("xla"),
    "jax xla": jax_own("xla"),
    "jax cudnn": jax_own("cudnn"),
}


def shapes(contender: str, batch: int, tokens: int, length: int, heads: tuple[int, int, int]) -> tuple[Any, ...]:
    query_heads, kv_heads, head_dim = heads
    capacity = -(-(length + tokens) // 256) * 256
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    cache = array(
        (batch, capacity, kv_heads, head_dim) if "jax" in contender else (batch, kv_heads, capacity, head_dim)
    )
    tail = array((batch, kv_heads, tokens, head_dim))
    mask = None if tokens == 1 else jax.ShapeDtypeStruct((batch, tokens, tokens), jnp.bool_)
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return array((batch, tokens, query_heads, head_dim)), cache, cache, lengths, tail, tail, mask


def compile_case(name: str, contender: str, case: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], int]:
    given = shapes(contender, *case)
    cached = 2 * math.prod(given[1].shape) * 2
    copies = max(1, min(CALLS, math.ceil(150e6 / cached)))
    call = jax.jit(CONTENDERS[contender])

    def run(queries: jax.Array, caches: list[tuple[jax.Array, jax.Array]], *rest: Any) -> jax.Array:
        mixed = queries
        for index in range(CALLS):
            # The next queries depend on the last result, so that no call is dropped or merged.
            mixed = call(queries + mixed * 1e-3, *caches[index % copies], *rest)
        return mixed

    run.__name__ = name
    queries, keys, values, *rest = given
    program = jax.jit(run).lower(queries, [(keys, values)] * copies, *rest).compile()
    return program, given, copies


def arguments(given: tuple[Any, ...], copies: int, length: int) -> tuple[Any, ...]:
    queries, keys, values, lengths, tail_keys, tail_values, mask = given

    def fill(shape: Any, seed: int) -> jax.Array:
        row = jax.random.normal(jax.random.key(seed), shape.shape[-1:], jnp.float32).astype(shape.dtype)
        return jnp.broadcast_to(row, shape.shape) + jnp.zeros(shape.shape, shape.dtype)

    caches = [(fill(keys, 2 * i), fill(values, 2 * i + 1)) for i in range(copies)]
    tree = None if mask is None else jnp.broadcast_to(jnp.tril(jnp.ones(mask.shape[1:], bool)), mask.shape)
    tail = fill(tail_keys, 100), fill(tail_values, 101)
    return fill(queries, 102), caches, jnp.full(lengths.shape, length, jnp.int32), *tail, tree


def device_times(folder: str) -> dict[str, list[float]]:
    """Microseconds of all kernels of each program's run, by program name."""
    (file,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
    with gzip.open(file) as stream:
        events = json.load(stream)["traceEvents"]
    process = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    thread = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    totals: dict[str, float] = collections.defaultdict(float)
    for event in events:
        if event.get("ph") != "X" or "GPU" not in process.get(event["pid"], ""):
            continue
        if "Stream" in thread.get((event["pid"], event["tid"]), "") and "hlo_module" in event.get("args", {}):
            totals[event["args"]["hlo_module"]] += event["dur"]
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="write all figures to this JSON file")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 32768, 131072])
    parser.add_argument("--heads", nargs="+", default=["32/8x128", "9/3x64"], help="query/key-value heads x head_dim")
    parser.add_argument("--memory", type=float, default=40e9, help="skip cases whose caches need more bytes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further case after so long")
    args = parser.parse_args()
    begin = time.monotonic()
    cases = []
    for text in args.heads:
        grouping, head_dim = text.split("x")
        query_heads, kv_heads = map(int, grouping.split("/"))
        for length in args.lengths:
            for batch in args.batches:
                for tokens in args.tokens:
                    if 4 * batch * kv_heads * length * int(head_dim) <= args.memory:
                        cases.append((batch, tokens, length, (query_heads, kv_heads, int(head_dim))))
    jobs = [(f"case_{i}_{j}", c, case) for i, case in enumerate(cases) for j, c in enumerate(args.contenders)]
    failures: dict[str, str] = {}
    console = Console()
    with concurrent.futures.ThreadPoolExecutor(8) as pool, tempfile.TemporaryDirectory() as folder:
        programs = [pool.submit(compile_case, *job) for job in jobs]
        ready = []
        for job, future in zip(track(jobs, "compiling", console=console), programs, strict=True):
            try:
                ready.append((job, *future.result()))
            except Exception as error:  # a contender that cannot do a case is a result
                failures[job[0]] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            if time.monotonic() - begin > args.seconds:
                for future in programs:
                    future.cancel()
                break
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = 0
        options.python_tracer_level = 0
        jax.profiler.start_trace(folder, profiler_options=options)
        for (name, _, case), program, given, copies in track(ready, "timing", console=console):
            try:
                data = arguments(given, copies, case[2])
                for _ in range(RUNS):
                    jax.block_until_ready(program(*data))
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        jax.profiler.stop_trace()
        times = device_times(folder)
    rows = []
    table = Table(
        "heads", "B", "length", "T", "read (us)", *args.contenders, "of bandwidth", title=jax.devices()[0].device_kind
    )
    for i, case in enumerate(cases):
        batch, tokens, length, (query_heads, kv_heads, head_dim) = case
        read = 4 * batch * kv_heads * length * head_dim / BANDWIDTH * 1e6
        row: dict[str, Any] = {
            "heads": f"{query_heads}/{kv_heads}x{head_dim}",
            "batch": batch,
            "length": length,
            "tokens": tokens,
            "read_us": read,
        }
        for j, contender in enumerate(args.contenders):
            total = times.get(f"jit_case_{i}_{j}")
            row[contender] = failures.get(f"case_{i}_{j}") if total is None else total / (CALLS * RUNS)
        rows.append(row)
        shown = [f"{row[c]:.1f}" if isinstance(row[c], float) else "-" for c in args.contenders]
        first = row[args.contenders[0]]
        share = f"{100 * read / first:.0f} %" if isinstance(first, float) else "-"
        table.add_row(row["heads"], str(batch), str(length), str(tokens), f"{read:.1f}", *shown, share)
    Console(width=150).print(table)
    if args.out:
        report = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "unit": "microseconds a call",
            "rows": rows,
        }
        args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
