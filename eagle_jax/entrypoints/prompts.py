"""Prompts in every form a caller may give them, turned into token ids."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from eagle_jax.text import Tokenizer

FORMS = (
    "a prompt is a text, token ids, a list of chat messages {'role': ..., 'content': ...}, {'prompt': text} or "
    "{'prompt_token_ids': ids}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, checked."""

    text: str | None
    """None if it was given as ids."""
    token_ids: list[int]
    """At least one, each in the vocabulary."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptReader:
    """Turns prompts into token ids for one model."""

    tokenizer: Tokenizer | None
    vocab_size: int
    """Rows of the embedding: ids are below it."""
    chat: bool = False
    """Whether a text is the first message of a user rather than a text to be continued."""
    add_generation_prompt: bool = True
    """Whether a rendered chat ends with the opening of the assistant's answer."""
    template_variables: Mapping[str, Any] | None = None
    """Further variables of the chat template."""

    def read(self, prompts: Any) -> list[Prompt]:
        """Reads one prompt or several.

        Args:
          prompts: a prompt or a list of prompts (`FORMS`). A list of ids or of messages is one prompt. Ids may be an array.

        Raises:
          ValueError: an empty prompt, an id outside the vocabulary, or text where there is no tokenizer; names the prompt.
          TypeError: something that is no prompt.
        """
        prompts = _as_list(prompts)
        if not isinstance(prompts, list):
            prompts = [prompts]
        elif not prompts:
            raise ValueError(f"prompts is empty; {FORMS}")
        elif _is_id(prompts[0]) or _is_message(prompts[0]):
            prompts = [prompts]
        return [self._read_one(index, _as_list(prompt)) for index, prompt in enumerate(prompts)]

    def _read_one(self, index: int, prompt: Any) -> Prompt:
        where = f"prompt {index}"
        if isinstance(prompt, Mapping) and not _is_message(prompt):
            if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
                raise ValueError(f"{where} is a mapping with the keys {sorted(map(str, prompt))}; {FORMS}")
            (key, prompt), *_ = prompt.items()
            prompt = _as_list(prompt)
            if not isinstance(prompt, str if key == "prompt" else list):
                raise TypeError(f"{where} has a {type(prompt).__name__} as {key!r}; {FORMS}")
        if isinstance(prompt, str):
            return self._read_text(where, prompt)
        if isinstance(prompt, list):
            if not prompt:
                raise ValueError(f"{where} is empty")
            if _is_message(prompt[0]):
                return self._read_chat(where, prompt)
            return Prompt(text=None, token_ids=self._checked(where, prompt, given=True))
        raise TypeError(f"{where} is of type {type(prompt).__name__}; {FORMS}")

    def _read_text(self, where: str, text: str) -> Prompt:
        if not text:
            raise ValueError(f"{where} is empty")
        if self.chat:
            return self._read_chat(where, [{"role": "user", "content": text}])
        return Prompt(text=text, token_ids=self._checked(where, self._tokenizer(where).encode(text)))

    def _read_chat(self, where: str, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        if not all(_is_message(message) for message in messages):
            raise TypeError(f"{where} mixes chat messages with something else; {FORMS}")
        tokenizer = self._tokenizer(where)
        text = tokenizer.render_chat(messages, self.add_generation_prompt, self.template_variables)
        # The template alone decides about BOS.
        return Prompt(text=text, token_ids=self._checked(where, tokenizer.encode(text, add_special_tokens=False)))

    def _tokenizer(self, where: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{where} is text, but the target has no tokenizer; give {{'prompt_token_ids': [...]}}")
        return self.tokenizer

    def _checked(self, where: str, ids: Sequence[Any], given: bool = False) -> list[int]:
        if not ids:
            raise ValueError(f"{where} is empty: its text has no tokens")
        for id_ in ids:
            if given and not _is_id(id_):
                raise TypeError(f"{where} has {id_!r} among its token ids; {FORMS}")
            if not 0 <= id_ < self.vocab_size:
                origin = "" if given else ", which its tokenizer gave"
                raise ValueError(
                    f"{where} has the token id {id_}{origin}; ids of this model are 0 to {self.vocab_size - 1}"
                )
        return [int(id_) for id_ in ids]


def _as_list(value: Any) -> Any:
    if isinstance(value, np.ndarray | jax.Array):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _is_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value
