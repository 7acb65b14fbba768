"""`eagle-jax plan`: whether a model fits onto a TPU topology, and what its devices say to each other, without having one."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from eagle_jax.cli import options as shared
from eagle_jax.cli.options import add, add_integer, add_switch
from eagle_jax.cli.runtime import select_device, stage
from eagle_jax.cli.session import find_head
from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.loading.draft import open_draft, plan_draft
from eagle_jax.loading.draft_reader import TargetShape
from eagle_jax.loading.hub import resolve
from eagle_jax.measurement.ahead import ParallelConfig, compile_ahead, topology_devices
from eagle_jax.measurement.geometry import eagle3_head_of, find_geometry

DESCRIPTION = (
    "Compile a round of speculative decoding for TPUs that are only named, with libtpu (pip install "
    "'eagle-jax[tpu]'), and print the memory of each device, whether it fits, and the collectives of a round. No weight is "
    "loaded. Exit code 1 if it does not fit."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes."""
    add(
        parser,
        "--model",
        "a config.json or the folder of one, or a published geometry: 135M, 1B, 3B, 8B, 70B",
        required=True,
        metavar="CONFIG",
    )
    add(
        parser,
        "--draft",
        "the folder of a draft head (default: an EAGLE-3 head of one layer of the target's width)",
        metavar="CONFIG",
    )
    add_switch(parser, "--plain", "plain decoding, without a draft head")
    add(
        parser,
        "--topology",
        "GENERATION:AxB or GENERATION:AxBxC, e.g. v5e:2x2, v5p:2x2x2, v6e:2x4x1, tpu7x:2x2x1",
        required=True,
        metavar="NAME",
    )
    add_integer(parser, "--tensor-parallel-size --tp", "devices that share the weights (default: all of the topology)")
    add_integer(parser, "--draft-tensor-parallel-size --draft-tp", "1 or the same (default)")
    add_integer(parser, "--data-parallel-size --dp", "groups of so many devices", default=1)
    shared.add_draft_shape_options(parser)
    add_integer(parser, "--batch", "sequences", default=8, metavar="B")
    add_integer(parser, "--max-model-len", "tokens of each", default=4096, least=2)
    add(parser, "--dtype", "", choices=("bfloat16", "float32"), default="bfloat16")
    add_switch(parser, "--json", "print the report as JSON")


def run(options: argparse.Namespace) -> int:
    """Prints the report; 1 if the model does not fit."""
    # libtpu reads these when it is loaded, and JAX must not look for a TPU.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    select_device("cpu")

    name, target = find_geometry(options.model)
    head, tree = None, None
    if options.plain and (options.draft or options.num_speculative_tokens or options.tree):
        raise ValueError("--plain excludes --draft, --num-speculative-tokens and --tree")
    if not options.plain:
        head = eagle3_head_of(target) if options.draft is None else _head(Path(options.draft), target)
        tree = TreeConfig(total_tokens=60, depth=7, top_k=10)
        if options.num_speculative_tokens is not None:
            tree = TreeConfig.chain(options.num_speculative_tokens)
        elif options.tree is not None:
            tree = TreeConfig(**options.tree)
    devices = topology_devices(options.topology)
    shards = options.tensor_parallel_size or max(1, len(devices) // options.data_parallel_size)
    parallel = ParallelConfig(
        tensor_parallel_size=shards,
        draft_tensor_parallel_size=options.draft_tensor_parallel_size or shards,
        data_parallel_size=options.data_parallel_size,
        batch=options.batch,
        max_model_len=options.max_model_len,
        dtype=options.dtype,
    )
    with stage(f"Compiling for {options.topology}", quiet=options.json):
        report = compile_ahead(target, head, tree, parallel, devices)
    report = {"model": name, "topology": options.topology, "settings": vars(parallel), **report}
    print(json.dumps(report, indent=2) if options.json else to_text(report))
    return 1 if report["fits"] is False else 0


def to_text(report: dict[str, Any]) -> str:
    """The report for people."""
    settings = report["settings"]
    lines = [
        f"{report['model']} on {report['topology']}: {report['devices']} x {report['device']}, tensor parallel "
        f"{settings['tensor_parallel_size']} (draft head {settings['draft_tensor_parallel_size']}), data parallel "
        f"{settings['data_parallel_size']}",
        f"  {settings['batch']} sequences of {settings['max_model_len']} tokens, {settings['dtype']}",
        f"  of each device: target {_gib(report['target_bytes'])}, draft head {_gib(report['draft_bytes'])}, caches "
        f"{_gib(report['cache_bytes'])}",
    ]
    limit = "of unknown memory" if report["device_bytes"] is None else f"of {_gib(report['device_bytes'])}"
    if "total_bytes" in report:
        lines.append(f"  temporaries {_gib(report['temporary_bytes'])}; all {_gib(report['total_bytes'])} {limit}")
        if report["flops"] is not None and report["bytes_accessed"] is not None:
            counted = f"{report['flops'] / 1e9:.0f} GFLOP, {report['bytes_accessed'] / 1e9:.1f} GB"
            lines.append(f"  on each device, each loop's body once, by XLA's count without kernels: {counted}")
        collectives = {part: sum(kinds.values()) for part, kinds in report["collectives"].items()}
        told = ", ".join(f"{part} {count}" for part, count in collectives.items()) or "none"
        lines.append(f"  collectives a round: {sum(collectives.values())} ({told})")
    fits = {True: "it fits", False: "it does NOT fit", None: "whether it fits is not known"}[report["fits"]]
    lines.append(f"  {fits}" + (f": {report['reason']}" if "reason" in report else ""))
    lines.append(f"  compiled in {report['compile_seconds']:.0f} s")
    return "\n".join(lines)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _head(path: Path, target: Any) -> Any:

    source, config = open_draft(resolve(find_head(str(path))))
    shape = TargetShape(
        hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_hidden_layers=target.num_hidden_layers
    )
    return plan_draft(source, config, shape).config
