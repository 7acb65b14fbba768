"""bfloat16: whether speculative decoding says, bit for bit, what plain decoding says, with and without shape-invariant programs.

    python benchmarks/shape_invariance.py --target SmolLM2-135M-Instruct.Q4_1.gguf --prompts mt_bench.jsonl --out results

Prompt files hold one JSON object a line with `turns`; the first turn is put into the chat template. Each of the settings below is
run twice, plainly and speculatively; a row counts as equal if all its tokens are. For each that differs the first difference is
listed, with the gap between the two tokens in the processed logits plus noise there, computed by a forward of its own: how near a
tie it was. Finished settings are in the folder and are not run again; with `--time-limit 180` no setting is begun after so many
seconds, and the same command later goes on.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from eagle_jax import (
    Draft,
    SamplingParams,
    Target,
    generate,
    load_draft,
    load_target,
    speculative_generate,
)
from eagle_jax.evaluation import first_divergences
from eagle_jax.loading.shipped import shipped_head

SAMPLING = {"greedy": {}, "seeded": {"temperature": 0.8, "top_p": 0.95}}
MODES = {"shape-invariant": True, "ordinary": False}


def run(
    target: Target,
    draft: Draft,
    prompts: list[list[int]],
    sampling: dict[str, Any],
    invariant: bool,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """One setting: plain against speculative decoding."""
    seeds = list(range(1, len(prompts) + 1))
    common = {
        "max_new_tokens": args.max_tokens, "max_num_seqs": args.max_num_seqs, "seed": seeds, "progress": True,
        "max_model_len": args.max_model_len, **sampling,
    }  # fmt: skip
    ids = [{"prompt_token_ids": prompt} for prompt in prompts]
    chain = {"num_speculative_tokens": args.num_speculative_tokens}
    start = time.perf_counter()
    same_program = {"draft": draft, **chain} if invariant else {}
    plain = generate(target, ids, **common, shape_invariant=invariant, **same_program)
    middle = time.perf_counter()
    speculative = speculative_generate(target, draft, ids, **common, **chain, shape_invariant=invariant)
    end = time.perf_counter()
    params = SamplingParams(**sampling)
    unequal = first_divergences(target, prompts, plain.token_ids, speculative.token_ids, params=params, seeds=seeds)
    return {
        "rows": len(prompts),
        "equal": len(prompts) - len(unequal),
        "tokens": sum(map(len, plain.token_ids)),
        "accepted_length": speculative.metrics.mean_acceptance_length,
        "plain_seconds": middle - start,
        "speculative_seconds": end - middle,
        "differences": [{"row": one.row, "token": one.token, "gap": one.gap} for one in unequal],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="target checkpoint")
    parser.add_argument("--draft", default=None, help="draft head (default: the shipped one)")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file with `turns`")
    parser.add_argument("--num-prompts", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=1024, help="longer prompts are left out")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    args = parser.parse_args()
    begin = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    target = load_target(args.target, dtype=args.dtype)
    draft = load_draft(args.draft or shipped_head("smollm2-135m-instruct-eagle3"), target)
    assert target.tokenizer is not None
    turns = [json.loads(line)["turns"][0] for line in args.prompts.open(encoding="utf-8")]
    prompts = [target.tokenizer.apply_chat_template([{"role": "user", "content": turn}]) for turn in turns]
    prompts = [prompt for prompt in prompts if len(prompt) + args.max_tokens <= args.max_model_len][: args.num_prompts]
    table = Table(
        "sampling", "programs", "equal rows", "accepted length", "seconds plain", "seconds speculative", "gaps"
    )
    for sampling_name, sampling in SAMPLING.items():
        for mode, invariant in MODES.items():
            file = args.out / f"shape_invariance_{sampling_name}_{mode}.json"
            if file.exists():
                figures = json.loads(file.read_text())
            elif time.perf_counter() - begin > args.time_limit:
                print(f"{sampling_name} {mode}: left for the next run", flush=True)
                continue
            else:
                figures = run(target, draft, prompts, sampling, invariant, args)
                device = jax.devices()[0].device_kind
                figures |= {"device": device, "jax": jax.__version__, "settings": vars(args)}
                file.write_text(json.dumps(figures, indent=1, default=str) + "\n")
            gaps = sorted(d["gap"] for d in figures["differences"] if d["gap"] is not None)
            print(f"{sampling_name} {mode}: {figures['equal']} of {figures['rows']} rows equal", flush=True)
            table.add_row(
                sampling_name, mode, f"{figures['equal']} / {figures['rows']}", f"{figures['accepted_length']:.3f}",
                f"{figures['plain_seconds']:.1f}", f"{figures['speculative_seconds']:.1f}",
                f"{gaps[0]:.1e} .. {gaps[-1]:.1e}" if gaps else "",
            )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
