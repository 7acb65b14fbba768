"""What a adaptive costs where no draft is accepted: the same outputs with and without it, by turns in one run.

    python benchmarks/adaptive.py --model 8B --batch 1 8 32 --out results.json

Weights are random, so that nothing the head drafts is accepted: the worst text there is. Every slot generates `--tokens` tokens
behind a cache of `--context`, in one dispatch, three ways: by a program that only decodes plainly; by adaptive speculation
when it is made to stay with plain rounds; and as it is, which tries to draft first, and now and then. The ratios are medians
over the turns; calibration and compilation are not counted.
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

from eagle_jax.decoding.adaptive import AdaptiveSpeculation, forced
from eagle_jax.engine.calibration import at_length, candidate_name, measure_candidates
from eagle_jax.engine.config import EngineConfig
from eagle_jax.engine.programs import Programs
from eagle_jax.engine.scheduler import UNBOUNDED
from eagle_jax.measurement import geometry
from eagle_jax.sampling import SamplingMode
from eagle_jax.speculative_config import default_candidates


def generate(programs: Programs, context: int, costs: Any = None) -> tuple[float, int]:
    """Seconds of one generation of which nothing is accepted, and its rounds."""
    plan, state = programs.plan, programs.init()
    places = jax.tree.map(lambda x: x.sharding, state)
    state = jax.block_until_ready(jax.device_put(at_length(plan, programs.weights, state, context), places))
    if state.adaptive is not None:
        costs = jax.device_put(np.asarray(costs, np.float32), state.adaptive.costs.sharding)
        state = dataclasses.replace(state, adaptive=dataclasses.replace(state.adaptive, costs=costs))
    start, rounds = time.perf_counter(), 0
    while True:  # a report is full before the output is complete
        state, report = programs.decode(
            state, range(plan.slots), SamplingMode.GREEDY, rounds=plan.max_length, max_ended=UNBOUNDED
        )
        slots = programs.read(report).values()
        assert all(length == 1 for slot in slots for length in slot.round_lengths), "a draft was accepted"
        rounds += max(len(slot.round_lengths) for slot in slots)
        if all(slot.length + 1 == plan.max_length for slot in slots):
            return time.perf_counter() - start, rounds


def measure(
    target: Any, head: Any, adaptive: AdaptiveSpeculation, batch: int, args: argparse.Namespace, say: Any
) -> dict[str, Any]:
    """The figures of one number of slots."""
    chunk = 64 if jax.default_backend() == "cpu" else 256
    options = {"max_num_seqs": batch, "max_model_len": args.context + args.tokens, "prefill_chunk": chunk}
    plain = Programs(target, None, EngineConfig(**options))
    engine = Programs(target, head, EngineConfig(tree=adaptive, **options))
    for one in (plain, engine):
        say(f"compiled in {one.compile(SamplingMode.GREEDY):.1f} s")
    costs = measure_candidates(engine, SamplingMode.GREEDY, args.context)
    ways = {
        "plain program": lambda: generate(plain, args.context),
        "plain candidate": lambda: generate(engine, args.context, forced(adaptive, 0)),
        "adaptive": lambda: generate(engine, args.context, costs),
    }
    runs = [{name: way() for name, way in ways.items()} for _ in range(args.repeats + 1)][1:]
    result = {
        "batch": batch,
        "rungs_ms": dict(zip(map(candidate_name, adaptive.candidates), costs, strict=True)),
        "seconds": {name: [run[name][0] for run in runs] for name in ways},
        "rounds": {name: runs[-1][name][1] for name in ways},
        "ratio": {name: statistics.median(run[name][0] / run["plain program"][0] for run in runs) for name in ways},
    }
    ms = statistics.median(result["seconds"]["plain program"]) / args.tokens * 1e3
    ratio = result["ratio"]
    say(
        f"batch {batch}: plain {ms:.3f} ms a step; plain candidate {ratio['plain candidate']:.4f} x, "
        f"adaptive {ratio['adaptive']:.4f} x"
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B", help="published geometry (default: 8B)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=1024, help="tokens in the caches at the start (default: 1024)")
    parser.add_argument("--tokens", type=int, default=256, help="of each output (default: 256)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="write all figures to this JSON file")
    args = parser.parse_args()
    name, config = geometry.find_geometry(args.model)
    head_config = geometry.eagle3_head_of(config)
    target = geometry.random_target(config, jnp.dtype(args.dtype))
    head = geometry.random_head(head_config, jnp.dtype(args.dtype))
    adaptive = default_candidates(head_config, jax.default_backend())
    report = {
        "model": name,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "settings": {key: str(value) for key, value in vars(args).items()},
        "rows": [],
    }
    for batch in args.batch:
        report["rows"].append(measure(target, head, adaptive, batch, args, Console().print))
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
