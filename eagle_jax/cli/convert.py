"""`eagle-jax convert`: a draft head in EAGLE's format or in that of speculators, from either."""

import argparse
import dataclasses
import json
import sys
from typing import Any

from eagle_jax.cli.options import integer
from eagle_jax.cli.runtime import select_device
from eagle_jax.cli.session import find_head


def add_parser(commands: Any) -> None:
    """Adds the subcommand to what `ArgumentParser.add_subparsers` gave."""
    parser = commands.add_parser(
        "convert",
        help="write a draft head in EAGLE's format or in that of speculators",
        description="Write a draft head in EAGLE's format or in that of speculators, from either, as safetensors. The values and "
        "their dtypes stay as they are.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "path", metavar="PATH", help="a folder, a repository of the model hub, or the name of a released head"
    )
    parser.add_argument("output", metavar="OUTPUT", help="the folder to be written; it must not exist or be empty")
    parser.add_argument("--to", required=True, choices=("eagle", "speculators"), help="the format to be written")
    parser.add_argument(
        "--verifier",
        metavar="NAME",
        help="of speculators: the target that the file shall name (default: the one that the head names, else --target)",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=integer(1),
        metavar="N",
        help="of speculators: the chain that the file shall ask for (default: what the head asks for, else 5)",
    )
    parser.add_argument("--target", metavar="PATH", help="the target, to tell what the head's layer numbers mean")
    parser.add_argument(
        "--layer-id-convention",
        choices=("input", "output"),
        help="what layer numbers in the head's config.json mean: the state that enters a layer, or that leaves it",
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Writes the head and says what it wrote."""
    from eagle_jax.loading import convert_head

    select_device("cpu")  # nothing is placed: an accelerator that another process holds must not matter
    done = convert_head(
        find_head(options.path),
        options.output,
        to=options.to,
        verifier=options.verifier,
        num_speculative_tokens=options.num_speculative_tokens,
        target=options.target,
        layer_id_convention=options.layer_id_convention,
    )
    if options.json:
        print(json.dumps(dataclasses.asdict(done) | {"path": str(done.path)}, indent=2))
        return 0
    print(f"{done.path}: an {done.method!r} head of {done.tensors} tensors in the {done.format} format")
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0
