"""`eagle-jax eval`: how much of a draft head's tokens the target accepts, measured as vLLM's spec_decode_offline.py does."""

import argparse
from collections.abc import Sequence
from typing import Any

from eagle_jax.cli import measure
from eagle_jax.cli.expectations import run_tests
from eagle_jax.cli.options import add, add_integer, add_switch, tree_or_auto
from eagle_jax.cli.session import UsageError
from eagle_jax.decoding.rules import make_rule
from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.entrypoints.prompts import Prompt
from eagle_jax.evaluation import Configuration, Dataset, EvaluationSettings, Report, find_datasets
from eagle_jax.evaluation.rows import Row
from eagle_jax.evaluation.settings import Shape, make_configurations
from eagle_jax.speculative_config import AUTO

DEFAULT_CHAIN = 2
"""As in vLLM's script."""


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
    return run_evaluation(options)


def run_evaluation(options: argparse.Namespace) -> int:
    """An evaluation without expectations."""
    datasets = read_datasets(options)
    read_configurations(options, *read_shapes(options))  # what cannot be measured is an error before anything is loaded
    models = measure.Models(options)
    return measure_and_report(options, models, datasets, *read_shapes(options))


def measure_and_report(
    options: argparse.Namespace,
    models: measure.Models,
    datasets: Sequence[Dataset],
    chains: Sequence[int],
    trees: Sequence[Shape],
) -> int:
    """Measures, writes and prints; 1 if the time limit came first."""

    if options.verbose:
        models.show_template(datasets)
    configurations = read_configurations(options, chains, trees)
    evaluation = measure.measure(
        models, configurations, datasets, read_settings(options), options, on_request=printer(options, models)
    )
    report = Report(evaluation)
    measure.write_report(report, options)
    measure.print_report(report, options)
    return 0 if evaluation.complete else 1


def read_datasets(options: argparse.Namespace) -> list[Dataset]:
    """The prompts that the options name.

    Raises:
      UsageError: a number of prompts that cannot be.
      EvaluationError: as `find_datasets`.
    """

    count = -1 if options.num_prompts is None else options.num_prompts
    if count != -1 and count < 1:
        raise UsageError(f"--num-prompts must be at least 1, or -1 for all, got {count}")
    names = options.dataset_name or []
    return [
        dataset.select(None if count == -1 else count, options.category)
        for dataset in find_datasets(names, options.dataset_path)
    ]


def read_shapes(options: argparse.Namespace) -> tuple[list[int], list[Shape]]:
    """Chains, by their lengths, and trees."""

    trees: list[Shape] = [TreeConfig(**sizes) if isinstance(sizes, dict) else AUTO for sizes in options.tree or []]
    return options.num_spec_tokens or ([] if trees else [DEFAULT_CHAIN]), trees


def read_configurations(
    options: argparse.Namespace, chains: Sequence[int], trees: Sequence[Shape]
) -> list[Configuration]:
    """Every shape at every temperature."""

    shapes: list[Shape] = [*map(TreeConfig.chain, chains), *trees]
    temperatures = options.temp or [0.0]
    rule = make_rule(options.rejection_sample_method, options.draft_sample_method)
    return make_configurations(shapes, temperatures, plain=options.plain, rule=rule)


def read_settings(options: argparse.Namespace) -> EvaluationSettings:
    """Everything else."""

    given = {
        "turns": options.turns,
        "output_len": options.output_len,
        "top_p": options.top_p,
        "top_k": None if options.top_k is None else max(options.top_k, 0),
        "seed": options.seed,
        "max_num_seqs": options.max_num_seqs,
    }
    return EvaluationSettings(
        ignore_eos=options.ignore_eos,
        max_model_len=options.max_model_len,
        **{name: value for name, value in given.items() if value is not None},
    )


def printer(options: argparse.Namespace, models: measure.Models) -> Any:
    """Prints prompts and answers as vLLM's script does, or None."""
    if not options.print_output:
        return None

    def show(row: Row, prompt: Prompt) -> None:
        print("-" * 50)
        print(f"prompt: {prompt.token_ids if prompt.text is None else prompt.text}")
        print(f"generated text: {row.token_ids if row.text is None else row.text}")
        print("-" * 50, flush=True)

    return show
