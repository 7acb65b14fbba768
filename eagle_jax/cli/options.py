"""Options that several subcommands share, and what their values mean."""

import argparse
import math
from collections.abc import Callable
from typing import Any

DEVICES = ("cpu", "gpu", "tpu")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def integer(least: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return parse


def tree(text: str) -> dict[str, int]:
    """An argparse type: "60,7,10" as the value of the `tree` argument of the Python API.

    Raises:
      argparse.ArgumentTypeError: it is not three integers, or no tree has these sizes.
    """
    names = ("total_tokens", "depth", "top_k")
    try:
        values = [int(part) for part in text.split(",")]
        sizes = dict(zip(names, values, strict=True))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not TOTAL,DEPTH,TOP_K: three integers joined by commas, such as 60,7,10"
        ) from None
    return sizes


def number(text: str) -> float:
    """An argparse type: a finite number; what it may be is checked where it is used."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not finite")
    return value


def tree_or_auto(text: str) -> dict[str, int] | str:
    """An argparse type: "auto", or as `tree`."""
    return text if text == "auto" else tree(text)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What is loaded, and onto what."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--model",
        metavar="PATH",
        help="the target: a folder, a .gguf file or a repository of the model hub (default: SmolLM2-135M-Instruct, with "
        "the released head for it)",
    )
    group.add_argument(
        "--draft",
        metavar="PATH",
        help="the draft head: a folder, a repository, or the name of a released head",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="auto is float32 on CPU, float16 on GPUs before Ampere, bfloat16 elsewhere",
    )
    group.add_argument("--device", choices=DEVICES, help="fail unless there is one (default: what JAX chooses)")
    group.add_argument(
        "--max-model-len",
        type=integer(2),
        metavar="N",
        help="bound on prompt and output in tokens (default: what the model is made for)",
    )


def add_draft_shape_options(parser: argparse.ArgumentParser) -> None:
    """How much is drafted in a round."""
    group = parser.add_argument_group("speculation").add_mutually_exclusive_group()
    group.add_argument(
        "--num-speculative-tokens",
        type=integer(1),
        metavar="N",
        help="draft a chain of N tokens a round (default: 3 on CPU, where each row of a forward costs time, else 5)",
    )
    group.add_argument(
        "--tree",
        type=tree_or_auto,
        metavar="TOTAL,DEPTH,TOP_K",
        help="draft a tree: its nodes with the root, expansions after the first level, and children of a node; e.g. 60,7,10. Or "
        "auto: plain decoding, a chain or a tree before each round, by what is fastest on this device and text",
    )


def add_output_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Where a text ends."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--max-tokens",
        type=integer(1),
        default=max_tokens,
        metavar="N",
        help="most tokens of an answer (default: %(default)s)",
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens past the end of the answer")


SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
"""Options of `add_sampling_options`, under the names of `SamplingParams`' fields."""


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen. What is not given is not set, so that `SamplingParams` has its own defaults and checks."""
    group = parser.add_argument_group("sampling")
    helps = {
        "temperature": "0 takes the likeliest token (default); above it tokens are drawn",
        "top_p": "draw from the likeliest tokens that have this much probability together",
        "top_k": "draw from the K likeliest tokens",
        "min_p": "draw from tokens at least this share as likely as the likeliest",
        "seed": "the same seed gives the same text, with or without a draft head (default: a fresh one, which is reported)",
        "repetition_penalty": "divides the logits of tokens that occurred",
        "presence_penalty": "subtracted from the logits of tokens of the output",
        "frequency_penalty": "the same, for each time that they occurred",
        "min_tokens": "no end of the answer before so many tokens",
    }
    for name in SAMPLING:
        whole = name in ("top_k", "seed", "min_tokens")
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=integer(-(2**63)) if whole else number,
            metavar="N" if whole else "X",
            help=helps[name],
        )


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """What was given of `add_sampling_options`, as keywords of `SamplingParams`."""
    given = {name: getattr(options, name) for name in SAMPLING}
    return {name: value for name, value in given.items() if value is not None}


def add_reporting_options(parser: argparse.ArgumentParser) -> None:
    """What is said beside the answer, all of it on standard error."""
    group = parser.add_argument_group("reporting")
    loudness = group.add_mutually_exclusive_group()
    loudness.add_argument(
        "--verbose", action="store_true", help="also print the rendered prompt and what was decided while loading"
    )
    loudness.add_argument("--quiet", action="store_true", help="print nothing on standard error but errors")
