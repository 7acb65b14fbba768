"""Prompts for synthesis: read, checked, filtered and put into the chat template."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from eagle_jax.text.tokenizer import Tokenizer
from eagle_jax.training.conversations import DataError, read_json_lines
from eagle_jax.training.overlap import EvaluationSets, words

_MARK = "\ue000"
"""Stands for the user's words while the template around them is looked at; private use, in no vocabulary as one token."""


@dataclasses.dataclass(frozen=True)
class UserTurn:
    """What a user says."""

    text: str
    name: str
    """Where it comes from, for messages."""


@dataclasses.dataclass
class Dropped:
    """Why prompts were left out."""

    duplicates: int = 0
    too_short: int = 0
    too_long: int = 0
    overlapping: int = 0

    def __str__(self) -> str:
        return (
            f"{self.duplicates} duplicates, {self.too_short} too short, {self.too_long} too long, {self.overlapping} overlapping "
            "with evaluation sets"
        )


def read_prompts(paths: Sequence[str | Path]) -> list[UserTurn]:
    """Reads `.jsonl` or `.jsonl.gz` files with a `prompt` in each line.

    Raises:
      DataError: a line without one.
    """
    out = []
    for path in paths:
        for name, row in read_json_lines(path):
            if not isinstance(row.get("prompt"), str):
                raise DataError(f"{name}: needs `prompt`, a text; its keys are {sorted(row)}")
            out.append(UserTurn(row["prompt"], name))
    return out


def filter_turns(
    turns: Sequence[UserTurn], evaluation: EvaluationSets, *, drop_overlapping: bool, min_words: int, seen: set[str]
) -> tuple[list[UserTurn], Dropped]:
    """Leaves out empty and repeated turns, and those that overlap with evaluation sets.

    Args:
      turns: in the order in which the first of equal ones is kept.
      evaluation: what must not be trained on.
      drop_overlapping: leave overlapping turns out instead of refusing them.
      min_words: least words of a turn.
      seen: what was kept before, in normal form; is added to.

    Raises:
      DataError: a turn overlaps with an evaluation sample; it names both.
    """
    kept, dropped = [], Dropped()
    for turn in turns:
        normal = " ".join(words(turn.text))
        if len(normal.split()) < min_words:
            dropped.too_short += 1
        elif normal in seen:
            dropped.duplicates += 1
        elif (found := evaluation.find(turn.text)) is not None:
            if not drop_overlapping:
                raise DataError(
                    f"{turn.name} overlaps with the evaluation sample {found[0]}: both have {found[1]!r}; remove it, or leave "
                    "such prompts out with --drop-overlapping"
                )
            dropped.overlapping += 1
        else:
            seen.add(normal)
            kept.append(turn)
    return kept, dropped


def tokenize_turns(
    tokenizer: Tokenizer, turns: Sequence[UserTurn], *, max_tokens: int, dropped: Dropped
) -> list[tuple[UserTurn, list[int]]]:
    """Puts turns into the chat template; those that become longer than `max_tokens` are left out and counted."""
    texts = [tokenizer.render_chat([{"role": "user", "content": turn.text}]) for turn in turns]
    out = []
    for turn, encoding in zip(turns, tokenizer.backend.encode_batch(texts, add_special_tokens=False), strict=True):
        if len(encoding.ids) > max_tokens:
            dropped.too_long += 1
        else:
            out.append((turn, encoding.ids))
    return out


def user_header(tokenizer: Tokenizer) -> list[int]:
    """The ids of a chat up to where the user's words begin: a model that continues them invents a user's turn.

    Raises:
      DataError: the template does not write the user's words as they are.
    """
    text = tokenizer.render_chat([{"role": "user", "content": _MARK}])
    before, found, _ = text.partition(_MARK)
    if not found or not before:
        raise DataError(
            "the chat template does not match: it writes nothing before the user's words, so a user's turn cannot be invented"
        )
    return tokenizer.encode(before, add_special_tokens=False)
