"""`eagle-jax eval`: how much of a draft head's tokens the target accepts, measured as vLLM's spec_decode_offline.py does."""

import argparse

from eagle_jax.cli import measure
from eagle_jax.cli.expectations import run_tests
from eagle_jax.cli.options import add, add_integer, add_switch, tree_or_auto
from eagle_jax.cli.session import UsageError

DESCRIPTION = (
    "Measure how many drafted tokens a target accepts, and how fast it then is. Flags, meaning and the printed "
    "lines are those of vLLM's spec_decode_offline.py where that has them. Every shape and temperature given is measured."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes."""
    measure.add_model_options(parser)
    shapes = parser.add_argument_group("what is drafted")
    add_integer(
        shapes,
        "--num-spec-tokens --num-speculative-tokens",
        "chains of K tokens a round (default: 2, unless --tree is given)",
        dest="num_spec_tokens",
        nargs="+",
        metavar="K",
    )
    add(
        shapes,
        "--tree",
        "trees: nodes with the root, expansions after the first level, children of a node; e.g. 60,7,10. Or auto: "
        "plain decoding, a chain or a tree before each round, by what is fastest",
        nargs="+",
        type=tree_or_auto,
        metavar="TOTAL,DEPTH,TOP_K",
    )
    add_switch(shapes, "--plain", "decode plainly too, which gives the speed-up")
    measure.add_dataset_options(parser)
    add_integer(parser, "--turns", "turns of each question; later ones see the model's own answers (default: 1)")
    measure.add_sampling_options(parser)
    add_switch(parser, "--print-output", "print every prompt and answer")
    measure.add_report_options(parser)
    test = parser.add_argument_group("regression test")
    add(
        test,
        "--test",
        "compare with expectations: shipped ones by name, or .json files; without names all of this target and head. Each "
        "brings its own settings. Exit code 1 if one fails",
        nargs="*",
        metavar="NAME",
    )
    add_switch(
        test,
        "--record",
        "with --test: write what is measured into the expectations instead of comparing; a .json file that does not exist "
        "is made from the settings given",
    )


def run(options: argparse.Namespace) -> int:
    """Measures and reports; 1 if something was left for the next run, or a test failed."""
    if options.record and options.test is None:
        raise UsageError("--record writes expectations, which --test must name")
    measure.check_report_options(options)
    if options.test is not None:
        return run_tests(options)
    datasets, shapes = measure.read_datasets(options), measure.read_shapes(options)
    measure.read_configurations(options, *shapes)  # what cannot be measured is an error before anything is loaded
    return measure.measure_and_report(measure.Models(options), datasets, *shapes)
