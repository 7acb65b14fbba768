"""The one error that a checkpoint raises."""

import contextlib
from collections.abc import Iterable, Iterator


class CheckpointError(ValueError):
    """A checkpoint that cannot be found, read, or made to fit.

    The message names the file, key or tensor, what it is, and what would be right.
    """


def listed(names: Iterable[object], limit: int = 8) -> str:
    """The names joined by commas; of many, the first few and how many more there are."""
    shown = [str(name) for name in names]
    more = f" and {len(shown) - limit} more" if len(shown) > limit else ""
    return ", ".join(shown[:limit]) + more


@contextlib.contextmanager
def about(what: str) -> Iterator[None]:
    """Puts the checkpoint's name in front of what is wrong with it, and makes every ValueError a CheckpointError."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{what}: {error}") from error
