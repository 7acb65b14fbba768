"""The entry point: parses the command line, runs a subcommand, and turns errors of our own into one line."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from eagle_jax import __version__
from eagle_jax.cli import bench, calibrate, convert, demo, eval, generate, inspect, plan, sweep, synthesize, train

TRACEBACK = "EAGLE_JAX_TRACEBACK"

_OWN_PACKAGES = ("eagle_jax", "pallas_kernels")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each subcommand stores its function as `run`."""
    parser = argparse.ArgumentParser(
        prog="eagle-jax",
        description="EAGLE speculative decoding for Llama-family models in JAX, on TPU, GPU and CPU.",
        epilog=f"Errors are one line and exit code 2; {TRACEBACK}=1 shows where they come from.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (demo, generate, inspect, convert, eval, sweep, bench, calibrate, plan, synthesize, train):
        module.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
      arguments: the command line without the program's name; `sys.argv` if None.

    Returns:
      The exit code: 0, 1 where a subcommand answers no, 2 for an error in what was asked for, 130 when interrupted.
    """
    parser = build_parser()
    parsed = parser.parse_args(arguments)
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
