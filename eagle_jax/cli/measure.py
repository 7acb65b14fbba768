"""What `eval` and `sweep` have in common: options, running with progress and resuming, and printing."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_jax.cli import session
from eagle_jax.cli.options import DEVICES, DTYPES, integer
from eagle_jax.cli.runtime import Backend, select_device, stage
from eagle_jax.cli.session import UsageError, find_head
from eagle_jax.engine.compilation_cache import keep_compiled_programs

if TYPE_CHECKING:
    from eagle_jax.evaluation import Configuration, Dataset, Evaluation, EvaluationSettings, Report
    from eagle_jax.evaluation.run import Progress
    from eagle_jax.loading import Draft, Target

PICTURES_EXTRA = "pictures need matplotlib: pip install 'eagle-jax[eval]', or give --no-pictures"


def number(least: float, most: float = float("inf")) -> Any:
    """An argparse type: a number in a range."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not least <= value <= most:
            bounds = f"at least {least:g}" if most == float("inf") else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, got {value:g}")
        return value

    return parse


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What is loaded, and onto what; vLLM's names, and those of the other commands."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--model-dir",
        "--model",
        dest="model",
        metavar="PATH",
        help="the target: a folder, a .gguf file or a repository (default: SmolLM2-135M-Instruct, with the released head for it)",
    )
    group.add_argument(
        "--eagle-dir",
        "--draft",
        dest="draft",
        metavar="PATH",
        help="the draft head: a folder, a repository, or the name of a released head",
    )
    group.add_argument("--method", choices=("eagle", "eagle3"), help="what the head must be (default: what it is)")
    group.add_argument(
        "--tp", type=integer(1), default=1, metavar="N", help="devices that share the weights (default: 1)"
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="auto, the default, is float32 on CPU, float16 on GPUs before Ampere, bfloat16 elsewhere",
    )
    group.add_argument("--device", choices=DEVICES, help="fail unless there is one (default: what JAX chooses)")
    group.add_argument(
        "--max-model-len",
        type=integer(2),
        metavar="N",
        help="bound on prompt and output; longer requests are left out and reported (default: what the model is made for)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=integer(1),
        metavar="N",
        help="requests decoded side by side; 1 times each by itself (default: 1)",
    )


def add_dataset_options(parser: argparse.ArgumentParser, *, prompts: int | None = None, output_len: int = 256) -> None:
    """What is asked, and how much of it by default; None is all of a dataset."""
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--dataset-name",
        nargs="+",
        metavar="NAME",
        help="mt_bench, humaneval, gsm8k come with the package; spec_bench, alpaca, qa, sum and others are looked for in "
        "--dataset-path; custom: the files of --dataset-path; hf: the name in --dataset-path (default: mt_bench, or custom)",
    )
    group.add_argument(
        "--dataset-path",
        nargs="+",
        default=[],
        metavar="PATH",
        help="JSONL files (turns, prompt, messages or prompt_token_ids a line), folders of NAME.jsonl, or philschmid/mt-bench",
    )
    group.add_argument(
        "--num-prompts",
        type=int,
        metavar="N",
        help=f"of each dataset, taken evenly from all of it; -1 is all (default: {prompts or 'all'})",
    )
    group.add_argument("--category", nargs="+", default=[], metavar="NAME", help="only prompts of these categories")
    group.add_argument(
        "--output-len", type=integer(1), metavar="N", help=f"most tokens of an answer (default: {output_len})"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on to --output-len behind the end of the answer")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen and drafts accepted."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temp", type=number(0), nargs="+", metavar="T", help="temperatures, each measured; 0 is greedy (default: 0)"
    )
    group.add_argument("--top-p", type=number(0, 1), metavar="P", help="(default: 1)")
    group.add_argument("--top-k", type=int, metavar="K", help="-1 or 0 is off (default: -1)")
    group.add_argument(
        "--seed", type=integer(0), metavar="N", help="prompt i of a dataset is sampled with N + i (default: 0)"
    )
    group.add_argument(
        "--rejection-sample-method",
        choices=("seeded", "standard", "block", "recursive", "traversal"),
        help="how drafts are accepted where tokens are sampled (default: seeded)",
    )
    group.add_argument(
        "--draft-sample-method",
        choices=("greedy", "probabilistic"),
        help="how they are drafted there (default: the method's)",
    )


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """What becomes of the figures."""
    group = parser.add_argument_group("report")
    group.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="keep rows.jsonl (one line a request; the same command goes on with it), report.json, report.html and pictures",
    )
    group.add_argument("--no-pictures", action="store_true", help="write no pictures: they need matplotlib")
    group.add_argument("--json", action="store_true", help="print the report as one JSON object, and nothing else")
    group.add_argument(
        "--time-limit",
        type=number(0),
        metavar="SECONDS",
        help="begin nothing after so many seconds; exit code 1 if something is left, and the same command goes on with --output",
    )
    loudness = group.add_mutually_exclusive_group()
    loudness.add_argument(
        "--verbose",
        action="store_true",
        help="also print the chat template, a rendered prompt, and notes about the head",
    )
    loudness.add_argument("--quiet", action="store_true", help="print nothing on standard error but errors")


def check_report_options(options: argparse.Namespace) -> None:
    """Refuses what would fail after an hour of measuring.

    Raises:
      UsageError: pictures are wanted and cannot be drawn.
    """
    if options.output is not None and not options.no_pictures:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise UsageError(PICTURES_EXTRA) from error


class Models:
    """Loaded models on a device.

    Args:
      options: of `add_model_options` and `add_report_options`.
      pinned: the target of the released head's expectations, which is a certain file, in place of the default one.
    """

    def __init__(self, options: argparse.Namespace, *, dtype: str, pinned: bool = False, draft_wanted: bool = True):
        self.options = options
        self.backend: Backend = select_device(options.device)
        self.say(f"Running on {self.backend}")

        from eagle_jax.loading import default_target, load_draft, load_target
        from eagle_jax.loading.demo_target import packaged_target
        from eagle_jax.parallel import make_mesh

        mesh = make_mesh(options.tp)
        keep_compiled_programs()
        model, head = options.model, options.draft
        if model is None:
            head = session.DEFAULT_HEAD if head is None else head
            with stage("Obtaining SmolLM2-135M-Instruct", quiet=options.quiet):
                model = packaged_target() if pinned else default_target()
        elif head is None:
            from eagle_jax.entrypoints.speculators import find_target

            # A speculators checkpoint in the place of a model is the head, and names the model.
            model, named, _ = find_target(model, None, revision=None, download_dir=None)
            head = None if named is None else str(named["model"])  # type: ignore[index]
        if head is None and draft_wanted:
            raise UsageError("there is no draft head to measure: give --eagle-dir for this --model-dir")
        bar = sys.stderr.isatty() and not options.quiet
        self.target: Target = load_target(model, dtype=dtype, mesh=mesh, progress=bar)
        self.say(f"Target {self.target.name}, {self.target.model.dtype}")
        self.draft: Draft | None = None
        if head is not None and draft_wanted:
            self.draft = load_draft(find_head(head), self.target, method=options.method, progress=bar)
            self.say(f"Draft head {self.draft.name}")
            for note in self.draft.notes if options.verbose else ():
                self.say(f"  {note}")

    def say(self, text: str) -> None:
        """A line on standard error."""
        if not self.options.quiet:
            print(text, file=sys.stderr)

    def show_template(self, datasets: "Sequence[Dataset]") -> None:
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


def measure(
    models: Models,
    configurations: "Sequence[Configuration]",
    datasets: "Sequence[Dataset]",
    settings: "EvaluationSettings",
    options: argparse.Namespace,
    *,
    on_request: Any = None,
) -> "Evaluation":
    """Runs an evaluation with a line a call on standard error; an interruption says how to go on."""
    from eagle_jax.evaluation import evaluate

    rows_path = None if options.output is None else options.output / "rows.jsonl"
    begin = time.perf_counter()
    tokens = 0

    def on_group(progress: "Progress") -> None:
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
            settings,
            rows_path=rows_path,
            time_limit=options.time_limit,
            on_group=on_group,
            on_request=on_request,
        )
    except KeyboardInterrupt:
        if rows_path is not None:
            print(f"What was measured is in {rows_path}; the same command goes on with it.", file=sys.stderr)
        raise


def write_report(report: "Report", options: argparse.Namespace) -> None:
    """Writes the files of `--output`, if it was given."""
    if options.output is None:
        return
    from eagle_jax.evaluation.page import write_page

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


def print_report(report: "Report", options: argparse.Namespace) -> None:
    """Prints what vLLM's script prints for each configuration, then tables, warnings and the recommendation."""
    if options.json:
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False, allow_nan=False))
        return
    from rich.console import Console

    from eagle_jax.evaluation.report import vllm_lines
    from eagle_jax.evaluation.tables import WIDTH, tables

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
