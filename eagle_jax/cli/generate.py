"""`eagle-jax generate`: continue prompts."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from eagle_jax.cli import options as shared
from eagle_jax.cli.options import add, add_switch
from eagle_jax.cli.report import seed_of, summary, to_json
from eagle_jax.cli.runtime import stage
from eagle_jax.cli.session import UsageError, start
from eagle_jax.outputs import RequestOutput
from eagle_jax.sampling import SamplingParams

PROMPT_FORMS = '{"prompt": text}, {"messages": [{"role": ..., "content": ...}, ...]} or {"prompt_token_ids": [...]}'


DESCRIPTION = (
    "Continue prompts. Answers go to standard output, everything else to standard error. A prompt is put into "
    "the chat template of the model if it has one."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes."""
    prompts = parser.add_mutually_exclusive_group(required=True)
    add(prompts, "prompt", "the prompt", nargs="?", metavar="PROMPT")
    add(
        prompts,
        "--prompts-file",
        f"one prompt a line, or, if its name ends in .jsonl, one object a line: {PROMPT_FORMS}; - reads standard input",
        metavar="FILE",
    )
    add_switch(parser, "--no-chat", "continue the text itself, without a chat template")
    how = parser.add_mutually_exclusive_group()
    add_switch(how, "--stream", "print the answer while it grows; for one prompt")
    add_switch(how, "--json", "print outputs, token ids and statistics as one JSON object")
    shared.add_model_options(parser)
    add_switch(parser, "--no-draft", "decode plainly")
    shared.add_draft_shape_options(parser)
    shared.add_output_options(parser, max_tokens=256)
    add(parser, "--stop", "end the output at this text; may be given several times", action="append", metavar="TEXT")
    shared.add_sampling_options(parser)
    shared.add_reporting_options(parser)


def run(options: argparse.Namespace) -> int:
    """Loads, decodes, prints."""
    if options.no_draft and options.draft is not None:
        raise UsageError("--draft and --no-draft contradict each other")
    prompts = [options.prompt] if options.prompts_file is None else read_prompts(options.prompts_file)
    if options.stream and len(prompts) != 1:
        raise UsageError(f"--stream prints one answer, and {options.prompts_file} holds {len(prompts)} prompts")

    params = SamplingParams(
        max_tokens=options.max_tokens, stop=options.stop, ignore_eos=options.ignore_eos, **shared.sampling(options)
    )
    session = start(options, plain=options.no_draft)
    decoder = session.decoder(speculative=session.draft is not None)
    tokenizer = session.target.tokenizer
    chat = not options.no_chat and tokenizer is not None and tokenizer.chat_template is not None
    read = decoder.read(prompts, chat=chat)
    if options.verbose:
        for index, prompt in enumerate(read):
            print(f"Prompt {index}: {prompt.text!r} {len(prompt.token_ids)} tokens", file=sys.stderr)
    if options.stream:
        deltas = decoder.stream(read, [params])  # checks the prompt before anything is compiled
        done: list[RequestOutput] = []
        with stage("Compiling", quiet=options.quiet):
            decoder.compile(prompts=1, tokens=len(read[0].token_ids) + options.max_tokens, params=params)
        for delta in deltas:
            done += [] if delta.output is None else [delta.output]
            print(
                delta.text if tokenizer is not None else " ".join(map(str, [*delta.token_ids, ""])), end="", flush=True
            )
        print()
        if not options.quiet and seed_of(done):
            print(seed_of(done).removeprefix(", "), file=sys.stderr)
        return 0
    outputs, timing = decoder.run(read, [params] * len(read), progress=not options.quiet)
    if options.json:
        print(json.dumps(to_json(session, outputs, timing), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print_outputs(outputs)
    if not options.quiet:
        print(summary(outputs, timing), file=sys.stderr)
    return 0


def read_prompts(name: str) -> list[Any]:
    """The prompts of a file, in the forms that `generate` of the Python API takes.

    Raises:
      UsageError: the file cannot be read, holds no prompt, or a line of it is no prompt.
    """
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts-file {name} cannot be read: {error}") from error
    # Not splitlines(): a prompt may hold one of the rarer separators.
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise UsageError(f"--prompts-file {name} holds no prompt")
    if not name.endswith(".jsonl"):
        return [line for _, line in lines]
    return [_parse_line(f"{name}, line {number}", line) for number, line in lines]


def _parse_line(where: str, line: str) -> Any:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict) or len(value) != 1 or not value.keys() <= {"prompt", "messages", "prompt_token_ids"}:
        raise UsageError(f"{where} is not one of {PROMPT_FORMS}: {line}")
    messages = value.get("messages")
    if "messages" in value and not (isinstance(messages, list) and messages):
        raise UsageError(f"{where}: messages must be a list of at least one message")
    text = value.get("prompt")
    if "prompt" in value and not isinstance(text, str):
        raise UsageError(f"{where}: prompt must be a text, got {text!r}")
    return text if text is not None else messages if messages is not None else value


def print_outputs(outputs: list[RequestOutput]) -> None:
    """Prints the answers; of several each under a line with its prompt."""
    for index, output in enumerate(outputs):
        if len(outputs) > 1:
            prompt = output.prompt_token_ids if output.prompt is None else output.prompt
            print(f"{'' if index == 0 else chr(10)}[{index}] {prompt!r}")
        completion = output.outputs[0]
        print(completion.token_ids if completion.text is None else completion.text)
