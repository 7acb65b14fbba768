"""What streaming costs: the same outputs with and without reading the tokens ten times a second, by turns in one run.

    python benchmarks/streaming.py --target SmolLM2-135M-Instruct.Q4_1.gguf --max-tokens 256 --out results.json
    python benchmarks/streaming.py --random-weights 8B --tree 60,7,10

One prompt, greedily, past the end of the text. The figures are medians of the time a token takes: that of the whole output less
that of an output of a single token, compiled.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from eagle_jax import load_draft, load_target
from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.engine.config import EngineConfig
from eagle_jax.engine.core import EngineCore
from eagle_jax.engine.request import Request
from eagle_jax.entrypoints.decoder import SECONDS_PER_DISPATCH
from eagle_jax.measurement import geometry

PROMPT = "Explain why the sky is blue, and why sunsets are red."
CONTEXT = 1024
"""Tokens of the prompt with random weights."""


def seconds(engine: EngineCore, request: Request) -> tuple[float, int]:
    """Of one generation, and how many parts it came in."""
    start = time.perf_counter()
    parts = sum(1 for _ in engine.run([request]))
    return time.perf_counter() - start, parts


def compare(engine: EngineCore, prompt: list[int], tokens: int, repeats: int) -> dict[str, Any]:
    """Milliseconds a token without and with looks at the output, by turns."""
    whole, one = (Request(request_id="prompt", prompt_token_ids=prompt, max_new_tokens=count) for count in (tokens, 1))
    streaming = dataclasses.replace(whole, seconds_per_dispatch=SECONDS_PER_DISPATCH)
    runs: list[tuple[float, float]] = []
    for repeat in range(repeats + 1):
        first, _ = seconds(engine, one)
        plainly, _ = seconds(engine, whole)
        streamed, updates = seconds(engine, streaming)
        if repeat:
            runs.append(((plainly - first) / (tokens - 1) * 1e3, (streamed - first) / (tokens - 1) * 1e3))
    return {
        "whole_ms": [a for a, _ in runs],
        "streamed_ms": [b for _, b in runs],
        "ratio": statistics.median(b / a for a, b in runs),
        "updates": updates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--target", type=Path, help="target checkpoint")
    models.add_argument("--random-weights", metavar="MODEL", help="published geometry with weights made on the device")
    parser.add_argument("--draft", default="smollm2-135m-instruct-eagle3", help="draft head (default: the shipped one)")
    parser.add_argument("--chain", type=int, default=2, help="drafted tokens a round (default: 2)")
    parser.add_argument("--tree", default=None, metavar="TOTAL,DEPTH,TOP_K", help="measure this tree, too")
    parser.add_argument("--dtype", default="auto", help="with --random-weights auto is bfloat16")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="write all figures to this JSON file")
    args = parser.parse_args()
    if args.random_weights:
        name, config = geometry.find_geometry(args.random_weights)
        dtype = jnp.dtype("bfloat16" if args.dtype == "auto" else args.dtype)
        target = geometry.random_target(config, dtype)
        head = geometry.random_head(geometry.eagle3_head_of(config), dtype)
        prompt = np.random.default_rng(0).integers(0, config.vocab_size, CONTEXT).tolist()
    else:
        name, loaded = args.target.name, load_target(args.target, dtype=args.dtype)
        target, head = loaded.model, load_draft(args.draft, loaded).head
        prompt = loaded.tokenizer.encode(loaded.tokenizer.render_chat([{"role": "user", "content": PROMPT}]), False)
    trees: dict[str, TreeConfig | None] = {"plain": None, f"chain {args.chain}": TreeConfig.chain(args.chain)}
    if args.tree:
        total, depth, top_k = map(int, args.tree.split(","))
        trees[f"tree {args.tree}"] = TreeConfig(total_tokens=total, depth=depth, top_k=top_k)
    console, rows = Console(), []
    for label, tree in trees.items():
        config = EngineConfig(
            tree=tree,
            max_num_seqs=1,
            max_model_len=len(prompt) + args.max_tokens,
            prefill_chunk=64 if jax.default_backend() == "cpu" else 256,
        )
        engine = EngineCore(target, None if tree is None else head, config)
        row = {"kind": label, **compare(engine, prompt, args.max_tokens, args.repeats)}
        console.print(
            f"{label}: {statistics.median(row['whole_ms']):.2f} ms a token, streamed "
            f"{statistics.median(row['streamed_ms']):.2f} in {row['updates']} parts, ratio {row['ratio']:.3f}"
        )
        rows.append(row)
    if args.out:
        report = {
            "model": name,
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "seconds_per_dispatch": SECONDS_PER_DISPATCH,
            "settings": {key: str(value) for key, value in vars(args).items()},
            "rows": rows,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
