"""Stop strings: where the text of a request ends, and which token that is."""

import dataclasses
from collections.abc import Sequence

from eagle_jax.text.detokenizer import StreamingDetokenizer
from eagle_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class StopMatch:
    """A stop string found at `text[start:end]`, in characters from the start of the request's text.

    The output ends at `start`, or at `end` if the stop string is to be included.
    """

    stop: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class StopSearch:
    """What is known after a push.

    `text[:safe_end]` may be shown: no stop string, found or still possible, begins before `safe_end`. With a match,
    `safe_end` is its start and final.
    """

    safe_end: int
    match: StopMatch | None


class StopStringFinder:
    """Looks for the first stop string in the text of one request, fed delta by delta.

    The first stop string is the one completed first, and of those completed by the same character the longest. So
    the result is the same for every way of splitting the text, and it is where generation of one character at a time
    would have stopped.

    Args:
        stops: the stop strings; none at all is allowed and makes all text safe.

    Raises:
        TypeError: `stops` is a single str, or holds something that is not a str.
        ValueError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]):
        if isinstance(stops, str):
            raise TypeError(f"stops must be a sequence of str, got one str; pass [{stops!r}]")
        for index, stop in enumerate(stops):
            if not isinstance(stop, str):
                raise TypeError(f"stops[{index}] must be a str, got {type(stop).__name__}")
            if not stop:
                raise ValueError(f"stops[{index}] is empty: it would stop before the first character")
        # Longest first, so that min() below keeps the longest of those that end at the same place.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._longest = len(self._stops[0]) if self._stops else 1
        self._tail = ""  # the last characters, which a stop string may have begun in
        self._length = 0  # characters pushed so far
        self._match: StopMatch | None = None

    def push(self, delta: str) -> StopSearch:
        """Takes the next characters; once a stop string is found, more text changes nothing."""
        if self._match is None:
            window = self._tail + delta
            window_start = self._length - len(self._tail)
            self._length += len(delta)
            self._match = self._find(window, window_start)
            self._tail = window[max(0, len(window) - (self._longest - 1)) :]
        if self._match is not None:
            return StopSearch(safe_end=self._match.start, match=self._match)
        return StopSearch(safe_end=self._length - self._possible_start(), match=None)

    def finish(self) -> StopSearch:
        """Says that no more text comes, so a stop string that has only begun is plain text."""
        if self._match is not None:
            return StopSearch(safe_end=self._match.start, match=self._match)
        return StopSearch(safe_end=self._length, match=None)

    def _find(self, window: str, window_start: int) -> StopMatch | None:
        found = [
            StopMatch(stop, window_start + at, window_start + at + len(stop))
            for stop in self._stops
            if (at := window.find(stop)) >= 0
        ]
        return min(found, key=lambda match: match.end, default=None)

    def _possible_start(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for length in range(len(self._tail), 0, -1):
            if any(stop.startswith(self._tail[-length:]) for stop in self._stops):
                return length
        return 0


def tokens_until(tokenizer: Tokenizer, ids: Sequence[int], text_end: int, skip_special_tokens: bool = True) -> int:
    """How many leading tokens make up the text up to a cut, so that ids and log-probs can be cut where text is.

    Args:
        ids: the tokens of the whole text.
        text_end: number of characters kept of `tokenizer.decode(ids)`, e.g. `StopMatch.end`.
        skip_special_tokens: as in `Tokenizer.decode`.

    Returns:
        The smallest n for which `decode(ids[:n])` starts with the kept text. It holds more than that if the cut falls
        inside a token, and ends with the token that completes the last character.

    Raises:
        ValueError: `text_end` is negative or past the end of the text.
    """
    if text_end < 0:
        raise ValueError(f"text_end must be >= 0, got {text_end}")
    if text_end == 0:
        return 0
    detokenizer = StreamingDetokenizer(tokenizer, skip_special_tokens)
    text = ""
    settled = 0  # tokens up to the last one that brought text out before the cut
    for count, id_ in enumerate(ids, start=1):
        delta = detokenizer.push([id_])
        text += delta
        if len(text) >= text_end:
            break
        if delta:
            settled = count
    else:
        text += detokenizer.finish()
        if len(text) < text_end:
            raise ValueError(f"text_end is {text_end}, but the {len(ids)} ids decode to {len(text)} characters only")
    kept = text[:text_end]
    # The token that brought the kept text out may come after the one that completed it: the detokenizer holds
    # characters back which a later token could still change. So every token since the last delta is tried.
    return next(
        count
        for count in range(settled, len(ids) + 1)
        if tokenizer.decode(ids[:count], skip_special_tokens).startswith(kept)
    )
