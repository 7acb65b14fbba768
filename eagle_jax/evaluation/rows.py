"""The rows of an evaluation, and the file that keeps them: what is in it was measured, and is not measured again.

The file is JSONL. Its first line holds the settings. Then come groups: the rows of the requests that were decoded in one call,
and behind them one line with what the call took. A group is written at once; what an interruption left of one is dropped.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eagle_jax.evaluation.errors import EvaluationError
from eagle_jax.metrics import AcceptanceMetrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One request: one turn of one question in one configuration."""

    configuration: str
    dataset: str
    question_id: str
    category: str
    turn: int
    """1 for the first."""
    group: int
    """`Group.index` of the call that it was part of."""
    prompt_tokens: int
    token_ids: list[int]
    text: str | None
    finish_reason: str
    accepted_lengths: list[int]
    """Tokens emitted by each round, bonus included, after cutting."""
    accepted_at_depth: list[int]
    """Rounds that accepted a draft at depth d + 1, before cutting."""
    drafted: int
    plain_rounds: int
    """Rounds that drafted nothing."""
    seed: int | None
    seconds: float | None
    """Prefill and rounds; None where other requests ran beside it."""

    @property
    def metrics(self) -> AcceptanceMetrics:
        """The row's statistics."""
        return AcceptanceMetrics(
            accepted_lengths=self.accepted_lengths,
            accepted_at_depth=self.accepted_at_depth,
            drafted=self.drafted,
            plain_rounds=self.plain_rounds,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A request that was not run."""

    configuration: str
    dataset: str
    question_id: str
    turn: int
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """What one call took."""

    configuration: str
    dataset: str
    turn: int
    index: int
    """Place among the calls of this dataset and turn; the same index holds the same questions in every configuration."""
    requests: int
    output_tokens: int
    decoded_tokens: int
    """Output tokens that came from rounds."""
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    """Not part of the others."""

    @property
    def seconds(self) -> float:
        """Prefill and rounds."""
        return self.prefill_seconds + self.decode_seconds


_START = b'{"kind": "settings"'

_KINDS: dict[str, type] = {"request": Row, "left_out": LeftOut, "group": Group}


@dataclasses.dataclass
class Rows:
    """Everything measured so far."""

    requests: list[Row] = dataclasses.field(default_factory=list)
    left_out: list[LeftOut] = dataclasses.field(default_factory=list)
    groups: list[Group] = dataclasses.field(default_factory=list)

    def add(self, rows: Iterable[Row | LeftOut], group: Group) -> None:
        """Takes in what one call gave."""
        for row in rows:
            if isinstance(row, Row):
                self.requests.append(row)
            else:
                self.left_out.append(row)
        self.groups.append(group)


class RowsFile:
    """Rows that are kept in a file, or in memory alone.

    Args:
      path: the file; it is made if it does not exist. None keeps nothing.
      settings: what was measured and how, as JSON values. A file that has other ones is refused.

    Raises:
      EvaluationError: the file is not one of these, or was written with other settings; the message names the first that differs.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]):
        self.path, self.settings, self.rows = path, json.loads(json.dumps(settings)), Rows()
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_bytes() if path.exists() else b""
            whole = text[: text.rfind(b"\n") + 1]
            if text and not whole and not text.startswith(_START[: len(text)]):
                raise EvaluationError(f"rows file {path}, line 1 is none of an evaluation")
            kept = self._read(path, whole.decode("utf-8")) if whole else 0
            with path.open("r+b" if path.exists() else "wb") as file:
                file.truncate(kept)
                if not kept:
                    file.write(_line({"kind": "settings", **self.settings}))
        except (OSError, UnicodeDecodeError) as error:
            raise EvaluationError(f"rows file {path} cannot be read or written: {error}") from error

    def append(self, rows: Iterable[Row | LeftOut], group: Group) -> None:
        """Keeps what one call gave."""
        rows = list(rows)
        self.rows.add(rows, group)
        if self.path is None:
            return
        kinds = {type_: kind for kind, type_ in _KINDS.items()}
        lines = [_line({"kind": kinds[type(entry)], **dataclasses.asdict(entry)}) for entry in (*rows, group)]
        with self.path.open("ab") as file:
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())

    def _read(self, path: Path, text: str) -> int:
        """Reads all whole groups; returns how many bytes of the file they take."""
        kept = position = 0
        pending: list[Row | LeftOut] = []
        # Not splitlines(): an answer may hold one of the rarer separators.
        for number, line in enumerate(text.split("\n")[:-1], start=1):
            position += len(line.encode("utf-8")) + 1
            try:
                entry = json.loads(line)
                kind = entry.pop("kind")
                if (number == 1) != (kind == "settings"):
                    raise EvaluationError(
                        f"rows file {path}, line {number}: the settings must come first, and only once"
                    )
                if kind == "settings":
                    self._check(path, entry)
                else:
                    value = _KINDS[kind](**entry)
            except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
                raise EvaluationError(f"rows file {path}, line {number} is none of an evaluation: {error!r}") from error
            if kind == "group":
                self.rows.add(pending, value)
                pending = []
            elif kind != "settings":
                pending.append(value)
            if kind in ("settings", "group"):
                kept = position
        return kept

    def _check(self, path: Path, found: Mapping[str, Any]) -> None:
        for name in dict.fromkeys((*found, *self.settings)):
            if found.get(name) != self.settings.get(name):
                raise EvaluationError(
                    f"{path} was measured with another {name}: {_short(found.get(name))} there, "
                    f"{_short(self.settings.get(name))} now; give the same settings to go on with "
                    "it, or another output folder to start anew"
                )


def _line(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "..."
