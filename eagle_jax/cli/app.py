"""The entry point: parses the command line, runs a subcommand, and turns errors of our own into one line."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from eagle_jax import __version__

TRACEBACK = "EAGLE_JAX_TRACEBACK"

_OWN_PACKAGES = ("eagle_jax", "pallas_kernels")


COMMANDS = {
    "demo": "answer a question with speculative decoding and measure the speed-up",
    "generate": "continue prompts, with a draft head or plainly",
    "inspect": "say what a checkpoint is, its shapes, what would be used, and why it would not load",
    "convert": "write a draft head in EAGLE's format or in that of speculators",
    "eval": "measure the acceptance of a draft head on evaluation sets",
    "sweep": "measure many shapes of drafts and recommend one for this device",
    "bench": "measure plain decoding, a round, and the parts of a round",
    "calibrate": "measure the rounds that --tree auto chooses from on this device",
    "plan": "compile a round for a TPU topology without the hardware; memory a chip, whether it fits, collectives",
    "synthesize": "let a target write the training data of a draft head",
    "train": "train a draft head for a target",
}
"""The module of this package that runs each command, and what it does. A module has `DESCRIPTION`, `add_options(parser)` and
`run(options)`; it is imported when its command is asked for, so that others need not pay for it."""


def build_parser(asked: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line; each subcommand stores its function as `run`.

    Args:
      asked: the only command whose options are added; all of them if None.
    """
    parser = argparse.ArgumentParser(
        prog="eagle-jax",
        description="EAGLE speculative decoding for Llama-family models in JAX, on TPU, GPU and CPU.",
        epilog=f"Errors are one line and exit code 2; {TRACEBACK}=1 shows where they come from.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, does in COMMANDS.items():
        command = commands.add_parser(name, help=does, allow_abbrev=False)
        if asked in (None, name):
            module = importlib.import_module(f"eagle_jax.cli.{name}")
            command.description = module.DESCRIPTION
            module.add_options(command)
            command.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
      arguments: the command line without the program's name; `sys.argv` if None.

    Returns:
      The exit code: 0, 1 where a subcommand answers no, 2 for an error in what was asked for, 130 when interrupted.
    """
    words = sys.argv[1:] if arguments is None else arguments
    # The command is the first word that is no option: none before it takes a value.
    parsed = build_parser(next((word for word in words if not word.startswith("-")), "")).parse_args(words)
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        code = run(parsed)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has seen enough, as in `eagle-jax ... | head`. Nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("eagle-jax: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get(TRACEBACK) or not _is_ours(error):
            raise
        print(f"eagle-jax: error: {error}", file=sys.stderr)
        return 2


def _is_ours(error: Exception) -> bool:
    """Whether the error was raised, with a message for the user, by a line of this project; any other one is a bug."""
    if isinstance(error, AssertionError | LookupError | AttributeError):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] in _OWN_PACKAGES
