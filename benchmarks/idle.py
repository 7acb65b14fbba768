"""How much of a generation the GPU idles, and in which kernels it spends its time.

    python benchmarks/idle.py --model 8B --tokens 48 --out results.json

One request with random weights is served, plainly and with a tree, under the profiler. CUDA graphs are off, so that the profiler
sees every kernel, and the host launches each; in ordinary runs it launches all rounds of a dispatch as one graph, and the gaps
between kernels are shorter. Idle is the time in which no kernel runs, between the first and the last of the generation behind its
prefill.
"""

import argparse
import collections
import functools
import glob
import gzip
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.engine.config import EngineConfig
from eagle_jax.engine.core import EngineCore
from eagle_jax.engine.request import Request
from eagle_jax.measurement import geometry


def kernels(folder: str) -> list[tuple[float, float, str, str]]:
    """Begin and end in microseconds, name and program of everything that ran on the device, in order."""
    (file,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
    with gzip.open(file) as stream:
        events = json.load(stream)["traceEvents"]
    process = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    thread = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    found = [
        (e["ts"], e["ts"] + e["dur"], e["name"], e.get("args", {}).get("hlo_module", ""))
        for e in events
        if e.get("ph") == "X"
        and "GPU" in process.get(e["pid"], "")
        and "Stream" in thread.get((e["pid"], e["tid"]), "")
    ]
    return sorted(found)


def profile(engine: EngineCore, request: Request, tokens: int) -> dict[str, Any]:
    """Serves the request once to compile, and once under the profiler; figures of what comes after the prefill."""
    serve = functools.partial(engine.run, [request])
    for _ in serve():
        pass
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        (output,) = (delta.output for delta in serve() if delta.output)
        jax.profiler.stop_trace()
        ran = kernels(folder)
    rounds = output.metrics.rounds
    ran = [event for event in ran if "decode" in event[3]]
    begin, end = ran[0][0], max(event[1] for event in ran)
    busy, until = 0.0, begin
    for start, stop, _, _ in ran:
        busy += max(0.0, stop - max(start, until))
        until = max(until, stop)
    names: collections.Counter[str] = collections.Counter()
    for start, stop, name, _ in ran:
        names[re.sub(r"[_.]\d+$", "", name)] += stop - start
    return {
        "rounds": rounds,
        "tokens": tokens,
        "milliseconds": (end - begin) / 1e3,
        "busy_milliseconds": busy / 1e3,
        "idle": 1 - busy / (end - begin),
        "kernels_a_round": len(ran) / rounds,
        "microseconds_a_round": {name: total / rounds for name, total in names.most_common(12)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B", help="published geometry (default: 8B)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of the output")
    parser.add_argument("--out", type=Path, default=None, help="write all figures to this JSON file")
    args = parser.parse_args()
    name, config = geometry.find_geometry(args.model)
    target = geometry.random_target(config, jnp.dtype(args.dtype))
    head = geometry.random_head(geometry.eagle3_head_of(config), jnp.dtype(args.dtype))
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, args.context).tolist()
    request = Request(request_id="prompt", prompt_token_ids=prompt, max_new_tokens=args.tokens)
    tree = TreeConfig(total_tokens=60, depth=7, top_k=10)
    common = {"max_num_seqs": 1, "max_model_len": args.context + args.tokens, "prefill_chunk": 256}
    rows = {
        "plain": profile(EngineCore(target, None, EngineConfig(**common)), request, args.tokens),
        "tree 60/7/10": profile(EngineCore(target, head, EngineConfig(tree=tree, **common)), request, args.tokens),
    }
    device = jax.devices()[0].device_kind
    table = Table("", "rounds", "ms", "busy ms", "idle", "kernels a round", title=f"{name} on {device}")
    for label, row in rows.items():
        figures = f"{row['milliseconds']:.1f}", f"{row['busy_milliseconds']:.1f}", f"{100 * row['idle']:.1f} %"
        table.add_row(label, str(row["rounds"]), *figures, f"{row['kernels_a_round']:.0f}")
    Console(width=110).print(table)
    if args.out:
        report = {"model": name, "device": device, "jax": jax.__version__, "context": args.context, "runs": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
