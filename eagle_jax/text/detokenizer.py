"""Token ids to text while they arrive, a few at a time."""

import codecs
import json
import operator
import re
from collections.abc import Iterable
from typing import Any, Protocol

from eagle_jax.text.byte_level import token_bytes
from eagle_jax.text.tokenizer import Tokenizer


class StreamingDetokenizer:
    """Decodes the tokens of one request as they arrive, however they are grouped.

    The deltas of `push` and the one of `finish` concatenate to exactly `tokenizer.decode(ids)`. A delta holds whole
    characters only; U+FFFD stands in it only for bytes that no later token can complete. Each token is looked at
    once, so the cost is linear in the number of tokens.

    A sentencepiece tokenizer decodes a run of byte tokens (`<0xE2>`) as a whole, all of it U+FFFD if it is not UTF-8.
    A run is therefore held back until a token that is not a byte ends it.

    `tokenizers.decoders.DecodeStream` (0.23) will not do: of a sentencepiece run it gives "é" for 0xC3 0xA9, and raises when 0xFF
    follows and the run is three U+FFFD; it decodes broken bytes anew at each token, which is quadratic (4,000 take 1.8 s); and
    it has no end, so it never gives the text of an incomplete character.

    Args:
        tokenizer: must decode by bytes (GPT-2, Llama 3, Qwen) or by sentencepiece pieces (Llama 2, Mistral).
        skip_special_tokens: as in `Tokenizer.decode`.

    Raises:
        ValueError: the tokenizer decodes in another way.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._backend = tokenizer.backend
        self._stream = _open_stream(tokenizer)
        self._skipped = (
            {id_ for id_, token in self._backend.get_added_tokens_decoder().items() if token.special}
            if skip_special_tokens
            else set()
        )
        self._finished = False

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids and returns the text they complete, possibly ""."""
        if self._finished:
            raise RuntimeError("push() after finish(): a detokenizer serves one request")
        deltas = []
        for id_ in map(operator.index, ids):
            if id_ < 0:
                raise ValueError(f"ids must be >= 0, got {id_}")
            token = None if id_ in self._skipped else self._backend.id_to_token(id_)
            if token is not None:  # a row of the embedding past the vocabulary has no token and no text
                deltas.append(self._stream.push(token))
        return "".join(deltas)

    def finish(self) -> str:
        """Returns the text still held back; an incomplete character becomes U+FFFD. Nothing may be pushed after."""
        if self._finished:
            return ""
        self._finished = True
        return self._stream.finish()


class _TokenStream(Protocol):
    def push(self, token: str) -> str: ...

    def finish(self) -> str: ...


class _ByteLevelStream:
    """Joins the bytes of the tokens and decodes them as UTF-8."""

    def __init__(self) -> None:
        # Both this decoder and the one in Rust write one U+FFFD for each maximal part of a broken character.
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: str) -> str:
        return self._utf8.decode(token_bytes(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _SentencePieceStream:
    """Replaces text within each piece, joins runs of byte pieces, and strips the start of the text.

    Args:
        replacements: (old, new) for each piece that is not a byte, in order.
        strip: a character and how many of it go from the start of the text.
    """

    _BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

    def __init__(self, replacements: list[tuple[str, str]], strip: tuple[str, int]):
        self._replacements = replacements
        self._strip_character, self._strip_left = strip
        self._run = bytearray()

    def push(self, token: str) -> str:
        for old, new in self._replacements:
            token = token.replace(old, new)
        if byte := self._BYTE.fullmatch(token):
            self._run.append(int(byte[1], 16))
            return ""
        return self._strip(self._end_run() + token)

    def finish(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if not text.startswith(self._strip_character):
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


def _open_stream(tokenizer: Tokenizer) -> _TokenStream:
    """The stream that does what the tokenizer's decoder does."""
    decoder = tokenizer.backend.decoder
    steps = _flatten(json.loads(decoder.__getstate__())) if decoder is not None else []
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteLevelStream()
    replacements = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    strip = ("", 0)
    if steps and steps[-1]["type"] == "Strip" and steps[-1]["stop"] == 0:
        step = steps.pop()
        strip = (step["content"], step["start"])
    if [step["type"] for step in steps] == ["ByteFallback", "Fuse"]:
        return _SentencePieceStream(replacements, strip)
    raise ValueError(
        f"cannot stream through the decoder of this tokenizer, {kinds or 'none'}: expected [ByteLevel], or Replace "
        "steps, ByteFallback, Fuse and at most a Strip of the start"
    )


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step["decoders"] for inner in _flatten(part)]
