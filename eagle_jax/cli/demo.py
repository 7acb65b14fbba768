"""`eagle-jax demo`: an answer from speculative decoding, and what it gains over plain decoding on this machine."""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from eagle_jax.cli import options as shared
from eagle_jax.cli.options import add, add_integer, add_switch
from eagle_jax.cli.report import metrics_to_json
from eagle_jax.cli.runtime import counting_compilations, stage
from eagle_jax.cli.session import Session, UsageError, describe, start, tree_to_json
from eagle_jax.entrypoints.decoder import Decoder
from eagle_jax.entrypoints.prompts import Prompt
from eagle_jax.metrics import AcceptanceMetrics
from eagle_jax.outputs import Delta
from eagle_jax.sampling import SamplingParams

PROMPT = "How does photosynthesis work?"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Plain and speculative decoding of one prompt."""

    plain: list[float]
    """Output tokens a second of each run, reading the prompt included."""
    speculative: list[float]
    tokens: int
    """Tokens of the output."""
    metrics: AcceptanceMetrics
    """Of the speculative output."""
    same_tokens: bool
    """Whether both outputs are the same."""
    plain_compile_seconds: float
    speculative_compile_seconds: float
    compiled: int
    """Programs that had to be compiled, and below those that an earlier run left in the cache."""
    from_cache: int

    @property
    def speed_up(self) -> float:
        """Ratio of the medians."""
        return statistics.median(self.speculative) / statistics.median(self.plain)


DESCRIPTION = (
    "Answer a question with speculative decoding while you watch, then decode it again with and without "
    "speculation and print both speeds, the accepted length and the acceptance at each draft position."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes."""
    add(parser, "--prompt", "what to ask (default: %(default)r)", default=PROMPT, metavar="TEXT")
    shared.add_model_options(parser)
    shared.add_draft_shape_options(parser)
    shared.add_output_options(parser, max_tokens=128)
    add_integer(parser, "--repeats", "measured runs of each kind, alternating; their median counts", default=3)
    add_switch(parser, "--json", "print the measurements as one JSON object, and no answer")
    shared.add_reporting_options(parser)


def run(options: argparse.Namespace) -> int:
    """Answers, measures, prints."""
    if options.model is not None and options.draft is None:
        raise UsageError("the demo compares decoding with and without a draft head: give --draft for this --model")
    session = start(options)
    target = session.target
    speculative, plain = session.decoder(speculative=True), session.decoder(speculative=False)
    chat = target.tokenizer is not None and target.tokenizer.chat_template is not None
    prompts = speculative.read(options.prompt, chat=chat)
    if options.verbose:
        print(f"Prompt: {prompts[0].text!r} {len(prompts[0].token_ids)} tokens", file=sys.stderr)
    answer = speculative.stream(prompts, [_params(options)])  # checks the prompt before anything is compiled
    tokens = len(prompts[0].token_ids) + options.max_tokens
    with counting_compilations() as count, stage("Compiling speculative and plain decoding", quiet=options.quiet):
        plain_seconds = plain.compile(prompts=1, tokens=tokens)
        speculative_seconds = speculative.compile(prompts=1, tokens=tokens)
    if not options.json:
        print_answer(options.prompt, answer)
    with stage("Measuring", quiet=options.quiet):
        comparison = compare(
            plain,
            speculative,
            prompts,
            options,
            plain_compile_seconds=plain_seconds,
            speculative_compile_seconds=speculative_seconds,
            compiled=count.compiled,
            from_cache=count.from_cache,
        )
    if options.json:
        print(json.dumps(to_json(session, comparison), indent=2, allow_nan=False))
    else:
        print_table(session, comparison)
    return 0


def print_answer(prompt: str, deltas: Iterator[Delta]) -> None:
    """Streams the answer to standard output."""
    print(f"\n> {prompt}\n")
    for delta in deltas:
        print(delta.text, end="", flush=True)
    print("\n", flush=True)


def compare(
    plain: Decoder, speculative: Decoder, prompts: list[Prompt], options: argparse.Namespace, **compilation: Any
) -> Comparison:
    """Runs both kinds by turns, after one run of each that does not count.

    Args:
      plain: decodes without the draft head.
      speculative: decodes with it.
      prompts: one prompt.
      options: `repeats` and the options of `add_output_options`.
      **compilation: the fields of `Comparison` about it.
    """
    speeds: dict[Decoder, list[float]] = {plain: [], speculative: []}
    results = {}
    for repeat in range(options.repeats + 1):
        for decoder, measured in speeds.items():
            [results[decoder]], timing = decoder.run(prompts, [_params(options)], progress=False)
            if repeat:
                measured.append(timing.tokens_per_second)
    tokens = {decoder: output.outputs[0].token_ids for decoder, output in results.items()}
    return Comparison(
        plain=speeds[plain],
        speculative=speeds[speculative],
        tokens=len(tokens[speculative]),
        metrics=results[speculative].metrics,
        same_tokens=tokens[speculative] == tokens[plain],
        **compilation,
    )


def print_table(session: Session, comparison: Comparison) -> None:
    """Prints the comparison to standard output."""

    table = Table(
        title=f"{session.backend}, {session.target.model.dtype}, {describe(session.tree)}", title_justify="left"
    )
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column("speculative", justify="right")
    metrics = comparison.metrics
    plain, speculative = statistics.median(comparison.plain), statistics.median(comparison.speculative)
    table.add_row("tokens per second", f"{plain:.1f}", f"{speculative:.1f}")
    table.add_row("speed-up", "1.00 x", f"{comparison.speed_up:.2f} x")
    table.add_row("forwards of the target", f"{comparison.tokens - 1}", f"{metrics.rounds}")
    table.add_row("accepted length, bonus included", "1.00", f"{metrics.mean_acceptance_length:.2f}")
    for position, rate in enumerate(metrics.acceptance_rates, start=1):
        table.add_row(f"accepted at draft position {position}", "", f"{100 * rate:.0f} %")
    table.add_section()
    table.add_row(
        "compile time, not counted above",
        f"{comparison.plain_compile_seconds:.1f} s",
        f"{comparison.speculative_compile_seconds:.1f} s",
    )
    Console(highlight=False).print(table)
    same = "the same tokens" if comparison.same_tokens else "different tokens, which rounding can cause at a near tie"
    print(
        f"Both gave {same}: {comparison.tokens} of them. Speeds are medians over {len(comparison.plain)} runs of each, by turns."
    )
    print(f"{comparison.compiled} programs were compiled, {comparison.from_cache} were in the cache.")
    if comparison.speed_up < 1:
        print(
            "Speculation loses here: the draft is accepted too rarely for what it costs. Try a shorter --num-speculative-tokens."
        )


def to_json(session: Session, comparison: Comparison) -> dict[str, Any]:
    """The object that `--json` prints."""
    fields = {
        field.name: getattr(comparison, field.name)
        for field in dataclasses.fields(Comparison)
        if field.name != "metrics"
    }
    return {
        "model": session.target.name,
        "draft": None if session.draft is None else session.draft.name,
        "tree": tree_to_json(session.tree),
        "dtype": str(session.target.model.dtype),
        "backend": dataclasses.asdict(session.backend),
        "speed_up": comparison.speed_up,
        **fields,
        "metrics": metrics_to_json(comparison.metrics),
    }


def _params(options: argparse.Namespace) -> SamplingParams:

    return SamplingParams(max_tokens=options.max_tokens, ignore_eos=options.ignore_eos)
