"""The acceptance and speed of a head over the sets of the field, greedily and at temperature 1, as tables.

    python benchmarks/evaluation_table.py --target SmolLM2-135M-Instruct.Q4_1.gguf --data FOLDER --out OUT --time-limit 540

FOLDER holds mt_bench.jsonl, humaneval.jsonl, gsm8k.jsonl, alpaca.jsonl, qa.jsonl, sum.jsonl and spec_bench.jsonl; sets that come
with the package need no file, and `--sets` names fewer. There are two stages, each an `eagle-jax eval` whose rows are in OUT:
*acceptance*, many requests side by side, every prompt, both turns of MT-bench; and *speed*, one request at a time, some prompts
of each set, against plain decoding. Nothing is begun after `--time-limit` seconds: then the exit code is 1, and the same command
goes on. At the end OUT/table.json and OUT/table.md hold both. `--tiny` takes two prompts of each set, 32 tokens and small
shapes, to see that everything works.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from eagle_jax.cli import main as command

SETS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "qa", "sum", "spec_bench")
SHAPES = ["--num-spec-tokens", "3", "5", "--tree", "60,7,10"]
TINY = ["--num-spec-tokens", "3", "--tree", "8,2,3"]


def stage(args: argparse.Namespace, name: str, options: list[str], deadline: float) -> bool:
    """Runs one evaluation; False if time ran out."""
    left = deadline - time.perf_counter()
    arguments = [
        "eval", "--model-dir", str(args.target), "--eagle-dir", args.draft, "--dataset-name", *args.sets,
        *(["--dataset-path", str(args.data)] if args.data else []), *(TINY if args.tiny else SHAPES),
        "--temp", *map(str, args.temperatures), "--max-model-len", str(args.max_model_len),
        "--output", str(args.out / name), "--time-limit", f"{max(0.0, left):.0f}",
        *(["--dtype", args.dtype] if args.dtype else []), *options,
    ]  # fmt: skip
    print("eagle-jax " + " ".join(arguments), flush=True)
    code = command(arguments)
    if code not in (0, 1):
        sys.exit(code)
    return code == 0


def write_table(args: argparse.Namespace) -> None:
    """Both stages as JSON and as Markdown."""
    reports = {
        name: json.loads((args.out / name / "report.json").read_text())
        for name in ("acceptance", "speed")
        if (args.out / name / "report.json").exists()
    }
    (args.out / "table.json").write_text(json.dumps(reports, indent=1) + "\n")
    lines = []
    for name, report in reports.items():
        settings, configurations = report["settings"], report["configurations"]
        drafting = [entry for entry in configurations if entry["shape"] is not None]
        what = (
            "accepted length (95 % interval)"
            if name == "acceptance"
            else "speed-up over plain decoding (95 % interval)"
        )
        state = "" if report["complete"] else ", not complete"
        lines += [
            f"{what}: {settings['dtype']}, {settings['device']}, jax {settings['jax']}, {settings['max_num_seqs']} requests side "
            f"by side, {settings['output_len']} tokens an answer, {settings['turns']} turns{state}",
            "",
            "| set | " + " | ".join(entry["name"] for entry in drafting) + " |",
            "|---" * (len(drafting) + 1) + "|",
        ]
        key = "mean_acceptance_length" if name == "acceptance" else "speed_up"
        for dataset in [*settings["datasets"], "all"]:
            parts = [entry["total"] if dataset == "all" else entry["datasets"][dataset] for entry in drafting]
            cells = []
            for part in parts:
                ends = part.get(f"{key}_interval")
                cell = "-" if part.get(key) is None else f"{part[key]:.2f}"
                cells.append(cell + (f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else ""))
            lines.append(f"| {dataset} | " + " | ".join(cells) + " |")
        lines.append("")
    text = "\n".join(lines)
    (args.out / "table.md").write_text(text)
    print(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="target checkpoint")
    parser.add_argument("--draft", default="smollm2-135m-instruct-eagle3", help="draft head (default: the shipped one)")
    parser.add_argument("--data", type=Path, help="folder of the sets that do not come with the package")
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=64, help="of the stage acceptance")
    parser.add_argument("--max-model-len", type=int, default=4096, help="longer requests are left out and counted")
    parser.add_argument("--speed-prompts", type=int, default=8, help="of each set")
    parser.add_argument("--dtype", help="(default: float32 on CPU, bfloat16 elsewhere)")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True, help="folder for rows, reports and tables")
    args = parser.parse_args()
    deadline = time.perf_counter() + min(args.time_limit, 1e9)
    length = ["--output-len", "32" if args.tiny else str(args.output_len)]
    many = ["--max-num-seqs", "2" if args.tiny else str(args.max_num_seqs), "--turns", "2"]
    some = ["--num-prompts", "2"] if args.tiny else ["--num-prompts", str(args.speed_prompts)]
    complete = stage(args, "acceptance", [*length, *many, *(some if args.tiny else [])], deadline)
    complete = complete and stage(args, "speed", [*length, *some, "--plain"], deadline)
    write_table(args)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
