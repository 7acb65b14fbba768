"""Speed of plain and speculative decoding, and of transformers' plain decoding, on the same prompts in one run.

    python benchmarks/speed.py --target SmolLM2-135M-Instruct.Q4_1.gguf --prompts gsm8k.jsonl mt_bench.jsonl \
        --num-prompts 3 --max-tokens 192 --out results.json

One prompt at a time, greedily, each setting in turn on each prompt. The figures are medians over prompts of the time per token
after the prefill, compilation apart; beside them stand what all prompts together took, and of that the time of a round. Machines
are noisy: the ratios of one run are what counts. Prompt files are as in acceptance.py.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from eagle_jax import generate, load_draft, load_target, speculative_generate
from eagle_jax.drafters.tree import TreeConfig


def transformers_seconds(path: Path, prompts: list[list[int]], tokens: int, dtype: str) -> list[float]:
    """Seconds per token of transformers' greedy decoding after the prefill, for each prompt, from the same GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=getattr(torch, dtype)).to(
        device
    )

    def seconds(prompt: list[int], count: int) -> float:
        ids = torch.tensor([prompt], device=device)
        start = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=count, max_new_tokens=count
        )
        return time.perf_counter() - start

    seconds(prompts[0], 2)
    return [(seconds(prompt, tokens) - seconds(prompt, 1)) / (tokens - 1) for prompt in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="target checkpoint")
    parser.add_argument("--draft", default="smollm2-135m-instruct-eagle3", help="draft head (default: the shipped one)")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSONL files with `turns`")
    parser.add_argument("--num-prompts", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--chains", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--trees", nargs="*", default=[], metavar="TOTAL,DEPTH,TOP_K", help="also dynamic trees")
    parser.add_argument("--auto", action="store_true", help="also the ladder, tree='auto'")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--transformers", type=int, default=0, metavar="N", help="also time N tokens of transformers")
    parser.add_argument("--out", type=Path, default=None, help="write all figures to this JSON file")
    args = parser.parse_args()
    target = load_target(args.target, dtype=args.dtype)
    draft = load_draft(args.draft, target)
    assert target.tokenizer is not None
    report = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "settings": vars(args), "sets": {}}
    shapes: dict[str, dict[str, Any]] = {"plain": {}}
    shapes |= {f"chain {k}": {"num_speculative_tokens": k} for k in args.chains}
    for tree in args.trees:
        total, depth, top_k = map(int, tree.split(","))
        shapes[f"tree {tree}"] = {"tree": TreeConfig(total_tokens=total, depth=depth, top_k=top_k)}
    shapes |= {"auto": {"tree": "auto"}} if args.auto else {}
    table = Table("set", "decoding", "ms / token", "speed-up", "of all tokens", "accepted length", "ms / round")
    for file in args.prompts:
        turns = [json.loads(line)["turns"][0] for line in file.open(encoding="utf-8")][: args.num_prompts]
        prompts = [target.tokenizer.apply_chat_template([{"role": "user", "content": turn}]) for turn in turns]
        seconds: dict[str, list[float]] = {}
        rounds: dict[str, int] = {}
        lengths: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            common = {"prompts": {"prompt_token_ids": prompt}, "max_new_tokens": args.max_tokens}
            for name, shape in shapes.items():
                for warm in (True, False) if index == 0 else (False,):  # the first call compiles
                    if name == "plain":
                        result = generate(target, **common)
                    else:
                        result = speculative_generate(target, draft, **common, **shape)
                    if not warm:
                        tokens = len(result.token_ids[0]) - 1
                        seconds.setdefault(name, []).append(result.timing.decode_seconds / tokens)
                        lengths.setdefault(name, []).append(tokens)
                        rounds[name] = rounds.get(name, 0) + len(result.metrics[0].accepted_lengths)
        if args.transformers:
            seconds["transformers"] = transformers_seconds(args.target, prompts, args.transformers, args.dtype)
        plain = statistics.median(seconds["plain"])
        totals = {}  # tokens, and the seconds that they took
        for name, values in seconds.items():
            tokens_of = lengths.get(name, lengths["plain"])
            totals[name] = sum(tokens_of), sum(a * b for a, b in zip(values, tokens_of, strict=True))
        figures = {}
        for name, values in seconds.items():
            median = statistics.median(values)
            figures[name] = {
                "ms_per_token": 1e3 * median,
                "speed_up": plain / median,
                "speed_up_of_all_tokens": (totals["plain"][1] / totals["plain"][0])
                / (totals[name][1] / totals[name][0]),
                "accepted_length": totals[name][0] / rounds[name] if name in rounds else 1.0,
                "ms_per_round": 1e3 * totals[name][1] / rounds.get(name, totals[name][0]),
                "ms_per_token_of_prompts": [1e3 * value for value in values],
            }
            row = figures[name]
            table.add_row(file.stem, name, *(f"{row[key]:.2f}" for key in list(row)[:5]))
        report["sets"][file.stem] = figures
        if args.out:
            args.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
