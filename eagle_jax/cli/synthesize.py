"""`eagle-jax synthesize`: training data for a draft head, written by its target."""

import argparse
import dataclasses
import json
import sys
from typing import Any

from eagle_jax.cli.options import DEVICES, integer
from eagle_jax.cli.runtime import select_device
from eagle_jax.engine.compilation_cache import keep_compiled_programs

DEFAULT_SLOTS_CPU, DEFAULT_SLOTS = 16, 512


def temperatures(text: str) -> tuple[tuple[float, float], ...]:
    """An argparse type: "0:0.5,0.8:0.5" as pairs of temperature and share.

    Raises:
      argparse.ArgumentTypeError: it is not that.
    """
    try:
        pairs = [tuple(map(float, part.split(":"))) for part in text.split(",")]
        return tuple((heat, share) for heat, share in pairs)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not TEMPERATURE:SHARE,...: pairs of numbers, such as 0:0.5,0.8:0.5"
        ) from None


def part(text: str) -> tuple[int, int]:
    """An argparse type: "1/4", the first of four, as (0, 4).

    Raises:
      argparse.ArgumentTypeError: it is not that.
    """
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 1 to N, such as 1/4")
    return int(index) - 1, int(count)


def add_parser(commands: Any) -> None:
    """Adds the subcommand to what `ArgumentParser.add_subparsers` gave."""
    parser = commands.add_parser(
        "synthesize",
        help="let a target write the training data of a draft head",
        description="Let a target answer prompts, and write the conversations to a folder for `eagle-jax train`. Give the same "
        "command again to go on with one that was interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", required=True, metavar="PATH", help="the target: a folder, a .gguf file or a repository"
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="folder of the data")
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--prompts",
        nargs="+",
        default=[],
        metavar="FILE",
        help='.jsonl or .jsonl.gz files, {"prompt": text} in each line',
    )
    prompts.add_argument(
        "--invent",
        type=integer(0),
        default=0,
        metavar="N",
        help="let the target invent N user turns from its chat template",
    )
    prompts.add_argument(
        "--limit", type=integer(1), metavar="N", help="take only N of all these, or of the part, at random"
    )
    prompts.add_argument(
        "--evaluation",
        nargs="+",
        default=[],
        metavar="FILE",
        help="refuse prompts that share 13 words in a row with these",
    )
    prompts.add_argument("--drop-overlapping", action="store_true", help="leave such prompts out instead")
    prompts.add_argument(
        "--max-prompt-tokens",
        type=integer(1),
        default=384,
        metavar="N",
        help="leave longer ones out (default: %(default)s)",
    )
    prompts.add_argument("--min-prompt-words", type=integer(1), default=2, metavar="N", help="(default: %(default)s)")
    answers = parser.add_argument_group("answers")
    answers.add_argument(
        "--temperatures",
        type=temperatures,
        metavar="T:SHARE,...",
        help="temperatures of answers, 0 being greedy, with their shares (default: 0:0.5,0.6:0.15,0.8:0.2,1:0.15)",
    )
    answers.add_argument(
        "--max-new-tokens", type=integer(1), default=512, metavar="N", help="cut longer ones (default: %(default)s)"
    )
    answers.add_argument(
        "--min-answer-tokens",
        type=integer(1),
        default=8,
        metavar="N",
        help="leave shorter ones out (default: %(default)s)",
    )
    answers.add_argument("--seed", type=integer(0), default=0, metavar="N", help="(default: %(default)s)")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", choices=DEVICES, help="fail unless there is one (default: what JAX chooses)")
    machine.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of the target")
    machine.add_argument(
        "--slots",
        type=integer(1),
        metavar="N",
        help=f"conversations side by side (default: {DEFAULT_SLOTS}, on CPU {DEFAULT_SLOTS_CPU})",
    )
    machine.add_argument(
        "--part",
        type=part,
        default=(0, 1),
        metavar="I/N",
        help="take part I of N alone, so that N processes with a device and a folder each share the work",
    )
    machine.add_argument("--max-minutes", type=float, metavar="X", help="stop after so long")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--quiet", action="store_true", help="say nothing on standard error")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Writes data; the exit code is 0 when all prompts are answered and 1 when --max-minutes cut it."""
    backend = select_device(options.device)

    from eagle_jax.loading import load_target
    from eagle_jax.training.synthesis import DEFAULT_TEMPERATURES, SynthesisConfig, synthesize

    config = SynthesisConfig(
        temperatures=options.temperatures or DEFAULT_TEMPERATURES,
        invent=options.invent,
        max_prompt_tokens=options.max_prompt_tokens,
        max_new_tokens=options.max_new_tokens,
        min_prompt_words=options.min_prompt_words,
        min_answer_tokens=options.min_answer_tokens,
        limit=options.limit,
        seed=options.seed,
        part=options.part,
    )

    def say(line: str) -> None:
        if not options.quiet:
            print(line, file=sys.stderr, flush=True)

    keep_compiled_programs()
    target = load_target(options.model, dtype=options.dtype, progress=sys.stderr.isatty() and not options.quiet)
    result = synthesize(
        target,
        options.output,
        config,
        prompts=options.prompts,
        evaluation=options.evaluation,
        drop_overlapping=options.drop_overlapping,
        slots=options.slots or (DEFAULT_SLOTS_CPU if backend.platform == "cpu" else DEFAULT_SLOTS),
        max_seconds=None if options.max_minutes is None else 60 * options.max_minutes,
        say=say,
    )
    if options.json:
        print(json.dumps(dataclasses.asdict(result), indent=2))
    else:
        print(
            f"{options.output}: {result.conversations} conversations, {result.tokens:,} tokens, {result.answer_tokens:,} of them "
            f"answers; {result.tokens_per_second:,.0f} tokens/s"
        )
    if result.remaining:
        say(f"interrupted with {result.remaining} prompts to go; the same command goes on")
    return 1 if result.remaining else 0
