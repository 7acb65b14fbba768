"""`eagle-jax convert`: a draft head in EAGLE's format or in that of speculators, from either."""

import argparse
import dataclasses
import json
import sys

from eagle_jax.cli.options import add, add_head_reading_options, add_integer, add_switch
from eagle_jax.cli.runtime import select_device
from eagle_jax.cli.session import find_head
from eagle_jax.loading import convert_head

DESCRIPTION = (
    "Write a draft head in EAGLE's format or in that of speculators, from either, as safetensors. The values and "
    "their dtypes stay as they are."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes."""
    add(parser, "path", "a folder, a repository of the model hub, or the name of a released head", metavar="PATH")
    add(parser, "output", "the folder to be written; it must not exist or be empty", metavar="OUTPUT")
    add(parser, "--to", "the format to be written", required=True, choices=("eagle", "speculators"))
    add(
        parser,
        "--verifier",
        "of speculators: the target that the file shall name (default: the one that the head names, else --target)",
        metavar="NAME",
    )
    add_integer(
        parser,
        "--num-speculative-tokens",
        "of speculators: the chain that the file shall ask for (default: what the head asks for, else 5)",
    )
    add_head_reading_options(parser)
    add_switch(parser, "--json", "print what was written as JSON")


def run(options: argparse.Namespace) -> int:
    """Writes the head and says what it wrote."""

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
