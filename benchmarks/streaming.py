"""What streaming costs: the same outputs with and without reading the tokens ten times a second, by turns in one run.

    python benchmarks/streaming.py --target SmolLM2-135M-Instruct.Q4_1.gguf --max-tokens 256 --out results.json

One prompt, greedily, past the end of the text; the figures are medians of the time a token takes after the prefill, compiled.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
from rich.console import Console

from eagle_jax import SamplingParams, load_draft, load_target
from eagle_jax.decoding.tree import TreeConfig
from eagle_jax.front.runner import SECONDS_PER_DISPATCH, Runner

PROMPT = "Explain why the sky is blue, and why sunsets are red."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="target checkpoint")
    parser.add_argument("--draft", default="smollm2-135m-instruct-eagle3", help="draft head (default: the shipped one)")
    parser.add_argument("--chain", type=int, default=2, help="drafted tokens a round (default: 2)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="write all figures to this JSON file")
    args = parser.parse_args()
    target = load_target(args.target, dtype=args.dtype)
    draft = load_draft(args.draft, target)
    params = [SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)]
    console, report = Console(), []
    for name, runner in (
        ("plain", Runner(target)),
        (f"chain {args.chain}", Runner(target, draft, TreeConfig.chain(args.chain))),
    ):
        prompts = runner.read(PROMPT, chat=True)
        whole: list[float] = []
        streamed: list[float] = []
        for repeat in range(args.repeats + 1):
            _, timing = runner.run(prompts, params, progress=False)
            start, tokens = time.perf_counter(), 0
            for delta in runner.stream(prompts, params):
                if not tokens:
                    start = time.perf_counter()
                    first = len(delta.token_ids)
                tokens += len(delta.token_ids)
            if repeat:
                whole.append(timing.decode_seconds / timing.decoded_tokens * 1e3)
                streamed.append((time.perf_counter() - start) / (tokens - first) * 1e3)
        ratio = statistics.median(b / a for a, b in zip(whole, streamed, strict=True))
        console.print(
            f"{name}: {statistics.median(whole):.2f} ms a token, streamed {statistics.median(streamed):.2f}, ratio {ratio:.3f}"
        )
        report.append({"kind": name, "whole_ms": whole, "streamed_ms": streamed, "ratio": ratio})
    if args.out:
        settings = {key: str(value) for key, value in vars(args).items()}
        device = jax.devices()[0].device_kind
        args.out.write_text(
            json.dumps(
                {
                    "device": device,
                    "jax": jax.__version__,
                    "seconds_per_dispatch": SECONDS_PER_DISPATCH,
                    "settings": settings,
                    "rows": report,
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
