"""The recipe of the released head for SmolLM2-135M-Instruct, stage by stage; each can be cut and goes on where it was.

    python benchmarks/recipe_smollm2.py synthesize --model M.gguf --work DIR --prompts train_prompts.jsonl.gz \
        --evaluation mt_bench.jsonl humaneval.jsonl gsm8k.jsonl --minutes 8
    python benchmarks/recipe_smollm2.py train    --model M.gguf --work DIR --minutes 9
    python benchmarks/recipe_smollm2.py evaluate --model M.gguf --work DIR --evaluation ... --out DIR \
        --heads new=DIR/run/head shipped=smollm2-135m-instruct-eagle3
    python benchmarks/recipe_smollm2.py ablate   --model M.gguf --work DIR --out DIR --seconds 90
    python benchmarks/recipe_smollm2.py dry-run  --out DIR

On an H200 in bfloat16 the first makes about 50 million tokens in the time given, the second trains on them (140 million tokens
with padding by default), the third measures the head, and the one it would replace, by real decoding, the fourth trains short
runs that differ in one setting, the last trains a head for random weights of an 8B Llama. A stage that the time cut exits with
1: run it again. With `--devices N`, N GPUs share the synthesis and the batches of the training, and evaluations and ablations
run on them side by side. `--tiny` makes every stage small enough for a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SETS = ("mt_bench", "humaneval", "gsm8k")
SHAPES = {
    **{f"chain {n}": ["--num-spec-tokens", str(n)] for n in (3, 5, 7)},
    **{f"tree {shape}": ["--tree", shape.replace("/", ",")] for shape in ("60/5/10", "60/7/10")},
}
FIVE_LAYERS = ("2", "8", "15", "21", "27")
SHAPE = ["--method", "eagle3.1", "--draft-vocab-size", "16384", "--rope-theta", "10000"]
BASE = ["--loss", "lk_hybrid", "--learning-rate", "2e-3"]
ABLATIONS = {
    "base": [],
    "eagle3": ["--method", "eagle3"],
    "cross-entropy": ["--loss", "cross_entropy"],
    "five layers": ["--capture-layers", *FIVE_LAYERS],
    "vocabulary 8k": ["--draft-vocab-size", "8192"],
    "3 steps": ["--steps", "3"],
    "1 step": ["--steps", "1"],
    "random output head": ["--random-lm-head"],
    "muon": ["--optimizer", "muon"],
}
"""What differs from the base, the most informative first."""


def say(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


def lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file."""
    with path.open(encoding="utf-8") as file:  # not splitlines(): an answer may hold one of the rarer separators
        return [json.loads(line) for line in file]


def command(arguments: list[str]) -> int:
    """Runs `eagle-jax` in this process."""
    from eagle_jax.cli import main

    say("eagle-jax " + " ".join(arguments))
    return main(arguments)


def device_names(count: int) -> list[str]:
    """The GPUs that processes of this one may use, `count` of them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(count)]
    if len(names) < count:
        sys.exit(f"--devices {count} is more than CUDA_VISIBLE_DEVICES={visible} allows")
    return names[:count]


def start(arguments: list[str], name: str, log: Path) -> subprocess.Popen[bytes]:
    """Runs `eagle-jax` in a process of its own, on one GPU."""
    say(f"on device {name}: eagle-jax " + " ".join(arguments))
    with log.open("w") as file:
        # Several processes may share a device, so none may take its memory at once.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, "CUDA_VISIBLE_DEVICES": name}
        return subprocess.Popen(
            [sys.executable, "-m", "eagle_jax.cli", *arguments], stdout=file, stderr=file, env=environment
        )


def synthesize(options: argparse.Namespace) -> int:
    size = ["--slots", "8", "--limit", "16", "--invent", "4", "--max-new-tokens", "24", "--max-prompt-tokens", "80"]
    full = ["--slots", str(options.slots), "--invent", str(options.invent), "--max-new-tokens", "512",
            "--max-prompt-tokens", "256"]  # fmt: skip
    arguments = [
        "synthesize", "--model", options.model, "--prompts", *options.prompts,
        "--evaluation", *options.evaluation, "--drop-overlapping", *(size if options.tiny else full),
        "--max-minutes", str(options.minutes), "--json",
    ]  # fmt: skip
    if options.devices == 1:
        return command([*arguments, "--output", str(options.work / "data")])
    options.work.mkdir(parents=True, exist_ok=True)
    running = []
    for i, device in enumerate(device_names(options.devices), start=1):
        name = f"data-{i}-of-{options.devices}"
        part = ["--part", f"{i}/{options.devices}", "--output", str(options.work / name)]
        running.append(start([*arguments, *part], device, options.work / f"{name}.log"))
    return max(abs(process.wait()) for process in running)


def training(options: argparse.Namespace, name: str, changes: list[str], shape: list[str] = SHAPE) -> list[str]:
    """The command line of a training run on the synthesised data."""
    tiny = ["--sequence-length", "104", "--batch-rows", "2", "--held-out", "3", "--steps", "2", "--evaluation-depth", "3",
            "--evaluate-every", "2", "--log-every", "1", "--loss-chunk", "104"]  # fmt: skip
    full = ["--sequence-length", "1024", "--batch-rows", str(options.batch_rows), "--loss-chunk", "16384", "--held-out", "400",
            "--evaluate-every", "500", "--checkpoint-every", "1000"]  # fmt: skip
    data = sorted(folder for folder in options.work.glob("data*") if folder.is_dir())
    if len({folder.name.partition("-of-")[2] for folder in data}) != 1:
        sys.exit(f"{options.work} must hold one synthesis, of one number of devices, and has {[f.name for f in data]}")
    return [
        "train", "--model", options.model, "--data", *map(str, data), "--output", str(options.work / name), *shape,
        *BASE, *(tiny if options.tiny else full), *changes, "--no-picture", "--no-tensorboard", "--json",
    ]  # fmt: skip


def train(options: argparse.Namespace) -> int:
    length = ["--total-steps", "3"] if options.tiny else ["--train-tokens", str(options.tokens)]
    changes = ["--capture-layers", *FIVE_LAYERS] if options.five_layers else []
    shape = ["--from-head", options.from_head] if options.from_head else SHAPE
    changes = [*changes, "--data-parallel", str(options.devices)]
    arguments = training(options, "run", [*changes, *length, "--max-minutes", str(options.minutes)], shape)
    return command([*arguments, *options.extra])


def ablate(options: argparse.Namespace) -> int:
    """Runs of one length in tokens, each of about the seconds given without compilation, as many side by side as devices."""
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "ablations.json"
    rows = json.loads(file.read_text()) if file.is_file() else {}
    tokens = int(options.rate * options.seconds)
    length = ["--total-steps", "2"] if options.tiny else ["--train-tokens", str(tokens), "--evaluate-every", "100000"]
    waiting = [name for name in options.only or ABLATIONS if name not in rows]
    end = time.perf_counter() + 60 * options.minutes
    while waiting:
        if time.perf_counter() + options.seconds + 60 > end:  # a minute to load, compile and evaluate
            say(f"no time left for {', '.join(waiting)}: run again")
            return 1
        now, waiting = waiting[: options.devices], waiting[options.devices :]
        running = []
        for device, name in zip(device_names(options.devices), now, strict=False):
            folder = "ablation-" + name.replace(" ", "-")
            arguments = training(options, folder, [*ABLATIONS[name], *length])
            running.append((name, folder, start(arguments, device, options.out / f"{folder}.log")))
        failed = [name for name, _, process in running if process.wait()]
        for name, folder, _ in running:
            if name in failed:
                say(f"{name} failed; see {options.out / folder}.log")
                continue
            metrics = lines(options.work / folder / "metrics.jsonl")
            last = [row for row in metrics if row["kind"] == "evaluation"][-1]
            speed = [row for row in metrics if row["kind"] == "train"][-1]["tokens_per_second"]
            rows[name] = {
                "changes": ABLATIONS[name], "tokens": tokens, "chains": last["chains"], "sampled_length": last["sampled_length"],
                "tokens_per_second": speed, "seconds": tokens / speed,
            }  # fmt: skip
            file.write_text(json.dumps(rows, indent=1) + "\n")
            say(f"{name}: {rows[name]}")
        if failed:
            return 1
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """Accepted lengths by decoding: sets x shapes x temperatures, for the new head and others; each shape and temperature in a
    process."""
    options.out.mkdir(parents=True, exist_ok=True)
    heads = dict(pair.split("=", 1) for pair in options.heads) or {"new": str(options.work / "run" / "head")}
    names = [Path(path).stem for path in options.evaluation]
    size = ["--num-prompts", "2", "--output-len", "12", "--max-num-seqs", "2"] if options.tiny else [
        "--num-prompts", str(options.num_prompts), "--output-len", str(options.max_tokens),
        "--max-num-seqs", str(options.num_prompts),
    ]  # fmt: skip
    devices, running = device_names(options.devices), []
    for name, head in heads.items():
        for temperature in options.temperatures:
            for shape, flags in SHAPES.items():
                folder = options.out / f"{name}-{shape.replace(' ', '-').replace('/', '-')}-{temperature:g}"
                folder.mkdir(exist_ok=True)
                arguments = [
                    "eval", "--model-dir", options.model, "--eagle-dir", head, *flags, "--dataset-name", *names,
                    "--dataset-path", *options.evaluation, "--temp", str(temperature), *size,
                    "--output", str(folder), "--no-pictures", "--time-limit", str(60 * options.minutes),
                ]  # fmt: skip
                process = start(arguments, devices[len(running) % len(devices)], folder / "log")
                running.append((name, f"{shape} at {temperature:g}", folder, process))
    file, failed = options.out / "acceptance.json", 0
    rows = json.loads(file.read_text()) if file.is_file() else {}
    for name, shape, folder, process in running:
        if process.wait():
            say(f"{name}, {shape} is not complete; see {folder / 'log'}, or run again")
            failed = 1
            continue
        grouped: dict[tuple[str, str], list[list[int]]] = {}
        for row in lines(folder / "rows.jsonl"):
            if "accepted_lengths" in row:
                grouped.setdefault((row["dataset"], row["configuration"]), []).append(row["accepted_lengths"])
        for (dataset, configuration), lengths in grouped.items():
            first = [n for row in lengths for n in _within(row, 128)]
            key = f"{name}|{dataset}|{configuration}"
            rows[key] = {
                "accepted_length": sum(map(sum, lengths)) / max(1, sum(map(len, lengths))),
                "first_128": sum(first) / max(1, len(first)),
                "rounds": sum(map(len, lengths)), "tokens": sum(map(sum, lengths)), "prompts": len(lengths),
            }  # fmt: skip
            say(f"{key}: {rows[key]['accepted_length']:.3f} (first 128: {rows[key]['first_128']:.3f})")
    file.write_text(json.dumps(rows, indent=1) + "\n")
    return failed


def _within(lengths: list[int], tokens: int) -> list[int]:
    """The rounds that lie within the first tokens of an output."""
    out, emitted = [], 1
    for length in lengths:
        if emitted + length > tokens:
            break
        out.append(length)
        emitted += length
    return out


def dry_run(options: argparse.Namespace) -> int:
    """A few steps for random weights of an 8B Llama: tokens a second and memory."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from eagle_jax.measurement.geometry import random_target
    from eagle_jax.models import LlamaConfig
    from eagle_jax.training.attention import cudnn_refusal
    from eagle_jax.training.batch import PackedBatch
    from eagle_jax.training.config import HeadConfig
    from eagle_jax.training.head import HeadTemplate, initial_parameters
    from eagle_jax.training.losses import LossConfig
    from eagle_jax.training.optimizers import OptimizerConfig, make_optimizer
    from eagle_jax.training.step import Frozen, StepConfig, TrainState, make_programs

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
             "head_dim": 128, "vocab_size": 128256, "num_hidden_layers": 32}  # fmt: skip
    if options.tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                 "vocab_size": 512, "num_hidden_layers": 8}  # fmt: skip
    config = LlamaConfig(max_position_embeddings=8192, **sizes)
    dtype, reduced, length = (jnp.float32, 256, 64) if options.tiny else (jnp.bfloat16, 32000, 2048)
    target = random_target(config, jnp.dtype(dtype))
    draft = HeadConfig(method="eagle3.1", draft_vocab_size=reduced).build(config)
    vocabulary = np.arange(reduced, dtype=np.int32)
    parameters = initial_parameters(draft, target, vocabulary, seed=0, from_embedding=True)
    optimizer = make_optimizer(OptimizerConfig(), 100)
    graph, weights = nnx.split(target)
    refusal = cudnn_refusal(config.num_attention_heads, config.num_key_value_heads, config.head_dim, dtype, length)
    step = StepConfig(
        steps=7, loss=LossConfig(kind="lk_hybrid"), compute_dtype=jnp.dtype(dtype).name, loss_chunk=2048,
        attention="xla" if refusal else "cudnn", remat=options.remat,
    )  # fmt: skip
    programs = make_programs(graph, HeadTemplate(draft), step, optimizer, seed=0)
    state = TrainState(parameters=parameters, optimizer=optimizer.init(parameters), step=jnp.zeros((), jnp.int32))
    state = jax.tree.map(jnp.copy, state)
    rows = options.rows
    rng = np.random.default_rng(0)
    batch = PackedBatch(
        jnp.asarray(rng.integers(0, config.vocab_size, (rows, length)), jnp.int32),
        jnp.ones((rows, length), jnp.int32),
        jnp.broadcast_to(jnp.arange(length), (rows, length)),
        jnp.ones((rows, length), bool),
    )
    frozen = Frozen(weights, jnp.asarray(vocabulary))
    begun = time.perf_counter()
    state, metrics = programs.train(state, frozen, batch)
    jax.block_until_ready(metrics.loss)
    compiled, begun = time.perf_counter() - begun, time.perf_counter()
    count = 2 if options.tiny else 6
    for _ in range(count):
        state, metrics = programs.train(state, frozen, batch)
    jax.block_until_ready(metrics.loss)
    seconds = (time.perf_counter() - begun) / count
    memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    result = {
        "tokens_per_second": rows * length / seconds, "seconds_per_step": seconds, "tokens_per_step": rows * length,
        "first_step_seconds": compiled, "peak_gib": memory / 2**30, "attention": step.attention, "loss": float(metrics.loss),
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "dry_run_8b.json").write_text(json.dumps(result, indent=1) + "\n")
    say(str(result))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="What follows -- is for `eagle-jax train`.",
    )
    parser.add_argument("stage", choices=("synthesize", "train", "evaluate", "ablate", "dry-run"))
    parser.add_argument("--model", help="SmolLM2-135M-Instruct, a GGUF file or a folder")
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder of data and runs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for JSON results")
    parser.add_argument("--prompts", nargs="+", default=[], help="prompts for synthesis")
    parser.add_argument("--evaluation", nargs="+", default=[], help=f"evaluation sets: {', '.join(SETS)}")
    parser.add_argument(
        "--heads",
        nargs="+",
        default=[],
        metavar="NAME=HEAD",
        help="heads to evaluate (default: that of the run, as new)",
    )
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0], help="of evaluations")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="GPUs to use")
    parser.add_argument("--minutes", type=float, default=8.5, help="stop after so long")
    parser.add_argument("--slots", type=int, default=2048)
    parser.add_argument("--invent", type=int, default=60000)
    parser.add_argument("--tokens", type=int, default=140_000_000, help="of training, padding included")
    parser.add_argument("--batch-rows", type=int, default=32, help="of 1024 tokens")
    parser.add_argument("--five-layers", action="store_true", help="train with five capture layers")
    parser.add_argument("--from-head", metavar="HEAD", help="train this one further, instead of a new one")
    parser.add_argument("--rate", type=int, default=190_000, help="tokens a second that ablations are sized for")
    parser.add_argument("--seconds", type=float, default=70, help="of each ablation, compilation not counted")
    parser.add_argument("--only", nargs="+", choices=ABLATIONS)
    parser.add_argument("--num-prompts", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4, help="of the dry run, 2048 tokens each")
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a few seconds of every stage, for trying it out")
    arguments, extra = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, extra = arguments[:at], arguments[at + 1 :]
    options = parser.parse_args(arguments)
    options.extra = extra
    # Programs of one call are those of the next.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(options.work.resolve() / "compiled"))
    stages = {"synthesize": synthesize, "train": train, "evaluate": evaluate, "ablate": ablate, "dry-run": dry_run}
    return stages[options.stage](options)


if __name__ == "__main__":
    sys.exit(main())
