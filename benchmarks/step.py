"""Time of one step at a published shape with random weights: plain decoding, verifying a tree, a whole round.

    python benchmarks/step.py --shape 8B --lengths 1024 8192 32768 --out results.json

Each step runs repeatedly inside one program (`decode`, or a loop of verifications), so no dispatch is counted; the figure is the
median of several runs divided by the steps. Random heads are almost never accepted: a round is timed, not its use.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from eagle_jax.decoding.loop import Plan, Weights, decode, init_state
from eagle_jax.decoding.state import RUNNING, DecodeState
from eagle_jax.decoding.tree import DraftTree, TreeConfig
from eagle_jax.decoding.verify import verify
from eagle_jax.models import DraftConfig, Eagle3Head, Llama, LlamaConfig
from pallas_kernels.tree_attention import backends

SHAPES: dict[str, dict[str, Any]] = {
    "1B": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "num_hidden_layers": 16, "vocab_size": 128256,
    },
    "8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "num_hidden_layers": 32, "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "num_hidden_layers": 4, "vocab_size": 512,
    },
}  # fmt: skip
TREE = TreeConfig(total_tokens=60, depth=7, top_k=10)
STEPS = 24
RUNS = 5


def random_module(make: Any, config: Any) -> tuple[nnx.GraphDef, Any]:
    """A module with small random weights in bfloat16, made on the device one array at a time."""
    graph, abstract = nnx.split(nnx.eval_shape(lambda: make(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))
    leaves, structure = jax.tree.flatten(abstract)

    def value(index: int, leaf: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return (0.02 * jax.random.normal(jax.random.key(index), leaf.shape, jnp.bfloat16)).astype(leaf.dtype)
        return jnp.zeros(leaf.shape, leaf.dtype)

    return graph, jax.tree.unflatten(structure, [value(i, leaf) for i, leaf in enumerate(leaves)])


def state_at(plan: Plan, weights: Weights, length: int) -> DecodeState:
    """A state whose slots hold `length` committed rows of zeros and run on."""
    state = init_state(plan, weights)
    lengths = jnp.full((plan.slots,), length, jnp.int32)
    draft = dataclasses.replace(state.draft, lengths=lengths - 1)
    return dataclasses.replace(
        state,
        lengths=lengths,
        prompt_lengths=lengths - 8,
        limits=jnp.full((plan.slots,), plan.max_length, jnp.int32),
        finish=jnp.full((plan.slots,), RUNNING, jnp.int32),
        draft=draft,
    )


def verify_loop(plan: Plan, weights: Weights, state: DecodeState, steps: jax.Array) -> jax.Array:
    """`steps` verifications of a full tree, one after the other."""
    target, drafter = plan.modules(weights)
    nodes = drafter.num_nodes
    parents = jnp.maximum(jnp.arange(nodes) - 10, 0).at[0].set(-1).astype(jnp.int32)
    depths = jnp.zeros((nodes,), jnp.int32)
    for node in range(1, nodes):
        depths = depths.at[node].set(depths[max(node - 10, 0)] + 1)
    shape = (plan.slots, nodes)

    def step(_: jax.Array, tokens: jax.Array) -> jax.Array:
        tree = DraftTree(
            tokens=tokens,
            parents=jnp.broadcast_to(parents, shape),
            depths=jnp.broadcast_to(depths, shape),
            scores=jnp.zeros(shape, jnp.float32),
        )
        return verify(target, state, tree, drafter.max_depth, drafter.capture_layers).choices

    return jax.lax.fori_loop(0, steps, step, jnp.zeros(shape, jnp.int32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="8B")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--attention", nargs="+", default=["mosaic_gpu", "xla_blocked", "xla"])
    parser.add_argument("--kinds", nargs="+", default=["verify", "plain", "round"])
    parser.add_argument("--out", type=Path, default=None, help="write all figures to this JSON file")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    config = LlamaConfig(max_position_embeddings=131072, **shape)
    width = {k: v for k, v in shape.items() if k != "num_hidden_layers"}
    layers = config.num_hidden_layers
    head = DraftConfig(
        method="eagle3", target_hidden_size=config.hidden_size, draft_vocab_size=min(32000, config.vocab_size),
        capture_layers=(1, layers // 2, layers - 1), **width,
    )  # fmt: skip
    target_def, target_state = random_module(Llama, config)
    head_def, head_state = random_module(Eagle3Head, head)
    console = Console()
    jobs = []
    for length in args.lengths:
        for attention in args.attention:
            for kind in args.kinds:
                plan = Plan(
                    target_def=target_def,
                    head_def=None if kind == "plain" else head_def,
                    tree=None if kind == "plain" else TREE,
                    slots=args.slots,
                    max_length=length + 600,
                    prefill_chunk=256,
                )
                weights = Weights(target_state, None if kind == "plain" else head_state)
                jobs.append((length, attention, kind, plan, weights))
    table = Table(
        "length", "attention", *[f"{kind} (ms)" for kind in args.kinds], title=f"{args.shape}, B = {args.slots}"
    )
    rows: list[dict[str, Any]] = []
    platform = jax.default_backend() if jax.default_backend() != "gpu" else "cuda"

    def lower(job: tuple[Any, ...]) -> Any:
        _, attention, kind, plan, weights = job
        backends.ORDER[platform] = (attention,)
        state = jax.eval_shape(init_state, plan, weights)
        if kind == "verify":
            function = jax.jit(verify_loop, static_argnames="plan")
            return function.lower(plan, weights, state, np.int32(1))
        return decode.lower(plan, weights, state, np.ones((plan.slots,), bool), np.int32(1), np.bool_(False))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        programs = []
        for job in jobs:
            jax.clear_caches()  # the backend is not part of what JAX caches lowerings by
            programs.append(pool.submit(lower(job).compile))
        for (length, attention, kind, plan, weights), future in zip(jobs, programs, strict=True):
            program = future.result()
            times = []
            for run in range(RUNS + 1):
                state = jax.block_until_ready(state_at(plan, weights, length))
                start = time.perf_counter()
                if kind == "verify":
                    jax.block_until_ready(program(weights, state, np.int32(STEPS)))
                else:
                    _, report = program(weights, state, np.ones((plan.slots,), bool), np.int32(STEPS), np.bool_(False))
                    jax.block_until_ready(report)
                if run:
                    times.append((time.perf_counter() - start) / STEPS * 1e3)
                del state
            if not rows or (rows[-1]["length"], rows[-1]["attention"]) != (length, attention):
                rows.append({"length": length, "attention": attention})
            rows[-1][kind] = statistics.median(times)
            console.print(f"{length} {attention} {kind}: {rows[-1][kind]:.3f} ms")
    for row in rows:
        table.add_row(str(row["length"]), row["attention"], *[f"{row[kind]:.2f}" for kind in args.kinds])
    console.print(table)
    if args.out:
        report = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "settings": vars(args) | {"out": None},
            "rows": rows,
        }
        args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
