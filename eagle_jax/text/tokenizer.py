"""`Tokenizer`: text to token ids and back, and chats to prompts."""

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import tokenizers

from eagle_jax.text.chat_template import render_chat_template
from eagle_jax.text.folder import read_tokenizer_folder
from eagle_jax.text.gguf_tokenizer import read_gguf_tokenizer


class Tokenizer:
    """A `tokenizers.Tokenizer` that knows its special tokens and its chat template.

    Args:
        backend: the tokenizer proper. Truncation and padding are switched off in it: a prompt is never cut unseen.
        special_tokens: text of the special tokens by their Hugging Face name: "bos_token", "eos_token", "pad_token",
            "unk_token", ... Chat templates read them under these names.
        chat_template: Jinja source, or None for a model without one.

    Raises:
        ValueError: one of `special_tokens` is not a token of `backend`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        ids = {name: backend.token_to_id(text) for name, text in self._special_tokens.items()}
        for name, id_ in ids.items():
            if id_ is None:
                raise ValueError(f"{name} is {self._special_tokens[name]!r}, which is not in the vocabulary")
        self.bos_token_id: int | None = ids.get("bos_token")
        self.eos_token_id: int | None = ids.get("eos_token")
        self.pad_token_id: int | None = ids.get("pad_token")

    @classmethod
    def from_folder(cls, path: str | PathLike[str]) -> "Tokenizer | None":
        """Reads the tokenizer of a Hugging Face model folder; None if the folder holds no tokenizer.

        Reads `tokenizer.json`, and where present `tokenizer_config.json`, `special_tokens_map.json` and
        `chat_template.jinja` or `chat_template.json`.

        Raises:
            FileNotFoundError, NotADirectoryError: `path` is no folder.
            ValueError: the tokenizer is in a format that must be converted first, or a file does not hold what its
                name promises. The message names the file.
        """
        files = read_tokenizer_folder(path)
        if files is None:
            return None
        return cls(files.backend, special_tokens=files.special_tokens, chat_template=files.chat_template)

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Builds the tokenizer that the metadata of a GGUF file describes.

        Args:
            metadata: GGUF keys ("tokenizer.ggml.model", "tokenizer.ggml.tokens", ...) to plain Python values. Keys
                that do not concern the tokenizer are not looked at.

        Raises:
            ValueError: a key is missing or malformed, or the kind of tokenizer is not supported.
        """
        backend, special_tokens = read_gguf_tokenizer(metadata)
        return cls(backend, special_tokens=special_tokens, chat_template=metadata.get("tokenizer.chat_template"))

    def __repr__(self) -> str:
        chat = "a chat template" if self.chat_template is not None else "no chat template"
        return f"Tokenizer({self.vocab_size} ids, {self._special_tokens}, {chat})"

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The wrapped `tokenizers.Tokenizer`."""
        return self._backend

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Text of the special tokens by name; a copy."""
        return dict(self._special_tokens)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included. The embedding of a model may have more rows."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @functools.cached_property
    def adds_bos_token(self) -> bool:
        """Whether `encode` puts BOS in front of a text by default."""
        return self.bos_token_id is not None and self._backend.encode("").ids[:1] == [self.bos_token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written out in the text become their ids.

        Args:
            text: any text; the empty one gives [] or only the tokens that are added.
            add_special_tokens: whether to add what the model expects around a text, usually BOS. A text that starts
                with BOS, such as a rendered chat, is not given a second one; Hugging Face would add it.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {type(text).__name__}")
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self.adds_bos_token and ids[1:2] == [self.bos_token_id]:
            return ids[1:]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids past the vocabulary, which padded embeddings allow, have no text.

        Bytes that are not UTF-8 become U+FFFD. Spaces are never "cleaned up": the text is what the ids say.

        Raises:
            ValueError: an id is negative.
            TypeError: an id is not an integer.
        """
        ids = [operator.index(id_) for id_ in ids]
        if ids and min(ids) < 0:
            raise ValueError(f"ids must be >= 0, got {min(ids)}")
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation as text; see `render_chat_template` for the arguments and errors.

        Raises:
            ValueError: the tokenizer has no chat template.
        """
        if self.chat_template is None:
            raise ValueError("the tokenizer has no chat template: set `chat_template`, or pass a prompt without roles")
        return render_chat_template(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self._special_tokens,
            template_variables=template_variables,
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation. The template alone decides about BOS; none is added to what it writes."""
        text = self.render_chat(messages, add_generation_prompt, template_variables)
        return self.encode(text, add_special_tokens=False)
