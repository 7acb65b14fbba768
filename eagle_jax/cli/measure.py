"""What `eval` and `sweep` have in common: options and what they mean, running with progress and resuming, and printing."""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from eagle_jax.cli import options as options_of_all
from eagle_jax.cli import session
from eagle_jax.cli.options import add, add_integer, add_number, add_switch
from eagle_jax.cli.session import UsageError
from eagle_jax.decoding.rules import make_rule
from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.entrypoints.prompts import Prompt
from eagle_jax.evaluation import Configuration, Dataset, Evaluation, EvaluationSettings, Report, evaluate, find_datasets
from eagle_jax.evaluation.page import write_page
from eagle_jax.evaluation.report import vllm_lines
from eagle_jax.evaluation.rows import Row
from eagle_jax.evaluation.run import Progress
from eagle_jax.evaluation.settings import Shape, make_configurations
from eagle_jax.evaluation.tables import WIDTH, tables
from eagle_jax.speculative_config import AUTO

DEFAULT_CHAIN = 2
"""As in vLLM's script."""

PICTURES_EXTRA = "pictures need matplotlib: pip install 'eagle-jax[eval]', or give --no-pictures"


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What is loaded, and onto what."""
    group = options_of_all.add_model_options(parser)
    parser.set_defaults(dtype=None)  # an expectation brings its own where none is given
    add(group, "--method", "what the head must be (default: what it is)", choices=("eagle", "eagle3"))
    add_integer(group, "--tp", "devices that share the weights", default=1)
    add_integer(group, "--max-num-seqs", "requests decoded side by side; 1 times each by itself (default: 1)")


def add_dataset_options(parser: argparse.ArgumentParser, *, prompts: int | None = None, output_len: int = 256) -> None:
    """What is asked, and how much of it by default; None is all of a dataset."""
    group = parser.add_argument_group("prompts")
    add(
        group,
        "--dataset-name",
        "mt_bench, humaneval, gsm8k come with the package; spec_bench, alpaca, qa, sum and others are looked for in "
        "--dataset-path; custom: the files of --dataset-path; hf: the name in --dataset-path (default: mt_bench, or custom)",
        nargs="+",
        metavar="NAME",
    )
    add(
        group,
        "--dataset-path",
        "JSONL files (turns, prompt, messages or prompt_token_ids a line), folders of NAME.jsonl, or philschmid/mt-bench",
        nargs="+",
        default=[],
        metavar="PATH",
    )
    add(
        group,
        "--num-prompts",
        f"of each dataset, taken evenly from all of it; -1 is all (default: {prompts or 'all'})",
        type=int,
        metavar="N",
    )
    add(group, "--category", "only prompts of these categories", nargs="+", default=[], metavar="NAME")
    add_integer(group, "--output-len", f"most tokens of an answer (default: {output_len})")
    add_switch(group, "--ignore-eos", "go on to --output-len behind the end of the answer")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen and drafts accepted."""
    group = parser.add_argument_group("sampling")
    add_number(
        group, "--temp", "temperatures, each measured; 0 is greedy (default: 0)", nargs="+", least=0, metavar="T"
    )
    add_number(group, "--top-p", "(default: 1)", least=0, most=1, metavar="P")
    add(group, "--top-k", "-1 or 0 is off (default: -1)", type=int, metavar="K")
    add_integer(group, "--seed", "prompt i of a dataset is sampled with N + i (default: 0)", least=0)
    add(
        group,
        "--rejection-sample-method",
        "how drafts are accepted where tokens are sampled (default: seeded)",
        choices=("seeded", "standard", "block", "recursive", "traversal"),
    )
    add(
        group,
        "--draft-sample-method",
        "how they are drafted there (default: the method's)",
        choices=("greedy", "probabilistic"),
    )


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """What becomes of the figures."""
    group = parser.add_argument_group("report")
    add(
        group,
        "--output",
        "keep rows.jsonl (one line a request; the same command goes on with it), report.json, report.html and pictures",
        type=Path,
        metavar="FOLDER",
    )
    add_switch(group, "--no-pictures", "write no pictures: they need matplotlib")
    add_switch(group, "--json", "print the report as one JSON object, and nothing else")
    add_number(
        group,
        "--time-limit",
        "begin nothing after so many seconds; exit code 1 if something is left, and the same command goes on with --output",
        least=0,
        metavar="SECONDS",
    )
    loudness = group.add_mutually_exclusive_group()
    add_switch(loudness, "--verbose", "also print the chat template, a rendered prompt, and notes about the head")
    add_switch(loudness, "--quiet", "print nothing on standard error but errors")


def check_report_options(options: argparse.Namespace) -> None:
    """Refuses what would fail after an hour of measuring.

    Raises:
      UsageError: pictures are wanted and cannot be drawn.
    """
    wanted = options.output is not None and not options.no_pictures
    if wanted and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(PICTURES_EXTRA)


class Models:
    """Loaded models on a device.

    Args:
      options: of `add_model_options` and `add_report_options`.
      packaged: the target of the released head's expectations, which is a certain file, in place of the default one.

    Raises:
      UsageError: no head is named.
    """

    def __init__(self, options: argparse.Namespace, *, packaged: bool = False):
        model, head = session.find_models(options)
        if head is None:
            raise UsageError("there is no draft head to measure: give --eagle-dir for this --model-dir")
        self.options, self.backend = options, session.announce(options)
        self.target, draft = session.load_models(
            options, model, head, packaged=packaged, method=options.method, tensor_parallel_size=options.tp
        )
        assert draft is not None
        self.draft = draft

    def say(self, text: str) -> None:
        """A line on standard error, unless --quiet was given."""
        session.say(self.options, text)

    def show_template(self, datasets: Sequence[Dataset]) -> None:
        """Prints the chat template and the first prompt as it is rendered."""
        tokenizer = self.target.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            self.say("The target has no chat template: prompts are continued as they are.")
            return
        self.say(f"Chat template:\n{tokenizer.chat_template}")
        first = next((q for d in datasets for q in d.questions if q.turns), None)
        if first is not None:
            rendered = tokenizer.render_chat([{"role": "user", "content": first.turns[0]}])
            self.say(f"First prompt as it is rendered:\n{rendered}")


def measure_and_report(
    models: Models, datasets: Sequence[Dataset], chains: Sequence[int], trees: Sequence[Shape]
) -> int:
    """Measures, writes and prints; 1 if the time limit came first."""
    options = models.options
    if options.verbose:
        models.show_template(datasets)
    evaluation = measure(models, read_configurations(options, chains, trees), datasets)
    report = Report(evaluation)
    write_report(report, options)
    print_report(report, options)
    return 0 if evaluation.complete else 1


def measure(models: Models, configurations: Sequence[Configuration], datasets: Sequence[Dataset]) -> Evaluation:
    """Runs an evaluation with a line a call on standard error; an interruption says how to go on."""
    options = models.options
    rows_path = None if options.output is None else options.output / "rows.jsonl"
    begin = time.perf_counter()
    tokens = 0

    def on_group(progress: Progress) -> None:
        nonlocal tokens
        group = progress.group
        tokens += group.output_tokens
        speed = f"{group.output_tokens / group.seconds:7.1f} tokens/s" if group.seconds else "left out"
        compiled = f", compiled in {group.compile_seconds:.1f} s" if group.compile_seconds > 1 else ""
        models.say(
            f"[{time.perf_counter() - begin:6.0f} s] {progress.done}/{progress.total} {group.dataset} turn {group.turn}, "
            f"{group.configuration}: {speed}{compiled}"
        )

    try:
        return evaluate(
            models.target,
            models.draft,
            configurations,
            datasets,
            read_settings(options),
            rows_path=rows_path,
            time_limit=options.time_limit,
            on_group=on_group,
            on_request=printer(options),
        )
    except KeyboardInterrupt:
        if rows_path is not None:
            print(f"What was measured is in {rows_path}; the same command goes on with it.", file=sys.stderr)
        raise


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


def printer(options: argparse.Namespace) -> Callable[[Row, Prompt], None] | None:
    """Prints prompts and answers as vLLM's script does, or None."""
    if not options.print_output:
        return None

    def show(row: Row, prompt: Prompt) -> None:
        print("-" * 50)
        print(f"prompt: {prompt.token_ids if prompt.text is None else prompt.text}")
        print(f"generated text: {row.token_ids if row.text is None else row.text}")
        print("-" * 50, flush=True)

    return show


def write_report(report: Report, options: argparse.Namespace) -> None:
    """Writes the files of `--output`, if it was given."""
    if options.output is None:
        return

    folder = options.output
    (folder / "report.json").write_text(
        json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )
    pictures = {}
    if not options.no_pictures:
        from eagle_jax.evaluation.pictures import draw_pictures

        pictures = draw_pictures(report, folder)
    write_page(report, folder / "report.html", pictures)
    if not options.quiet:
        print(f"Written to {folder}: rows.jsonl, report.json, report.html" + "".join(f", {p.name}" for p in pictures.values()),
              file=sys.stderr)  # fmt: skip


def print_report(report: Report, options: argparse.Namespace) -> None:
    """Prints what vLLM's script prints for each configuration, then tables, warnings and the recommendation."""
    if options.json:
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False, allow_nan=False))
        return

    for configuration in report.configurations:
        if configuration.shape is not None:
            print(f"{configuration.name}:")
            print("\n".join(vllm_lines(report.total(configuration).acceptance)))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    for table in tables(report):
        console.print()
        console.print(table)
    print()
    for text in report.warnings:
        print(f"Warning: {text}")
    for recommendation in report.recommendations if len(report.configurations) > 1 else ():
        print(f"Recommended here at temperature {recommendation.temperature:g}: {recommendation.text}")
        print(f"  eagle-jax generate ... {recommendation.option}")
