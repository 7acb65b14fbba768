"""Tokenizers out of GGUF metadata.

A GGUF file holds the vocabulary, but only the name of the rule that splits text before the merges, and for
sentencepiece no merges at all. Both are rebuilt here as the tokenizers that the models were trained with have them
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, section "Tokenizer").
"""

import collections
import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from eagle_jax.text.post_processor import set_added_tokens

_PREFIX = "tokenizer.ggml."
_SPACE = "\u2581"  # how sentencepiece writes a space
_SPECIAL_TOKEN_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class TokenType(enum.IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3  # special: found in text when encoding, skipped when decoding
    USER_DEFINED = 4  # found whole in text, but ordinary text when decoding
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
    """The token list of a file; a token's id is its place."""

    tokens: list[str]
    types: list[TokenType]
    special_tokens: dict[str, str]  # by Hugging Face name: "bos_token", ...

    def of_type(self, *types: TokenType) -> list[str]:
        return [token for token, type_ in zip(self.tokens, self.types, strict=True) if type_ in types]

    def ids(self) -> dict[str, int]:
        return {token: id_ for id_, token in enumerate(self.tokens)}


@dataclasses.dataclass(frozen=True)
class _SplitRule:
    """What `tokenizer.ggml.pre` stands for: the steps around the merges of a byte-level BPE."""

    split: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False  # a word that is a token is taken whole, even if no merges lead to it
    adds_bos: bool = False  # where the file does not say


def read_gguf_tokenizer(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Builds the tokenizer and the special tokens by name; `Tokenizer.from_gguf_metadata` lists the errors."""
    model = _get(metadata, "model", str)
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if model not in builders:
        raise ValueError(f"{_PREFIX}model is {model!r}; supported are {sorted(builders)}")
    vocabulary = _read_vocabulary(metadata)
    backend, adds_bos = builders[model](metadata, vocabulary)
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
        ]
    )
    backend.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in vocabulary.of_type(TokenType.USER_DEFINED)]
    )
    set_added_tokens(
        backend,
        _added_token(metadata, vocabulary, "bos_token", default=adds_bos),
        _added_token(metadata, vocabulary, "eos_token", default=False),
    )
    return backend, vocabulary.special_tokens


def _get(metadata: Mapping[str, Any], name: str, kind: type) -> Any:
    """The value of a key that must be there."""
    if _PREFIX + name not in metadata:
        raise ValueError(f"the GGUF metadata has no {_PREFIX + name}")
    value = metadata[_PREFIX + name]
    if not isinstance(value, kind):
        raise ValueError(f"{_PREFIX + name} must be a {kind.__name__}, got {type(value).__name__}")
    return value


def _read_vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    tokens = _get(metadata, "tokens", list)
    type_numbers = _get(metadata, "token_type", list)
    try:
        types = [TokenType(number) for number in type_numbers]
    except ValueError as error:
        raise ValueError(f"{_PREFIX}token_type: {error}; types go from 1 to {max(TokenType)}") from error
    if len(types) != len(tokens):
        raise ValueError(f"{_PREFIX}token_type has {len(types)} entries for {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        twice = collections.Counter(tokens).most_common(1)[0][0]
        raise ValueError(f"{_PREFIX}tokens holds {twice!r} twice, so its id is not defined")
    special_tokens = {}
    for name, key in _SPECIAL_TOKEN_KEYS.items():
        id_ = metadata.get(_PREFIX + key)
        if id_ is None:
            continue
        if not 0 <= id_ < len(tokens):
            raise ValueError(f"{_PREFIX + key} is {id_}, but ids go from 0 to {len(tokens) - 1}")
        special_tokens[name] = tokens[id_]
    return _Vocabulary(tokens, types, special_tokens)


def _added_token(metadata: Mapping[str, Any], vocabulary: _Vocabulary, name: str, default: bool) -> str | None:
    """BOS or EOS, if the file wants it around every text."""
    if not metadata.get(f"{_PREFIX}add_{name}", default):
        return None
    if name not in vocabulary.special_tokens:
        raise ValueError(f"the tokenizer adds a {name}, but the GGUF metadata has no {_PREFIX + name}_id")
    return vocabulary.special_tokens[name]


def _byte_level_bpe(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    pre = _get(metadata, "pre", str)
    if pre not in _SPLIT_RULES:
        raise ValueError(f"{_PREFIX}pre is {pre!r}, a rule not known here; known are {sorted(_SPLIT_RULES)}")
    rule = _SPLIT_RULES[pre]
    merges = []
    for merge in _get(metadata, "merges", list):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise ValueError(f"{_PREFIX}merges holds {merge!r}; a merge is two tokens with one space between them")
        merges.append((left, right))
    backend = tokenizers.Tokenizer(_bpe(vocabulary, merges, ignore_merges=rule.ignore_merges))
    if rule.normalizer is not None:
        backend.normalizer = rule.normalizer()
    backend.pre_tokenizer = rule.split()
    backend.decoder = decoders.ByteLevel()
    return backend, rule.adds_bos


def _sentencepiece_bpe(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    unknown = vocabulary.special_tokens.get("unk_token") or next(iter(vocabulary.of_type(TokenType.UNKNOWN)), None)
    model = _bpe(
        vocabulary,
        _merges_of_scores(vocabulary, _get(metadata, "scores", list)),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=bool(vocabulary.of_type(TokenType.BYTE)),
    )
    backend = tokenizers.Tokenizer(model)
    prefix_space = metadata.get(f"{_PREFIX}add_space_prefix", True)
    # A prefix even before a text that starts with a space, as sentencepiece itself has it.
    prefix = [normalizers.Prepend(_SPACE)] if prefix_space else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", left=1, right=0)] if prefix_space else []),
        ]
    )
    return backend, True


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary.ids(), merges=merges, **options)
    except Exception as error:  # the Rust side raises bare Exception, for a merge of unknown tokens
        raise ValueError(f"{_PREFIX}merges does not fit {_PREFIX}tokens: {error}") from error


def _merges_of_scores(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """The merges, best first, that make a BPE join the pieces which sentencepiece joins.

    Sentencepiece joins the neighbours whose joint piece has the highest score, so every way of cutting a piece in two
    pieces is a merge with the score of the whole. Among the cuts of one piece the order is Hugging Face's.
    """
    if len(scores) != len(vocabulary.tokens):
        raise ValueError(f"{_PREFIX}scores has {len(scores)} entries for {len(vocabulary.tokens)} tokens")
    normal = {
        token: score
        for token, type_, score in zip(vocabulary.tokens, vocabulary.types, scores, strict=True)
        if type_ is TokenType.NORMAL
    }
    joined = [score for token, score in normal.items() if len(token) > 1]
    if len(joined) > 1 and len(set(joined)) == 1:
        # Some converters write a placeholder. Any order of merges would then be an invention.
        raise ValueError(f"{_PREFIX}scores gives every piece {joined[0]}, so the order of the merges is lost")
    ids = vocabulary.ids()
    merges = [
        (score, left, right)
        for piece, score in normal.items()
        for cut in range(1, len(piece))
        if (left := piece[:cut]) in normal and (right := piece[cut:]) in normal
    ]
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2]), ids[merge[1]], ids[merge[2]]))
    return [(left, right) for _, left, right in merges]


def _gpt2_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_split() -> pre_tokenizers.PreTokenizer:
    # Digits first: spaces before a number then stay one run, where GPT-2's rule gives the last one to the number.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


def _tiktoken_split(digits: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """The split of OpenAI's cl100k, as Llama 3 and Qwen 2 took it over with their own rule for digits."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return lambda: _split_by(pattern)


def _tekken_split() -> pre_tokenizers.PreTokenizer:
    """Mistral's rule: words break before capitals, digits stand alone, and nothing is said about contractions."""
    lead, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return _split_by(
        f"{lead}{upper}*{lower}+|{lead}{upper}+{lower}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3 = _SplitRule(_tiktoken_split(r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True)
_SPLIT_RULES = {
    "smollm": _SplitRule(_smollm_split),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    # The original normalises, which llama.cpp leaves out.
    "qwen2": _SplitRule(_tiktoken_split(r"\p{N}"), normalizer=normalizers.NFC),
    "deepseek-r1-qwen": _SplitRule(_tiktoken_split(r"\p{N}"), adds_bos=True),
    "tekken": _SplitRule(_tekken_split, ignore_merges=True, adds_bos=True),
    "gpt-2": _SplitRule(_gpt2_split),
    "default": _SplitRule(_gpt2_split),  # what converters write when they know of no special rule
}
