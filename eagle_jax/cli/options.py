"""Options that several subcommands share, what their values mean, and one way to add each kind."""

import argparse
import math
from collections.abc import Callable
from typing import Any

DEVICES = ("cpu", "gpu", "tpu")
DTYPES = ("auto", "float32", "bfloat16", "float16")

Group = argparse._ActionsContainer  # what parsers and their groups share; argparse has no public name for it


def add(group: Group, flags: str, help: str, **keywords: Any) -> None:
    """Adds an option.

    Args:
      group: a parser, or a group of one.
      flags: its names, separated by spaces.
      help: what it means; a default is appended where it does not speak of one.
      **keywords: of `ArgumentParser.add_argument`.
    """
    if isinstance(keywords.get("default"), int | float | str) and "default" not in help:
        help = f"{help} (default: %(default)s)".lstrip()
    group.add_argument(*flags.split(), help=help, **keywords)


def add_switch(group: Group, flags: str, help: str) -> None:
    """Adds an option without a value, False where it is not given."""
    group.add_argument(*flags.split(), action="store_true", help=help)


def add_integer(group: Group, flags: str, help: str, *, least: int = 1, metavar: str = "N", **keywords: Any) -> None:
    """Adds an option whose value, or each of whose values with `nargs`, is an integer of at least `least`."""
    add(group, flags, help, type=integer(least), metavar=metavar, **keywords)


def add_number(
    group: Group,
    flags: str,
    help: str,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    metavar: str = "X",
    **keywords: Any,
) -> None:
    """Adds an option whose value, or each of whose values with `nargs`, is a finite number from `least` to `most`."""
    add(group, flags, help, type=number(least, most), metavar=metavar, **keywords)


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


def number(least: float, most: float) -> Callable[[str], float]:
    """An argparse type: a finite number in a range."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not finite")
        if not least <= value <= most:
            bounds = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, got {value:g}")
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


def tree_or_auto(text: str) -> dict[str, int] | str:
    """An argparse type: "auto", or as `tree`."""
    return text if text == "auto" else tree(text)


def add_model_options(parser: argparse.ArgumentParser) -> Group:
    """What is loaded, and onto what; gives the group, for more of the kind."""
    group = parser.add_argument_group("models")
    add(
        group,
        "--model --model-dir",
        "the target: a folder, a .gguf file or a repository of the model hub (default: SmolLM2-135M-Instruct, with "
        "the released head for it)",
        metavar="PATH",
    )
    add(
        group,
        "--draft --eagle-dir",
        "the draft head: a folder, a repository, or the name of a released head",
        metavar="PATH",
    )
    text = "auto, the default, is float32 on CPU, float16 on GPUs before Ampere, bfloat16 elsewhere"
    add(group, "--dtype", text, choices=DTYPES, default="auto")
    add_device_option(group)
    text = "bound on prompt and output; longer requests fail or are left out (default: what the model is made for)"
    add_integer(group, "--max-model-len", text, least=2)
    return group


def add_device_option(group: Group) -> None:
    """What computes."""
    add(group, "--device", "fail unless there is one (default: what JAX chooses)", choices=DEVICES)


def add_head_reading_options(parser: argparse.ArgumentParser) -> None:
    """What a head's file leaves open."""
    add(parser, "--target", "of a draft head: the target it is meant for", metavar="PATH")
    text = "what layer numbers in the head's config.json mean: the state that enters a layer, or that leaves it"
    add(parser, "--layer-id-convention", text, choices=("input", "output"))


def add_draft_shape_options(parser: argparse.ArgumentParser) -> None:
    """How much is drafted in a round."""
    group = parser.add_argument_group("speculation").add_mutually_exclusive_group()
    add_integer(
        group,
        "--num-speculative-tokens",
        "draft a chain of N tokens a round (default: 3 on CPU, where each row of a forward costs time, else 5)",
    )
    add(
        group,
        "--tree",
        "draft a tree: its nodes with the root, expansions after the first level, and children of a node; e.g. 60,7,10. Or "
        "auto: plain decoding, a chain or a tree before each round, by what is fastest on this device and text",
        type=tree_or_auto,
        metavar="TOTAL,DEPTH,TOP_K",
    )


def add_output_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Where a text ends."""
    group = parser.add_argument_group("output")
    add_integer(group, "--max-tokens", "most tokens of an answer", default=max_tokens)
    add_switch(group, "--ignore-eos", "go on to --max-tokens past the end of the answer")


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
    for name, text in helps.items():
        flag = f"--{name.replace('_', '-')}"
        if name in ("top_k", "seed", "min_tokens"):
            add_integer(group, flag, text, least=-(2**63))
        else:
            add_number(group, flag, text)


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """What was given of `add_sampling_options`, as keywords of `SamplingParams`."""
    given = {name: getattr(options, name) for name in SAMPLING}
    return {name: value for name, value in given.items() if value is not None}


def add_reporting_options(parser: argparse.ArgumentParser) -> None:
    """What is said beside the answer, all of it on standard error."""
    group = parser.add_argument_group("reporting")
    loudness = group.add_mutually_exclusive_group()
    add_switch(loudness, "--verbose", "also print the rendered prompt and what was decided while loading")
    add_switch(loudness, "--quiet", "print nothing on standard error but errors")
