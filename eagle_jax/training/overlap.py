"""Keeping evaluation prompts out of training data: no prompt may share 13 words in a row with one of them."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle_jax.training.conversations import DataError, read_json_lines

NGRAM = 13


def words(text: str) -> list[str]:
    """Lower-case words and numbers of a text."""
    return re.findall(r"\w+", text.lower())


class EvaluationSets:
    """The 13-grams of evaluation prompts. A prompt of fewer words counts as one gram, and matches only a text that is the same.

    Args:
      paths: `.jsonl` files with `turns` (a list), `prompt`, `question` or `messages` in each line.

    Raises:
      DataError: a file that is absent, empty or has none of these keys.
    """

    def __init__(self, paths: Sequence[str | Path]):
        self._long: dict[tuple[str, ...], str] = {}
        self._short: dict[tuple[str, ...], str] = {}
        for path in paths:
            for name, row in read_json_lines(path):
                for text in _texts(row, name):
                    found = words(text)
                    if 0 < len(found) < NGRAM:
                        self._short.setdefault(tuple(found), name)
                    for gram in _grams(found):
                        self._long.setdefault(gram, name)

    def find(self, text: str) -> tuple[str, str] | None:
        """The evaluation sample that a text overlaps with, and the words; None if there is none."""
        found = words(text)
        if (name := self._short.get(tuple(found))) is not None:
            return name, " ".join(found)
        for gram in _grams(found):
            if (name := self._long.get(gram)) is not None:
                return name, " ".join(gram)
        return None


def _grams(found: list[str]) -> Iterator[tuple[str, ...]]:
    return (tuple(found[i : i + NGRAM]) for i in range(len(found) - NGRAM + 1))


def _texts(row: dict[str, Any], name: str) -> list[str]:
    for key in ("turns", "prompt", "question"):
        if isinstance(row.get(key), str):
            return [row[key]]
        if isinstance(row.get(key), list):
            return [text for text in row[key] if isinstance(text, str)]
    if isinstance(row.get("messages"), list):
        return [m["content"] for m in row["messages"] if isinstance(m, dict) and m.get("role") == "user"]
    raise DataError(f"{name}: needs `turns`, `prompt`, `question` or `messages`; its keys are {sorted(row)}")
