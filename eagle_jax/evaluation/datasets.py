"""The prompts that acceptance is measured on: three sets of the field come with the package, others are read by path."""

import dataclasses
import functools
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from eagle_jax.evaluation.errors import EvaluationError

SHIPPED = ("mt_bench", "humaneval", "gsm8k")
"""Sets whose licences allow shipping them; 80 questions each, as the EAGLE repository evaluates on them."""
KNOWN = ("spec_bench", "alpaca", "qa", "sum")
"""Sets that the field names as well. They are not shipped: give their files by path."""
ALIASES = {"philschmid/mt-bench": "mt_bench", "mt-bench": "mt_bench", "lm-sys/mt-bench": "mt_bench"}
"""Names by which others know a shipped set; the first is what vLLM's `--dataset-path` calls it."""

FORMS = (
    '{"turns": [text, ...]}, {"prompt": text}, {"messages": [...]} or {"prompt_token_ids": [...]}, with "question_id" and '
    '"category" if there are any'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One conversation to be measured on: what a user says in each turn, or a prompt that is complete."""

    id: str
    category: str
    """"" where the set has none."""
    turns: tuple[str, ...] = ()
    """What the user says; the answers in between are the model's own."""
    prompt: Any = None
    """A prompt in place of turns: chat messages, or `{"prompt_token_ids": [...]}`."""

    @property
    def num_turns(self) -> int:
        """Answers that can be measured."""
        return len(self.turns) if self.prompt is None else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Questions under a name."""

    name: str
    questions: tuple[Question, ...]

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the questions: two sets with the same digest ask the same in the same order."""
        content = [[q.id, q.category, list(q.turns), q.prompt] for q in self.questions]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def select(self, count: int | None, categories: Sequence[str] = ()) -> "Dataset":
        """A part of the set.

        Args:
          count: so many questions at most, taken evenly from the beginning to the end of the set so that every category is there
            in its share; None takes all.
          categories: only questions of these categories; all if empty.

        Raises:
          EvaluationError: a category that the set does not have.
        """
        known = list(dict.fromkeys(question.category for question in self.questions))
        if unknown := [name for name in categories if name not in known]:
            raise EvaluationError(
                f"dataset {self.name} has no category {unknown[0]!r}; it has {', '.join(map(repr, known))}"
            )
        kept = [question for question in self.questions if not categories or question.category in categories]
        if count is not None and count < len(kept):
            kept = [kept[i * len(kept) // count] for i in range(count)]
        return dataclasses.replace(self, questions=tuple(kept))


def find_datasets(names: Sequence[str], paths: Sequence[str | Path] = ()) -> list[Dataset]:
    """Finds evaluation sets by name and by path.

    Args:
      names: names of sets. One that `paths` has a file for (`NAME.jsonl` or `NAME.jsonl.gz`, given itself or in a folder) is
        read from there, a shipped one otherwise from the package. "custom" stands for the files of `paths`, "hf" (vLLM's
        word) for the name in `paths`. Without names the files of `paths` are the sets; without both it is mt_bench.
      paths: JSONL files, folders of them, or, with "hf", names of sets on the model hub that are shipped here (`ALIASES`).

    Raises:
      EvaluationError: a set that is not found, or a file that cannot be read; the message says what would be right.
    """
    if list(names) == ["hf"]:
        names, paths = [_shipped_name(str(path)) for path in paths], []
        if not names:
            raise EvaluationError("dataset 'hf' needs a dataset path, such as philschmid/mt-bench")
    files, folders = [], []
    for path in map(Path, paths):
        if path.is_dir():
            folders.append(path)
        elif path.is_file():
            files.append(path)
        elif str(path) in ALIASES:
            names = [*names, ALIASES[str(path)]]
        else:
            raise EvaluationError(f"dataset path {path} does not exist")
    if not names:
        names = ["custom"] if paths else ["mt_bench"]
    found: dict[str, Dataset] = {}
    for name in names:
        if name == "custom":
            if not files:
                raise EvaluationError(
                    "dataset 'custom' needs a file as dataset path"
                    + (f", but {folders[0]} is a folder" if folders else "")
                )
            for file in files:
                found[_stem(file)] = read_dataset(file)
        else:
            name = ALIASES.get(name, name)
            found[name] = _find(name, files, folders)
    return list(found.values())


def read_dataset(path: Path, name: str | None = None) -> Dataset:
    """Reads a `.jsonl` or `.jsonl.gz` file with one question a line (`FORMS`).

    Raises:
      EvaluationError: it cannot be read, holds no question, holds two of the same id, or a line of it is no question.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise EvaluationError(f"dataset {path} cannot be read: {error}") from error
    return _parse(_stem(path) if name is None else name, str(path), text)


def _shipped_name(path: str) -> str:
    name = ALIASES.get(path, path)
    if name not in SHIPPED:
        raise EvaluationError(
            f"dataset path {path!r} is not shipped, and nothing is fetched from the model hub; known are {', '.join(ALIASES)}. "
            "Write its prompts into a JSONL file and give that as dataset path"
        )
    return name


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


def _find(name: str, files: Sequence[Path], folders: Sequence[Path]) -> Dataset:
    candidates = [file for file in files if _stem(file) == name]
    candidates += [folder / f"{name}{ending}" for folder in folders for ending in (".jsonl", ".jsonl.gz")]
    for path in candidates:
        if path.is_file():
            return read_dataset(path, name)
    if name in SHIPPED:
        data = resources.files("eagle_jax.evaluation").joinpath("data", f"{name}.jsonl.gz").read_bytes()
        return _parse(name, name, gzip.decompress(data).decode("utf-8"))
    if name in KNOWN:
        raise EvaluationError(
            f"dataset {name!r} does not come with the package, because its licence does not allow it; give its file "
            f"{name}.jsonl, or a folder that holds it, as dataset path"
        )
    raise EvaluationError(
        f"dataset {name!r} is unknown; shipped are {', '.join(SHIPPED)}, others are files given as dataset path"
    )


def _parse(name: str, where: str, text: str) -> Dataset:
    questions: list[Question] = []
    # Not splitlines(): a prompt may hold one of the rarer separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            questions.append(_parse_line(f"{where}, line {number}", line, len(questions)))
    if not questions:
        raise EvaluationError(f"dataset {where} holds no question")
    ids = [question.id for question in questions]
    if len(set(ids)) < len(ids):
        twice = next(id_ for id_ in ids if ids.count(id_) > 1)
        raise EvaluationError(f"dataset {where} has the question_id {twice} twice")
    return Dataset(name=name, questions=tuple(questions))


def _parse_line(where: str, line: str, index: int) -> Question:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise EvaluationError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise EvaluationError(f"{where} is no question: it must be {FORMS}")
    keys = [key for key in ("turns", "prompt", "messages", "prompt_token_ids") if key in value]
    if len(keys) != 1:
        raise EvaluationError(f"{where} has {' and '.join(keys) or 'no prompt'}; a line must be {FORMS}")
    id_, category = str(value.get("question_id", index)), str(value.get("category") or "")
    given = value[keys[0]]
    if keys[0] == "prompt":
        given = [given]
    if keys[0] in ("turns", "prompt"):
        if not (isinstance(given, list) and given and all(isinstance(turn, str) and turn for turn in given)):
            raise EvaluationError(f"{where}: {keys[0]} must hold text, got {value[keys[0]]!r}")
        return Question(id=id_, category=category, turns=tuple(given))
    if not (isinstance(given, list) and given):
        raise EvaluationError(f"{where}: {keys[0]} must be a list that is not empty, got {given!r}")
    prompt = given if keys[0] == "messages" else {"prompt_token_ids": given}
    return Question(id=id_, category=category, prompt=prompt)
