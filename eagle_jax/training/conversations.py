"""Conversations as training reads them: token ids, and which of them the assistant wrote."""

import dataclasses
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.text.tokenizer import Tokenizer

SHARD_PATTERN = "shard-*.npz"


class DataError(ValueError):
    """Training data that cannot be used; the message names the sample."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One tokenised conversation."""

    tokens: np.ndarray
    """Token ids, int32 `[T]`."""
    assistant: np.ndarray
    """Tokens that the assistant wrote, the one that ends its turn included, bool `[T]`."""
    name: str
    """Where it comes from, for messages."""
    temperature: float | None = None
    """That its answer was sampled at, 0 for greedy; None if it is not known."""

    def check(self, vocab_size: int) -> None:
        """Raises `DataError` if it cannot be trained on."""
        if len(self.tokens) != len(self.assistant):
            raise DataError(f"{self.name}: {len(self.tokens)} tokens, but a mask of {len(self.assistant)}")
        if not self.assistant.any():
            raise DataError(
                f"{self.name}: the assistant mask is all zero, so there is nothing to learn from it; is the answer missing, or "
                "does the chat template not mark the assistant's turn?"
            )
        low, high = int(self.tokens.min()), int(self.tokens.max())
        if low < 0 or high >= vocab_size:
            raise DataError(
                f"{self.name}: token id {low if low < 0 else high} is not one of the target's ids 0 to {vocab_size - 1}; was it "
                "made with another tokenizer?"
            )


def encode_conversation(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, eos_ids: Sequence[int], name: str
) -> Conversation:
    """Tokenises a chat and marks the assistant's tokens.

    Each answer is tokenised apart from what comes before it, as in decoding, where the prompt is tokenised alone. It ends with
    its end-of-sequence token, if the template writes one.

    Args:
      tokenizer: of the target, with a chat template.
      messages: the chat, with at least one message of role "assistant".
      eos_ids: ids that end an answer.
      name: of the sample, for messages.

    Raises:
      DataError: the template refuses the chat, or does not continue its own prompt when an answer is added (some leave out
        earlier reasoning, or write another header), so that the assistant's part cannot be told.
    """
    text, tokens, assistant = "", [], []
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        try:
            if not index:
                raise ValueError("the first message is the assistant's")
            prompt = tokenizer.render_chat(messages[:index])
            full = tokenizer.render_chat(messages[: index + 1], add_generation_prompt=False)
        except (ValueError, TypeError) as error:
            raise DataError(f"{name}: {error}") from error
        if not prompt.startswith(text) or not full.startswith(prompt):
            kept, shown = (text, prompt) if not prompt.startswith(text) else (prompt, full)
            at = next(
                (i for i, (a, b) in enumerate(zip(kept, shown, strict=False)) if a != b), min(len(kept), len(shown))
            )
            raise DataError(
                f"{name}: the chat template does not match: with message {index} it writes {shown[at : at + 40]!r} where it "
                f"wrote {kept[at : at + 40]!r} before, so the assistant's part cannot be told"
            )
        question = tokenizer.encode(prompt[len(text) :], add_special_tokens=False)
        answer = tokenizer.encode(full[len(prompt) :], add_special_tokens=False)
        end = next((i + 1 for i, id_ in enumerate(answer) if id_ in eos_ids), len(answer))
        tokens += question + answer
        assistant += [False] * len(question) + [True] * end + [False] * (len(answer) - end)
        text = full
    if not tokens:
        raise DataError(f"{name}: no message has the role 'assistant'; the roles are {_roles(messages)}")
    return Conversation(np.array(tokens, np.int32), np.array(assistant, bool), name)


def read_json_lines(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a `.jsonl` or `.jsonl.gz` file, each with its name "file line 3".

    Raises:
      DataError: the file is absent or empty, or a line is no JSON object.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"no such file: {file}")
    found = False
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            name = f"{file.name} line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{name}: not valid JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{name}: must be a JSON object, not {type(row).__name__}")
            found = True
            yield name, row
    if not found:
        raise DataError(f"{file} is empty")


def read_messages(row: Mapping[str, Any], name: str) -> list[dict[str, str]]:
    """The chat of a line: `messages` of role and content, or `conversations` of from ("human", "gpt") and value."""
    if isinstance(row.get("messages"), list):
        messages = row["messages"]
    elif isinstance(row.get("conversations"), list):
        roles = {"human": "user", "gpt": "assistant"}
        messages = [
            {"role": roles.get(m.get("from", ""), m.get("from")), "content": m.get("value")}
            if isinstance(m, dict) and "from" in m
            else m
            for m in row["conversations"]
        ]
    else:
        raise DataError(f"{name}: needs `messages` or `conversations`, a list; its keys are {sorted(row)}")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise DataError(f"{name}: a message must have a role and a content, both texts, got {message!r}")
    return messages


def read_conversations(
    paths: Sequence[str | Path], *, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int]
) -> list[Conversation]:
    """Reads training data: folders that `eagle-jax synthesize` wrote, and files of chats, one JSON object a line.

    Raises:
      DataError: a file that is absent or empty, or a sample that cannot be used, by its name.
    """
    out: list[Conversation] = []
    for path in map(Path, paths):
        if path.is_dir():
            read: Iterable[Conversation] = read_shards(path)
        else:
            if tokenizer is None:
                raise DataError(f"{path} holds texts, but the target has no tokenizer; give a folder of shards")
            read = (
                encode_conversation(tokenizer, read_messages(row, name), eos_ids=eos_ids, name=name)
                for name, row in read_json_lines(path)
            )
        for conversation in read:
            conversation.check(vocab_size)
            out.append(conversation)
    if not out:
        raise DataError("no training data was given")
    return out


def write_shard(path: Path, conversations: Sequence[Conversation], **columns: np.ndarray) -> None:
    """Writes conversations to one file, which appears only when it is complete.

    Args:
      path: an `.npz` file.
      conversations: what to write; names are not kept.
      columns: further arrays with one entry a conversation.
    """
    tokens = np.concatenate([c.tokens for c in conversations])
    small = tokens.max(initial=0) < 2**16
    unknown = float("nan")
    arrays = {
        "tokens": tokens.astype(np.uint16 if small else np.uint32),
        "assistant": np.packbits(np.concatenate([c.assistant for c in conversations])),
        "lengths": np.array([len(c.tokens) for c in conversations], np.int32),
        "temperature": np.array(
            [unknown if c.temperature is None else c.temperature for c in conversations], np.float32
        ),
        **columns,
    }
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_shards(folder: Path) -> Iterator[Conversation]:
    """The conversations of a folder of shards, in a fixed order.

    Raises:
      DataError: there is none, or a file cannot be read.
    """
    files = sorted(folder.glob(SHARD_PATTERN))
    if not files:
        raise DataError(f"{folder} has no {SHARD_PATTERN}: it is not what `eagle-jax synthesize` writes")
    for file in files:
        arrays = read_shard(file)
        ends = np.cumsum(arrays["lengths"], dtype=np.int64)
        tokens = arrays["tokens"].astype(np.int32)
        assistant = np.unpackbits(arrays["assistant"], count=len(tokens)).astype(bool)
        starts = ends - arrays["lengths"]
        for row, (start, end, heat) in enumerate(zip(starts, ends, arrays["temperature"], strict=True)):
            yield Conversation(
                tokens[start:end],
                assistant[start:end],
                f"{file.name} row {row}",
                None if np.isnan(heat) else float(heat),
            )


def read_shard(file: Path) -> dict[str, np.ndarray]:
    """The arrays of one shard.

    Raises:
      DataError: the file cannot be read.
    """
    try:
        with np.load(file) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{file} is not a shard of conversations: {error}") from error


def _roles(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({str(message.get("role")) for message in messages})
