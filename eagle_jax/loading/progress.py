"""Reporting how far a load has come."""

import contextlib
from collections.abc import Callable, Iterator

Progress = bool | Callable[[str, int, int], None]
"""False is silent, True draws a bar on standard error, a function is called with (tensor, bytes read so far, bytes in all)."""


@contextlib.contextmanager
def reporter(progress: Progress, total: int, title: str = "Loading weights") -> Iterator[Callable[[str, int], None]]:
    """Yields a function to be called with the tensor's name and the bytes just read.

    Args:
      progress: what to do with the news.
      total: bytes that will be read in all.
      title: text beside the bar.
    """
    done = 0
    if progress is False:
        yield lambda name, size: None
    elif progress is True:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda name, size: bar.advance(task, size)
    elif callable(progress):

        def call(name: str, size: int) -> None:
            nonlocal done
            done += size
            progress(name, done, total)

        yield call
    else:
        raise ValueError(
            f"progress must be True, False or a function (tensor, bytes read, bytes in all), not {progress!r}"
        )
