"""Tensor parallelism measured: plain decoding and rounds at several numbers of devices, in one run.

    python benchmarks/tensor_parallel.py --cases 8B:1,2 --out results                      # two GPUs, about three minutes
    python benchmarks/tensor_parallel.py --cases 70B:8,4 8B:1,2,4,8 --batch 1 16 --time-limit 570 --out results     # eight

Weights are random and made on the devices. Each figure is the median of loops inside one program (`decode`). The share of
collectives is the time that is saved by the same program without them: its results are wrong, its other work is the same. Before
that, small float32 models, one of them with a single key/value head, say the same tokens at every size; a difference is allowed
where the float64 gap between the two tokens is below 1e-5 of the largest logit. Everything goes into one JSON file, rewritten
after every case, so that a run that is cut short leaves what it has.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.float64_models import Float64Llama
from support.near_ties import NearTies
from support.spread import spread_module
from support.tiny import draft_config, llama_config, random_llama
from support.tiny import random_head as small_head

from eagle_jax.decoding.compiler import compile_for_device
from eagle_jax.decoding.loop import decode, init_state, state_shapes
from eagle_jax.decoding.placement import everywhere
from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.engine.calibration import at_length
from eagle_jax.engine.config import EngineConfig
from eagle_jax.engine.core import EngineCore
from eagle_jax.engine.programs import Programs
from eagle_jax.engine.request import Request
from eagle_jax.measurement import loops
from eagle_jax.measurement.geometry import PUBLISHED, eagle3_head_of, find_geometry, random_head, random_target
from eagle_jax.models import LlamaConfig
from eagle_jax.parallel import make_mesh
from eagle_jax.parallel.counting import count_collectives, total_of
from eagle_jax.sampling import SamplingMode

TREE = TreeConfig(total_tokens=60, depth=7, top_k=10)
SMALL_TREE = TreeConfig(total_tokens=24, depth=3, top_k=5)
ROOM = 768
TINY = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8,
    head_dim=64, max_position_embeddings=8192,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """One program to be timed."""

    name: str
    """"plain" or "round", then what is different."""
    batch: int
    draft_tp: int | None
    """None decodes plainly."""
    collectives: bool = True


@contextlib.contextmanager
def without_collectives(shards: int) -> Iterator[None]:
    """Inside, traced programs compute what they compute, but no device says anything to another."""
    gather = lambda x, axis: jnp.broadcast_to(x[None], (shards, *x.shape))  # noqa: E731
    with (
        mock.patch.object(jax.lax, "psum", lambda x, axis: x),
        mock.patch.object(jax.lax, "pmax", lambda x, axis: x),
        mock.patch.object(jax.lax, "all_gather", gather),
    ):
        yield


def geometry(name: str) -> LlamaConfig:
    return TINY if name == "tiny" else find_geometry(name)[1]


class Case:
    """One model at one number of devices."""

    def __init__(self, shape: str, tp: int, context: int, runs: int, steps: int):
        self.config, self.tp, self.context, self.runs, self.steps = geometry(shape), tp, context, runs, steps
        self.mesh = make_mesh(tp)
        self.target = random_target(self.config, jnp.dtype(jnp.bfloat16), self.mesh)
        self.heads: dict[int, Any] = {}

    def head(self, draft_tp: int) -> Any:
        if draft_tp not in self.heads:
            config = eagle3_head_of(self.config)
            if draft_tp < self.tp:
                config = dataclasses.replace(config, own_embedding=True)
            self.heads[draft_tp] = random_head(config, jnp.dtype(jnp.bfloat16), self.mesh, draft_tp)
        return self.heads[draft_tp]

    def programs(self, job: Job) -> Programs:
        head = None if job.draft_tp is None else self.head(job.draft_tp)
        config = EngineConfig(
            tree=None if head is None else TREE, max_num_seqs=job.batch, max_model_len=self.context + ROOM,
            prefill_chunk=256,
        )  # fmt: skip
        return Programs(self.target, head, config, self.mesh)

    def lower(self, job: Job) -> tuple[Programs, jax.stages.Lowered]:
        engine = self.programs(job)
        plan, weights = engine.plan, engine.weights
        steering = everywhere((np.ones((job.batch,), bool), np.int32(1), np.int32(1)), plan.mesh)
        arguments = (plan, weights, state_shapes(plan, weights), *steering)
        if job.collectives:
            return engine, decode.lower(*arguments)
        jax.clear_caches()  # a trace without collectives must not be taken for one with them, nor the other way round
        with without_collectives(self.tp):
            lowered = decode.lower(*arguments)
        jax.clear_caches()
        return engine, lowered

    def time(self, engine: Programs, program: Any, job: Job) -> loops.Measured:
        plan, weights = engine.plan, engine.weights
        most = ROOM // (1 + (0 if plan.tree is None else plan.tree.max_depth))
        places = jax.tree.map(lambda x: x.sharding, state_shapes(plan, weights))

        def run(steps: int) -> tuple[float, int]:
            state = at_length(plan, weights, init_state(plan, weights), self.context)
            if plan.mesh is not None:
                state = jax.device_put(state, places)
            active = np.ones((job.batch,), bool)
            seconds, (_, report) = loops.timed(
                program, weights, state, active, np.int32(min(steps, most)), np.int32(99)
            )
            return seconds, max(len(slot.round_lengths) for slot in plan.layout.unpack(report).values())

        return loops.measure(run, runs=self.runs, steps=self.steps)


def jobs_of(tp: int, batches: list[int]) -> list[Job]:
    """Those that matter most first; what is done with one batch alone is done with the first."""
    jobs = [job for batch in batches for job in (Job("plain", batch, None), Job("round", batch, tp))]
    if tp > 1:
        jobs.append(Job("round, draft tp 1", batches[0], 1))
        jobs.append(Job("round, no collectives", batches[0], tp, collectives=False))
        jobs.append(Job("plain, no collectives", batches[0], None, collectives=False))
    return jobs


def measure_case(
    shape: str, tp: int, args: argparse.Namespace, say: Any, deadline: float, cases: list[Any], write: Any
) -> None:
    """Adds what it measures to `cases`, and writes after every row."""
    start = time.perf_counter()
    case = Case(shape, tp, args.context, args.runs, args.steps)
    jax.block_until_ready([x[...] for x in (case.target.embed.weight, case.target.norm.weight)])
    say(f"{shape} tp {tp}: weights made in {time.perf_counter() - start:.1f} s")
    device = jax.devices()[0]
    result: dict[str, Any] = {"shape": shape, "tp": tp, "rows": []}
    cases.append(result)
    jobs = jobs_of(tp, args.batch)
    with concurrent.futures.ThreadPoolExecutor(args.compilers) as pool:
        pending = []
        for job in jobs:
            engine, lowered = case.lower(job)
            pending.append((job, engine, pool.submit(compile_for_device, lowered, device)))
        for job, engine, future in pending:
            if time.perf_counter() > deadline:
                future.cancel()
                result.setdefault("skipped", []).append(f"{job.name}, batch {job.batch}")
                continue
            program = future.result()
            measured = case.time(engine, program, job)
            memory = program.memory_analysis()
            counts = count_collectives(program.as_text())
            result["rows"].append({
                "what": job.name, "batch": job.batch, "ms": measured.ms, "runs": measured.runs, "steps": measured.steps,
                "collectives": counts, "collectives_in_all": total_of(counts),
                "argument_bytes": memory.argument_size_in_bytes, "temporary_bytes": memory.temp_size_in_bytes,
            })  # fmt: skip
            say(f"{shape} tp {tp} batch {job.batch}, {job.name}: {measured.ms:.3f} ms, {total_of(counts)} collectives")
            times = {(row["what"], row["batch"]): row["ms"] for row in result["rows"]}
            result["share_of_collectives"] = {
                f"{what}, batch {batch}": 1 - times[f"{what}, no collectives", batch] / ms
                for (what, batch), ms in times.items()
                if (f"{what}, no collectives", batch) in times
            }
            stats = device.memory_stats() or {}
            result["peak_bytes_in_use"] = stats.get("peak_bytes_in_use")
            write()
    result["target_bytes_a_device"] = sum(
        x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(case.programs(jobs[0]).weights.target)
    )


def same_tokens(sizes: list[int], compilers: int, say: Any) -> list[dict[str, Any]]:
    """Small models in float32: greedy tokens of plain and speculative decoding at every size against one device."""
    found = []
    rng = np.random.default_rng(0)
    requests = [
        Request(request_id=str(i), prompt_token_ids=rng.integers(0, 97, 20).tolist(), max_new_tokens=100, index=i)
        for i in range(8)
    ]
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        for kv_heads in (8, 1):
            models = small_models(kv_heads)
            reference = Float64Llama(models[0])
            engines = {}
            for tp in sorted({1, *sizes}):
                mesh = make_mesh(tp)
                target, head = spread_module(models[0], mesh), spread_module(models[1], mesh)
                for tree in (None, SMALL_TREE):
                    config = EngineConfig(tree=tree, max_num_seqs=8, max_model_len=256, prefill_chunk=32)
                    engines[tp, tree] = EngineCore(target, None if tree is None else head, config, mesh=mesh)
            with concurrent.futures.ThreadPoolExecutor(compilers) as pool:
                list(pool.map(lambda engine: engine.programs.compile(SamplingMode.GREEDY), engines.values()))
            wanted = None
            for (tp, tree), engine in engines.items():
                ties = NearTies(lambda tokens, reference=reference: reference(tokens)[0][-1])
                tokens: list[list[int]] = [[] for _ in requests]
                for delta in engine.run(requests):
                    tokens[delta.index] += delta.token_ids
                wanted = wanted or tokens
                try:
                    equal = [
                        ties.compare(a, b, r.prompt_token_ids) for a, b, r in zip(tokens, wanted, requests, strict=True)
                    ]
                    row = {"equal": sum(equal), "of": len(equal), "near_ties": ties.ties}
                except AssertionError as error:
                    row = {"error": str(error)}
                found.append({"kv_heads": kv_heads, "tp": tp, "tree": tree is not None, **row})
                say(f"float32, {kv_heads} key/value heads, tp {tp}, {'tree' if tree else 'plain'}: {row}")
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    return found


def small_models(kv_heads: int) -> tuple[Any, Any]:
    target = llama_config(
        vocab_size=97, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=kv_heads, head_dim=64,
    )  # fmt: skip
    head = draft_config(
        target,
        draft_vocab_size=53,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=64,
        intermediate_size=256,
    )
    return random_llama(target, 0), small_head(head, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", default=["8B:1,2"], metavar="SHAPE:TP,TP", help=f"tiny, {', '.join(PUBLISHED)}"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24, help="steps of a run")
    parser.add_argument("--compilers", type=int, default=8, help="programs compiled side by side")
    parser.add_argument("--time-limit", type=float, default=3600, metavar="SECONDS", help="begin nothing after so long")
    parser.add_argument("--skip-tokens", action="store_true", help="leave the comparison of tokens out")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where tensor_parallel.json goes")
    args = parser.parse_args()
    begin = time.perf_counter()
    deadline = begin + args.time_limit

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f} s] {text}", flush=True)

    cases = [
        (shape, int(tp)) for case in args.cases for shape, _, sizes in [case.partition(":")] for tp in sizes.split(",")
    ]
    device = jax.devices()[0]
    report: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "device": device.device_kind, "devices": jax.device_count(), "jax": jax.__version__,
        "settings": {k: v for k, v in vars(args).items() if k != "out"}, "tree": dataclasses.asdict(TREE),
        "collectives_measured_by": "the same program without them", "cases": [], "skipped": [],
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        report["seconds"] = time.perf_counter() - begin
        (args.out / "tensor_parallel.json").write_text(json.dumps(report, indent=1))

    if not args.skip_tokens:
        report["same_tokens"] = same_tokens([tp for _, tp in cases], args.compilers, say)
        write()
    for shape, tp in cases:
        if time.perf_counter() > deadline:
            report["skipped"].append(f"{shape} tp {tp}")
            continue
        measure_case(shape, tp, args, say, deadline, report["cases"], write)
    write()
    say(f"written to {args.out / 'tensor_parallel.json'}")


if __name__ == "__main__":
    main()
