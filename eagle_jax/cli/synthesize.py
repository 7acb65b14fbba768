"""`eagle-jax synthesize`: training data for a draft head, written by its target."""

import argparse
import dataclasses
import functools
import json
import sys

from eagle_jax.cli import session
from eagle_jax.cli.options import add, add_device_option, add_integer, add_number, add_switch
from eagle_jax.cli.runtime import select_device
from eagle_jax.engine.compilation_cache import keep_compiled_programs
from eagle_jax.loading import load_target
from eagle_jax.training.synthesis import DEFAULT_TEMPERATURES, SynthesisConfig, synthesize

DEFAULT_SLOTS_CPU, DEFAULT_SLOTS = 16, 512


def temperatures(text: str) -> tuple[tuple[float, float], ...]:
    """An argparse type: "0:0.5,0.8:0.5" as pairs of temperature and share.

    Raises:
      argparse.ArgumentTypeError: it is not that.
    """
    try:
        pairs = [tuple(map(float, part.split(":"))) for part in text.split(",")]
        return tuple((temperature, share) for temperature, share in pairs)
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


DESCRIPTION = (
    "Let a target answer prompts, and write the conversations to a folder for `eagle-jax train`. Give the same "
    "command again to go on with one that was interrupted."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes."""
    add(parser, "--model", "the target: a folder, a .gguf file or a repository", required=True, metavar="PATH")
    add(parser, "--output", "folder of the data", required=True, metavar="FOLDER")
    prompts = parser.add_argument_group("prompts")
    add(
        prompts,
        "--prompts",
        '.jsonl or .jsonl.gz files, {"prompt": text} in each line',
        nargs="+",
        default=[],
        metavar="FILE",
    )
    add_integer(prompts, "--invent", "let the target invent N user turns from its chat template", default=0, least=0)
    add_integer(prompts, "--limit", "take only N of all these, or of the part, at random")
    add(
        prompts,
        "--evaluation",
        "refuse prompts that share 13 words in a row with these",
        nargs="+",
        default=[],
        metavar="FILE",
    )
    add_switch(prompts, "--drop-overlapping", "leave such prompts out instead")
    add_integer(prompts, "--max-prompt-tokens", "leave longer ones out", default=384)
    add_integer(prompts, "--min-prompt-words", "", default=2)
    answers = parser.add_argument_group("answers")
    add(
        answers,
        "--temperatures",
        "temperatures of answers, 0 being greedy, with their shares (default: 0:0.5,0.6:0.15,0.8:0.2,1:0.15)",
        type=temperatures,
        metavar="T:SHARE,...",
    )
    add_integer(answers, "--max-new-tokens", "cut longer ones", default=512)
    add_integer(answers, "--min-answer-tokens", "leave shorter ones out", default=8)
    add_integer(answers, "--seed", "", default=0, least=0)
    machine = parser.add_argument_group("machine")
    add_device_option(machine)
    add(machine, "--dtype", "of the target", choices=("auto", "float32", "bfloat16"), default="auto")
    add_integer(
        machine, "--slots", f"conversations side by side (default: {DEFAULT_SLOTS}, on CPU {DEFAULT_SLOTS_CPU})"
    )
    add(
        machine,
        "--part",
        "take part I of N alone, so that N processes with a device and a folder each share the work",
        default=(0, 1),
        type=part,
        metavar="I/N",
    )
    add_number(machine, "--max-minutes", "stop after so long")
    add_switch(parser, "--json", "print the result as JSON")
    add_switch(parser, "--quiet", "say nothing on standard error")


def run(options: argparse.Namespace) -> int:
    """Writes data; the exit code is 0 when all prompts are answered and 1 when --max-minutes cut it."""
    backend = select_device(options.device)

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

    say = functools.partial(session.say, options)
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
