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
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from eagle_jax import (
    Draft,
    GenerationResult,
    SamplingParams,
    Target,
    generate,
    load_draft,
    load_target,
    speculative_generate,
)
from eagle_jax.loading.shipped import shipped_head
from eagle_jax.sampling import Features
from eagle_jax.sampling.noise import Stream, stream_key, vocabulary_gumbel
from eagle_jax.sampling.processing import process_logits
from eagle_jax.sampling.settings import SlotSettings

SAMPLING = {"greedy": {}, "seeded": {"temperature": 0.8, "top_p": 0.95}}
MODES = {"shape-invariant": True, "ordinary": False}


def scores(target: Target, ids: list[int], sampling: dict[str, Any], seed: int) -> np.ndarray:
    """What the token after `ids` is the argmax of: processed logits plus noise, `[V]`."""
    model, vocab_size = target.model, target.config.vocab_size
    size = 1 << (len(ids) - 1).bit_length()  # few shapes, few compilations
    tokens = jnp.asarray([ids + [0] * (size - len(ids))], jnp.int32)
    out = model(tokens, jnp.arange(size)[None], model.empty_cache(1, 1), jnp.zeros((1,), jnp.int32))
    logits = model.logits(out.hidden[:, len(ids) - 1 : len(ids)])
    settings = SlotSettings.of(SamplingParams(**sampling), seed, vocab_size, Features.SAMPLING)
    assert settings is not None
    slot = settings.batch_of_one()
    processed = process_logits(logits, slot)[0, 0]
    if not sampling:
        return np.asarray(processed)
    key = stream_key(slot.seeds, jnp.asarray([len(ids)]), Stream.TARGET)
    return np.asarray(processed + vocabulary_gumbel(key, jnp.arange(vocab_size))[0])


def differences(
    target: Target,
    prompts: list[list[int]],
    a: GenerationResult,
    b: GenerationResult,
    sampling: dict[str, Any],
    seeds: list[int],
) -> list[dict[str, Any]]:
    """Rows that differ, each with its first difference and the gap there."""
    found = []
    for row, (prompt, one, two) in enumerate(zip(prompts, a.token_ids, b.token_ids, strict=True)):
        if one == two:
            continue
        at = next((i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two)))
        gap = None
        if at < min(len(one), len(two)):
            values = scores(target, prompt + one[:at], sampling, seeds[row])
            gap = float(abs(values[one[at]] - values[two[at]]))
        found.append({"row": row, "token": at, "gap": gap})
    return found


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
    unequal = differences(target, prompts, plain, speculative, sampling, seeds)
    return {
        "rows": len(prompts),
        "equal": len(prompts) - len(unequal),
        "tokens": sum(map(len, plain.token_ids)),
        "accepted_length": speculative.metrics.mean_acceptance_length,
        "plain_seconds": middle - start,
        "speculative_seconds": end - middle,
        "differences": unequal,
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
    turns = [json.loads(line)["turns"][0] for line in args.prompts.read_text().splitlines()]
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
