"""A tokenizer of 512 ids for the golden models, whose every id is readable text, and some pieces of multi-byte characters."""

import itertools
import string

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from eagle_jax.text import Tokenizer
from eagle_jax.text.byte_level import token_bytes

SPECIAL = ["<pad>", "<bos>", "<eos>"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}a {% endif %}"
)
FIRST_PIECE = 500
PIECES = [
    b"\xe6",
    b"\x97\xa5",
    b"\xe6\x97",
    b"\xa5!",
    b"\xc3",
    b"\xa9",
    b"\xf0\x9f",
    b"\x98\x80",
    b"ab\xe6",
    b"\xff",
    b"\x80",
    b"z\xc3",
]
"""Ids from `FIRST_PIECE` on: parts of the characters of "日 é 😀", and bytes that belong to no character."""


def letters_tokenizer() -> Tokenizer:
    """Ids 0-2 are special, 3-29 letters and the blank, 30-499 syllables of two to four letters, the rest `PIECES`."""
    spelled = {token_bytes(letter): letter for letter in pre_tokenizers.ByteLevel.alphabet()}
    syllables = ("".join(pair) for pair in itertools.product(string.ascii_lowercase, "aeiou"))
    words = [*string.ascii_lowercase, " ", *itertools.islice(syllables, 130)]
    longer = [
        "".join(parts) for parts in itertools.product("bdgklmnprst", "aeiou", ("n", "st", "é", " ", "日", "rk", ","))
    ]
    words += longer[: FIRST_PIECE - len(SPECIAL) - len(words)]
    texts = [word.encode() for word in words] + PIECES
    assert len(set(texts)) == len(texts) == 512 - len(SPECIAL)
    vocabulary = {name: index for index, name in enumerate(SPECIAL)}
    for index, text in enumerate(texts, start=len(SPECIAL)):
        vocabulary["".join(spelled[bytes([byte])] for byte in text)] = index
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return Tokenizer(backend, special_tokens=special, chat_template=TEMPLATE)
