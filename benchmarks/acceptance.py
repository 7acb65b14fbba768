"""Accepted lengths of a draft head over prompt files, and whether the outputs equal plain decoding (and transformers').

    python benchmarks/acceptance.py --target SmolLM2-135M-Instruct.Q4_1.gguf --prompts mt_bench.jsonl gsm8k.jsonl \
        --num-prompts 20 --max-tokens 128 --out results.json

Prompt files hold one JSON object a line with `turns`; the first turn is put into the chat template. Everything runs in float32
at `highest` matmul precision, greedily. A row that differs from plain decoding is listed with the gap between the two tokens
in the logits at the first difference, relative to the largest one: below 1e-5 it is a near tie, above it a fault. For
acceptance alone, with intervals and pictures, use `eagle-jax eval`, which measures by the same code.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from eagle_jax import Target, TreeConfig, load_draft, load_target
from eagle_jax.evaluation import Configuration, EvaluationSettings, Report, evaluate
from eagle_jax.evaluation.datasets import read_dataset
from eagle_jax.loading.shipped import shipped_head
from eagle_jax.models import CacheContext

SETTINGS = {
    "chain 3": TreeConfig.chain(3),
    "chain 5": TreeConfig.chain(5),
    "chain 7": TreeConfig.chain(7),
    "tree 60/5/10": TreeConfig(total_tokens=60, depth=5, top_k=10),
    "tree 60/7/10": TreeConfig(total_tokens=60, depth=7, top_k=10),
}


def relative_gap(target: Target, ids: list[int], first: int, second: int) -> float:
    """|logit[first] - logit[second]| / max |logit| after `ids`."""
    model = target.model
    tokens = jnp.asarray([ids], jnp.int32)
    out = model(tokens, CacheContext(jnp.arange(len(ids))[None], model.empty_cache(1, 1), jnp.zeros((1,), jnp.int32)))
    logits = np.asarray(model.logits(out.hidden[:, -1:]))[0, 0].astype(np.float64)
    return float(abs(logits[first] - logits[second]) / np.abs(logits).max())


def differences(target: Target, prompts: list[list[int]], ours: list[list[int]], theirs: list[list[int]]) -> list[dict]:
    """Rows that differ, each with its first difference and the gap there."""
    found = []
    for row, (prompt, a, b) in enumerate(zip(prompts, ours, theirs, strict=True)):
        if a == b:
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        gap = relative_gap(target, prompt + a[:at], a[at], b[at]) if at < min(len(a), len(b)) else None
        found.append({"row": row, "token": at, "relative_gap": gap})
    return found


def transformers_outputs(path: Path, prompts: list[list[int]], max_tokens: int, stops: list[int]) -> list[list[int]]:
    """Greedy outputs of transformers in float32 from the same GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).to(device)
    outputs = []
    for prompt in track(prompts, "transformers"):
        ids = torch.tensor([prompt], device=device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, eos_token_id=stops,
            pad_token_id=stops[0], repetition_penalty=1.0,
        )  # fmt: skip
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="target checkpoint")
    parser.add_argument("--draft", default=None, help="draft head (default: the shipped one)")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSONL files with `turns`")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--transformers", action="store_true", help="compare plain decoding with transformers too")
    parser.add_argument("--out", type=Path, default=None, help="write all figures to this JSON file")
    args = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    target = load_target(args.target, dtype="float32")
    draft = load_draft(args.draft or shipped_head("smollm2-135m-instruct-eagle3"), target)
    conditions = EvaluationSettings(output_len=args.max_tokens, max_num_seqs=args.max_num_seqs)
    configurations = {name: Configuration(shape=SETTINGS[name]) for name in args.settings}
    plain = Configuration(shape=None)
    report = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "settings": vars(args) | {"out": str(args.out)},
        "sets": {},
    }
    table = Table("set", "drafting", "accepted length", "rounds", "tokens", "equal to plain", "seconds")
    assert target.tokenizer is not None
    for file in args.prompts:
        dataset = read_dataset(file)
        dataset = dataclasses.replace(dataset, questions=dataset.questions[: args.num_prompts])
        evaluation = evaluate(target, draft, [plain, *configurations.values()], [dataset], conditions)
        rows = {
            c.name: [row.token_ids for row in evaluation.rows.requests if row.configuration == c.name]
            for c in evaluation.configurations
        }
        turns = [question.turns[0] for question in dataset.questions]
        prompts = [target.tokenizer.apply_chat_template([{"role": "user", "content": turn}]) for turn in turns]
        count = len(prompts)
        measured = Report(evaluation)
        part = measured.total(plain).to_json()
        figures = {"plain": {"tokens": part["output_tokens"], "seconds": part["seconds"]}}
        if args.transformers:
            reference = transformers_outputs(args.target, prompts, args.max_tokens, list(target.config.eos_token_ids))
            unequal = differences(target, prompts, rows[plain.name], reference)
            figures["transformers"] = {"equal": count - len(unequal), "differences": unequal}
            table.add_row(file.stem, "transformers", "", "", "", f"{count - len(unequal)} / {count}", "")
        for name, configuration in configurations.items():
            part = measured.total(configuration).to_json()
            unequal = differences(target, prompts, rows[configuration.name], rows[plain.name])
            figures[name] = {
                "accepted_length": part["mean_acceptance_length"],
                "interval": part["mean_acceptance_length_interval"],
                "rounds": part["rounds"],
                "histogram": {length: n for length, n in enumerate(part["histogram"], start=1) if n},
                "tokens": part["output_tokens"],
                "equal": count - len(unequal),
                "differences": unequal,
                "seconds": part["seconds"],
            }
            table.add_row(
                file.stem, name, f"{part['mean_acceptance_length']:.3f}", str(part["rounds"]), str(part["output_tokens"]),
                f"{count - len(unequal)} / {count}", f"{part['seconds']:.1f}",
            )  # fmt: skip
        report["sets"][file.stem] = figures
        if args.out:  # after each set: a run that is cut short keeps what it has
            args.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
