"""`eagle-jax bench`: what plain decoding, a round of speculative decoding and its parts cost on this device."""

import argparse
import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eagle_jax.cli import options as shared
from eagle_jax.cli.options import add, add_integer, add_number, add_switch
from eagle_jax.cli.runtime import select_device
from eagle_jax.cli.session import UsageError, default_chain, say, start
from eagle_jax.decoding.adaptive import AdaptiveSpeculation
from eagle_jax.drafters.tree import StaticTree, TreeConfig
from eagle_jax.engine.compilation_cache import keep_compiled_programs
from eagle_jax.loading.dtypes import parse_dtype
from eagle_jax.measurement import bench
from eagle_jax.measurement.bench import BenchSettings
from eagle_jax.measurement.compare import compare
from eagle_jax.measurement.geometry import eagle3_head_of, find_geometry, random_head, random_target
from eagle_jax.models import DraftHead, Llama
from eagle_jax.speculative_config import default_candidates
from pallas_kernels.tree_attention import backends

TOLERANCE = 0.1
BACKENDS = ("mosaic_tpu", "mosaic_gpu", "xla_blocked", "xla")


DESCRIPTION = (
    "Measure a step of plain decoding, a round of speculative decoding and its parts, each as a loop inside one "
    "program, against the time that the bytes they read take to copy on the same device. With --random-weights any "
    "published geometry can be measured without a checkpoint. Speeds at --accepted-length are computed from the measured "
    "times: the acceptance is synthetic."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes."""
    shared.add_model_options(parser)
    add_switch(
        parser,
        "--random-weights",
        "--model is a published geometry (8B, 70B, 3B, 1B, 135M or the full name) or a config.json; weights are made on the "
        "device, those of an EAGLE-3 head for it too",
    )
    add_switch(parser, "--plain-only", "measure no speculation")
    shared.add_draft_shape_options(parser)
    group = parser.add_argument_group("measurement")
    add_integer(group, "--batch", "sequences side by side", default=1, metavar="B")
    add_integer(group, "--context", "tokens of each at the start", default=1024, least=2)
    add_number(group, "--accepted-length", "also print speeds at so many tokens a round (synthetic acceptance)")
    add(group, "--attention", "force a backend of tree attention (default: what suits the shapes)", choices=BACKENDS)
    add_switch(group, "--no-parts", "measure whole rounds only")
    add_integer(group, "--runs", "runs, whose median counts", default=5)
    add_integer(group, "--steps", "steps of a run (default: as many as take 0.2 s)")
    group = parser.add_argument_group("results")
    add_switch(group, "--json", "print the report as JSON")
    add(group, "--output", "write the report to this JSON file", type=Path, metavar="FILE")
    add(group, "--picture", "draw the parts against the floor (.png, .svg, .pdf)", type=Path, metavar="FILE")
    add(
        group,
        "--check",
        "measure the same and compare with the report in this file, ratio by ratio; exit code 1 if one got worse",
        type=Path,
        metavar="FILE",
    )
    add_number(group, "--tolerance", "share by which a ratio may grow", default=TOLERANCE)
    shared.add_reporting_options(parser)


def run(options: argparse.Namespace) -> int:
    """Measures, prints, compares."""
    if options.accepted_length is not None and not options.accepted_length >= 1:
        raise UsageError(f"--accepted-length must be at least 1, got {options.accepted_length}")
    if not options.tolerance >= 0:
        raise UsageError(f"--tolerance must be at least 0, got {options.tolerance}")
    before = None if options.check is None else read_report(options.check)
    target, head, tree, settings = prepare(options)

    if options.attention is not None:
        # The whole process measures with one backend: what JAX traced for another one must not be found.
        backends.ORDER = dict.fromkeys(("cpu", "cuda", "rocm", "tpu"), (options.attention,))

    from eagle_jax.measurement.picture import draw

    if tree is not None and settings.accepted_length is not None and settings.accepted_length > tree.max_depth + 1:
        raise UsageError(
            f"--accepted-length {settings.accepted_length} exceeds the {tree.max_depth + 1} tokens that a round can emit"
        )
    if before is not None:  # a difference is reported before anything is measured
        compare(before, {**before, "settings": dataclasses.asdict(settings)})
    report = bench.run(target, head, tree, settings, functools.partial(say, options))
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.picture is not None:
        draw(report, options.picture)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        print_report(report)
    if before is None:
        return 0
    changes = compare(before, report)
    worse = [change for change in changes if change.worse(options.tolerance)]
    for change in changes:
        mark = "WORSE" if change in worse else "ok"
        print(f"{mark:5} {change.name}: {change.before:.3f} before, {change.now:.3f} now", file=sys.stderr)
    return 1 if worse else 0


def read_report(path: Path) -> dict[str, Any]:
    """A report that `--output` wrote.

    Raises:
      UsageError: the file is not there, or is none.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--check {path}: {error}") from error
    if not isinstance(report, dict) or not {"settings", "steps", "parts"} <= set(report):
        raise UsageError(f"--check {path} is no report of eagle-jax bench")
    return report


def prepare(
    options: argparse.Namespace,
) -> tuple[Llama, DraftHead | None, TreeConfig | StaticTree | AdaptiveSpeculation | None, BenchSettings]:
    """Loads or makes the models."""

    tree: TreeConfig | StaticTree | AdaptiveSpeculation | None
    if not options.random_weights:
        session = start(options, plain=options.plain_only)
        target = session.target.model
        if not isinstance(session.tree, str):
            tree = session.tree
        else:
            assert session.draft is not None
            tree = default_candidates(
                session.draft.config, session.backend.platform, session.draft.num_speculative_tokens
            )
        head = None if session.draft is None else session.draft.head
        names = session.target.name, None if session.draft is None else session.draft.name
    else:
        target, head, tree, names = make_random(options)
    return (
        target,
        head,
        tree,
        BenchSettings(
            model=names[0],
            draft=names[1],
            random_weights=options.random_weights,
            dtype=str(target.dtype),
            batch=options.batch,
            context=options.context,
            tree="auto"
            if isinstance(tree, AdaptiveSpeculation)
            else None
            if tree is None
            else dataclasses.asdict(tree),
            accepted_length=options.accepted_length,
            attention=options.attention,
            parts=not options.no_parts,
            runs=options.runs,
            steps=options.steps,
        ),
    )


def make_random(
    options: argparse.Namespace,
) -> tuple[Llama, DraftHead | None, TreeConfig | AdaptiveSpeculation | None, tuple[str, str | None]]:
    """A target of a published geometry and an EAGLE-3 head for it, with random weights."""
    if options.model is None:
        raise UsageError("--random-weights needs --model: a published geometry such as 8B, or a config.json")
    if options.draft is not None:
        raise UsageError("--random-weights makes the draft head too: leave --draft out")
    backend = select_device(options.device)

    keep_compiled_programs()
    name, config = find_geometry(options.model)
    dtype = parse_dtype(options.dtype)
    target = random_target(config, dtype)
    if options.plain_only:
        return target, None, None, (name, None)
    head = eagle3_head_of(config)
    tree: TreeConfig | AdaptiveSpeculation
    if isinstance(options.tree, str):
        tree = default_candidates(head, backend.platform)
    else:
        tree = TreeConfig(**options.tree) if options.tree else default_chain(options, backend.platform)
    return target, random_head(head, dtype), tree, (name, f"EAGLE-3 head for {name}")


def print_report(report: dict[str, Any]) -> None:
    """Prints the report to standard output."""

    settings, speed = report["settings"], report["speed"]
    weights = "random weights" if settings["random_weights"] else "checkpoint"
    table = Table(
        title=f"{settings['model']} ({weights}), {settings['dtype']}, batch {settings['batch']}, context {settings['context']}, "
        f"{report['device']['kind']}",
        title_justify="left",
    )
    for name in ("", "ms", "reads", "floor ms", "of copy bandwidth", "measured as"):
        table.add_column(name, justify="right" if name in ("ms", "reads", "floor ms", "of copy bandwidth") else "left")
    for group in (report["steps"], report["parts"]):
        for part in group:
            share = part["share_of_copy_bandwidth"]
            table.add_row(
                part["name"] if part["count"] == 1 else f"{part['count']} {part['name']}",
                f"{part['ms']:.3f}",
                f"{part['bytes'] / 1e9:.3f} GB" if part["bytes"] else "",
                f"{part['floor_ms']:.3f}" if part["bytes"] else "",
                f"{100 * share:.0f} %" if share else "",
                part["how"],
            )
        table.add_section()
    Console(highlight=False, width=None if sys.stdout.isatty() else 130).print(table)
    print(f"Copy bandwidth {report['copy_bandwidth_bytes_per_s'] / 1e9:.0f} GB/s; medians of {settings['runs']} runs.")
    print(f"Plain decoding: {speed['plain_tokens_per_second']:.1f} tokens/s.")
    if "break_even_accepted_length" in speed:
        print(
            f"A round costs {speed['break_even_accepted_length']:.3f} plain steps: speculation wins beyond that accepted length."
        )
    if "accepted_length" in speed:
        print(
            f"At accepted length {speed['accepted_length']} (synthetic: given, not measured): "
            f"{speed['speculative_tokens_per_second']:.1f} tokens/s, {speed['speed_up']:.2f} x plain decoding."
        )
    for kind, compiled in report["compilation"].items():
        cached = compiled["seconds_from_cache"]
        again = "" if cached is None else f", {cached:.1f} s from the persistent cache"
        print(f"{kind.capitalize()}: {compiled['programs']} programs, compiled in {compiled['seconds']:.1f} s{again}.")
        if cached is not None:
            print(
                f"  First token with a warm cache: {cached + report['first_token_ms'][kind] / 1e3:.1f} s after loading."
            )
        print(f"  First token of a prompt as long as the context: {report['first_token_ms'][kind]:.1f} ms.")
    for kind, ms in report["dispatch_ms"].items():
        print(f"A dispatch of {kind} rounds costs {ms:.2f} ms besides them.")
    print(f"Peak memory {report['peak_memory_bytes'] / 2**30:.2f} GiB.")
