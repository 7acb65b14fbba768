"""Documents into rows of one length, and rows into batches, the same ones for a seed whenever they are asked for."""

import dataclasses
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np

from eagle_jax.training.batch import PackedBatch
from eagle_jax.training.conversations import Conversation

_OPEN_ROWS = 64
"""Rows that still take documents while packing; more of them fill better and look longer."""


def pack(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Puts documents into rows: for each the one that it fills best.

    Args:
      lengths: of the documents, each at most `length`.
      length: tokens of a row.

    Returns:
      The documents of each row.
    """
    rows: list[list[int]] = []
    room = np.zeros(_OPEN_ROWS, np.int64)
    members: list[list[int]] = [[] for _ in range(_OPEN_ROWS)]
    for document, size in enumerate(lengths):
        left = room - size
        fits = left >= 0
        if fits.any():
            place = int(np.where(fits, left, length + 1).argmin())
        else:
            place = int(room.argmin())
            if members[place]:
                rows.append(members[place])
            members[place], room[place] = [], length
        members[place].append(document)
        room[place] -= size
    return rows + [row for row in members if row]


@dataclasses.dataclass(frozen=True)
class Packer:
    """Batches of packed conversations, each a function of its number."""

    conversations: Sequence[Conversation]
    length: int
    """T."""
    rows: int
    """B."""
    seed: int

    def __post_init__(self) -> None:
        longest = max(len(c.tokens) for c in self.conversations)
        if longest > self.length:
            raise ValueError(f"a conversation has {longest} tokens, more than a row of {self.length}; see `fit`")

    def epoch(self, number: int) -> list[list[int]]:
        """The documents of each row of an epoch, rows in a random order."""
        rng = np.random.default_rng((self.seed, number))
        order = rng.permutation(len(self.conversations))
        packed = pack([len(self.conversations[i].tokens) for i in order], self.length)
        return [[int(order[i]) for i in packed[row]] for row in rng.permutation(len(packed))]

    def batches(self, first: int = 0) -> Iterator[PackedBatch]:
        """Batches without end, from number `first`; each epoch ends with a batch that is filled with rows of the same epoch."""
        number, epoch = 0, 0
        while True:
            rows = self.epoch(epoch)
            if len(rows) % self.rows:
                rows = rows + [rows[i % len(rows)] for i in range(-len(rows) % self.rows)]
            for start in range(0, len(rows), self.rows):
                if number >= first:
                    yield self.assemble(rows[start : start + self.rows])
                number += 1
            epoch += 1

    def batches_per_epoch(self) -> int:
        """Batches of the first epoch; the others differ by a few."""
        return -(-len(self.epoch(0)) // self.rows)

    def assemble(self, rows: Sequence[Sequence[int]]) -> PackedBatch:
        """A batch of rows of documents; missing rows are padding."""
        shape = (self.rows, self.length)
        tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
        assistant = np.zeros(shape, bool)
        for row, documents in enumerate(rows):
            start = 0
            for number, document in enumerate(documents, start=1):
                conversation = self.conversations[document]
                end = start + len(conversation.tokens)
                tokens[row, start:end] = conversation.tokens
                assistant[row, start:end] = conversation.assistant
                segments[row, start:end] = number
                positions[row, start:end] = np.arange(end - start)
                start = end
        return PackedBatch(tokens, segments, positions, assistant)


def fit(conversations: Sequence[Conversation], length: int) -> tuple[list[Conversation], int, int]:
    """Cuts conversations to `length` tokens.

    Returns:
      Those that keep a token to be drafted, how many were cut, and how many were left out because the cut took their answer.
    """
    kept, cut, lost = [], 0, 0
    for c in conversations:
        if len(c.tokens) > length:
            c = dataclasses.replace(c, tokens=c.tokens[:length], assistant=c.assistant[:length])
            cut += 1
        # The first token of an answer is never drafted.
        if (c.assistant[1:] & c.assistant[:-1]).any():
            kept.append(c)
        else:
            lost += 1
    return kept, cut, lost


def prefetch(batches: Iterator[Any], place: Callable[[Any], Any], ahead: int = 2) -> Generator[Any, None, None]:
    """Assembles and places batches in a thread, `ahead` of whoever takes them; an error comes out where the batch would."""
    ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(maxsize=ahead)
    ended = threading.Event()

    def work() -> None:
        try:
            for batch in batches:
                placed = place(batch)
                while not ended.is_set():
                    try:
                        ready.put((placed, None), timeout=0.1)
                        break
                    except queue.Full:
                        continue
                if ended.is_set():
                    return
        except BaseException as error:
            ready.put((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            batch, error = ready.get()
            if error is not None:
                raise error
            yield batch
    finally:
        ended.set()
        thread.join()
