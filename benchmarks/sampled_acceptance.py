"""Accepted length where tokens are sampled: every rule of acceptance with the drafts it works on.

    python benchmarks/sampled_acceptance.py --target SmolLM2-135M-Instruct.Q4_1.gguf \
        --prompts mt_bench.jsonl gsm8k.jsonl humaneval.jsonl --out results

Prompt files hold one JSON object a line with `turns`; the first turn is put into the chat template. Row i of every setting has
seed i + 1. Each finished setting is a file in the folder, and is not run again; with `--time-limit 180` no setting is begun after
so many seconds, and the same command later goes on.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eagle_jax import StaticTree, Target, TreeConfig, load_draft, load_target
from eagle_jax.decoding.rules import Rule, make_rule
from eagle_jax.evaluation import Configuration, Dataset, EvaluationSettings, Question, Report, evaluate
from eagle_jax.evaluation.datasets import read_dataset
from eagle_jax.loading.shipped import shipped_head
from eagle_jax.speculative_config import tree_config

DYNAMIC = {"tree": {"total_tokens": 60, "depth": 7, "top_k": 10}}
SAMPLED = {
    # Wider at the top, where it pays; 26 and 55 drafted tokens, siblings without gaps.
    "sampled tree 26": [
        *[[i] for i in range(6)],
        *[[i, j] for i, n in enumerate((4, 2, 1, 1)) for j in range(n)],
        *[[0, i, j] for i, n in enumerate((3, 1)) for j in range(n)], [1, 0, 0],
        *[[0, 0, 0, j] for j in range(2)], [0, 0, 1, 0], [0, 1, 0, 0],
        [0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0],
    ],
    "sampled tree 55": [
        *[[i] for i in range(8)],
        *[[i, j] for i, n in enumerate((6, 4, 3, 2, 1, 1)) for j in range(n)],
        *[[0, i, j] for i, n in enumerate((4, 3, 2, 1)) for j in range(n)],
        *[[1, i, j] for i, n in enumerate((2, 1)) for j in range(n)], [2, 0, 0],
        *[[0, 0, i, j] for i, n in enumerate((3, 2, 1)) for j in range(n)], [0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0],
        *[[0, 0, 0, i, j] for i, n in enumerate((2, 1)) for j in range(n)], [0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0],
    ],
}  # fmt: skip


def settings() -> dict[str, dict[str, Any]]:
    """Arguments of `speculative_generate` by name."""
    found: dict[str, dict[str, Any]] = {}
    shapes = {
        "chain 3": {"num_speculative_tokens": 3},
        "chain 5": {"num_speculative_tokens": 5},
        "tree 60/7/10": DYNAMIC,
    }
    shapes |= {name: {"tree": paths} for name, paths in SAMPLED.items()}
    for name, shape in shapes.items():
        sampled = name in SAMPLED
        found[f"{name}, seeded"] = shape
        found[f"{name}, seeded, greedy drafts"] = shape | {"draft_sample_method": "greedy"}
        found[f"{name}, standard, greedy drafts"] = shape | {"rejection_sample_method": "standard"}
        if name.startswith("chain"):
            both = {"rejection_sample_method": "standard", "draft_sample_method": "probabilistic"}
            found[f"{name}, standard, sampled drafts"] = shape | both
            found[f"{name}, block"] = shape | {"rejection_sample_method": "block"}
        if sampled:
            found[f"{name}, recursive"] = shape | {"rejection_sample_method": "recursive"}
            found[f"{name}, traversal"] = shape | {"rejection_sample_method": "traversal"}
    return found


def read_prompts(files: list[Path], target: Target, args: argparse.Namespace) -> Dataset:
    """The first turns of all files as one set, whose categories are the files."""
    assert target.tokenizer is not None
    questions = []
    for file in files:
        kept = []
        for question in read_dataset(file).questions:
            messages = [{"role": "user", "content": question.turns[0]}]
            if len(target.tokenizer.apply_chat_template(messages)) + args.max_tokens <= args.max_model_len:
                kept.append(Question(id=f"{file.stem} {question.id}", category=file.stem, prompt=messages))
        questions += kept[: args.num_prompts]
    return Dataset(name="all", questions=tuple(questions))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="target checkpoint")
    parser.add_argument("--draft", default=None, help="draft head (default: the shipped one)")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSONL files with `turns`")
    parser.add_argument("--num-prompts", type=int, default=20, help="of each file")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=512, help="longer prompts are left out")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 1.0])
    parser.add_argument("--settings", nargs="+", choices=settings(), default=list(settings()))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    args = parser.parse_args()
    begin = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    target = load_target(args.target, dtype=args.dtype)
    draft = load_draft(args.draft or shipped_head("smollm2-135m-instruct-eagle3"), target)
    prompts = read_prompts(args.prompts, target, args)
    stems = [file.stem for file in args.prompts]
    table = Table("setting", "T", "accepted length", *stems, "seconds")
    conditions = EvaluationSettings(
        output_len=args.max_tokens, max_num_seqs=args.max_num_seqs, max_model_len=args.max_model_len, seed=1
    )
    for name in args.settings:  # both temperatures of a setting share its programs
        for temperature in args.temperatures:
            file = args.out / f"{name} T{temperature}.json".replace("/", "-").replace(" ", "_").replace(",", "")
            if file.exists():
                figures = json.loads(file.read_text())
            elif time.perf_counter() - begin > args.time_limit:
                print(f"{name} T={temperature}: left for the next run", flush=True)
                continue
            else:
                start = time.perf_counter()
                shape, rule = split_setting(settings()[name])
                configuration = Configuration(shape=shape, temperature=temperature, rule=rule)
                evaluation = evaluate(target, draft, [configuration], [prompts], conditions)
                report = Report(evaluation)
                total = report.total(configuration).to_json()
                parts = {stem: report.category(configuration, "all", stem).to_json() for stem in stems}
                groups = evaluation.rows.groups
                figures = {
                    "accepted_length": total["mean_acceptance_length"],
                    "interval": total["mean_acceptance_length_interval"],
                    "sets": {stem: part["mean_acceptance_length"] for stem, part in parts.items()},
                    "rounds": total["rounds"],
                    "acceptance_rates": total["acceptance_rates"],
                    "tokens": total["output_tokens"],
                    "seconds": time.perf_counter() - start,
                    "compile_seconds": sum(group.compile_seconds for group in groups),
                    "decode_seconds": sum(group.decode_seconds for group in groups),
                    "device": evaluation.settings["device"],
                    "jax": evaluation.settings["jax"],
                    "settings": vars(args),
                }
                file.write_text(json.dumps(figures, indent=1, default=str) + "\n")
            print(f"{name} T={temperature}: {figures['accepted_length']:.3f} in {figures['seconds']:.1f} s", flush=True)
            table.add_row(
                name, str(temperature), f"{figures['accepted_length']:.3f}",
                *[f"{figures['sets'][stem]:.3f}" for stem in stems], f"{figures['seconds']:.1f}",
            )  # fmt: skip
    Console(width=120).print(table)


def split_setting(arguments: dict[str, Any]) -> tuple[TreeConfig | StaticTree, Rule]:
    """The shape and the rule of what `settings` gives."""
    rest = dict(arguments)
    shape = tree_config(rest.pop("num_speculative_tokens", None), rest.pop("tree", None), where="settings")
    assert shape is not None
    return shape, make_rule(**rest)


if __name__ == "__main__":
    main()
