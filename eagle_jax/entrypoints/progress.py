"""A progress bar for people, and nothing for everybody else."""

import contextlib
import sys
from collections.abc import Callable, Iterator


def at_terminal() -> bool:
    """Whether standard error is a terminal that someone may be looking at."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def progress_bar(title: str, total: int, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Draws a bar on standard error if `enabled` and that is a terminal.

    Yields:
      A function that says how many more of the `total` are done.
    """
    if not (enabled and at_terminal()):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.advance(task, done)


@contextlib.contextmanager
def spinner(title: str, *, enabled: bool) -> Iterator[None]:
    """Shows that something of unknown length is going on, under the same conditions."""
    if not (enabled and at_terminal()):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(title):
        yield
