import json

import pytest
import tokenizers
import transformers
from small_tokenizers import sentencepiece_metadata
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from eagle_jax.text import Tokenizer

CORPUS = [
    "x =  42;  y = 1234 + 5678;\n\n  if (x) { return  12345; }\n",
    "I'M here, they're there, it's 100 % 2000 ² ½ ٣٤   7 \t 88",
    "naïve café ÀÉ e\u0301 日本語 한국어 😀😀👩‍👩‍👧 \r\n\r\n   end ",
] * 8
TEXTS = [
    *CORPUS[:3],
    "",
    " ",
    "     ",
    "  5",
    "a   12345",
    " ²",
    "tab\t\t9\n\n\n 10",
    "I'LL don'T",
    "<|a|>x<|b|>  <|a|>",
    "pre<tool>post <tool>  1",
    "e\u0301 \u00e9",
    "camelCase HTTPServer don't DON'T ÉTÉ été //\n/x",
]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def by_pattern(digits, pattern=SPLIT):
    split = pre_tokenizers.Split(Regex(pattern.replace("DIGITS", digits)), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# What the original tokenizer.json of each family says.
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
ORIGINAL = {
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "gpt-2": GPT2,
    "default": GPT2,
    "llama-bpe": by_pattern(r"\p{N}{1,3}"),
    "llama3": by_pattern(r"\p{N}{1,3}"),
    "qwen2": by_pattern(r"\p{N}"),
    "deepseek-r1-qwen": by_pattern(r"\p{N}"),
    "tekken": by_pattern("", TEKKEN),
}


def original_tokenizer(pre) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=pre.startswith("llama") or pre == "tekken"))
    backend.pre_tokenizer = ORIGINAL[pre]
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|a|>", "<|b|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Learned with GPT-2's splits, so that pieces exist which the other rules must not reach.
    split, backend.pre_tokenizer = backend.pre_tokenizer, GPT2
    backend.train_from_iterator(CORPUS, trainer)
    backend.pre_tokenizer = split
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return backend


def metadata_of(backend, pre_name, **changes):
    vocab = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    types = {"<|a|>": 3, "<|b|>": 3, "<tool>": 4}
    metadata = {
        "model": "gpt2",
        "pre": pre_name,
        "tokens": [token for token, _ in vocab],
        "token_type": [types.get(token, 1) for token, _ in vocab],
        "merges": [" ".join(merge) for merge in json.loads(backend.to_str())["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


@pytest.mark.parametrize("pre", ORIGINAL)
def test_byte_level_ids_are_those_of_the_original(pre):
    original = original_tokenizer(pre)
    tokenizer = Tokenizer.from_gguf_metadata(metadata_of(original, pre))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == original.encode(text).ids, text
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == original.decode(ids, skip_special_tokens=skip)


def test_split_rules_differ_where_they_should():
    original = original_tokenizer("gpt-2")
    pieces = {}
    for pre in ORIGINAL:
        backend = Tokenizer.from_gguf_metadata(metadata_of(original, pre)).backend
        pieces[pre] = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a  1234")]
    assert pieces["smollm"] == ["a", "ĠĠ", "1", "2", "3", "4"]
    assert pieces["gpt-2"] == ["a", "Ġ", "Ġ1234"]
    assert pieces["llama3"] == ["a", "Ġ", "Ġ", "123", "4"]
    assert pieces["qwen2"] == ["a", "Ġ", "Ġ", "1", "2", "3", "4"]
    assert pieces["tekken"] == pieces["deepseek-r1-qwen"] == pieces["qwen2"]
    for pre, words in (("tekken", ["camel", "Case", "Ġdon", "'t"]), ("qwen2", ["camelCase", "Ġdon", "'t"])):
        backend = Tokenizer.from_gguf_metadata(metadata_of(original, pre)).backend
        assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("camelCase don't")] == words


def test_llama3_takes_a_word_that_is_a_token_whole():
    pieces = {}
    for pre in ("llama3", "smollm"):
        metadata = metadata_of(original_tokenizer(pre), pre)
        metadata["tokenizer.ggml.tokens"].append("Ġzqxj")  # no merges lead to it
        metadata["tokenizer.ggml.token_type"].append(1)
        pieces[pre] = pieces_of(Tokenizer.from_gguf_metadata(metadata), "a zqxj")
    assert pieces == {"llama3": ["a", "Ġzqxj"], "smollm": ["a", "Ġ", "z", "q", "x", "j"]}


def test_control_tokens_are_special_and_user_defined_ones_are_text():
    tokenizer = Tokenizer.from_gguf_metadata(metadata_of(original_tokenizer("smollm"), "smollm"))
    ids = tokenizer.encode("x<|a|><tool>")
    assert ids[1:] == [0, tokenizer.vocab_size - 1]
    assert tokenizer.decode(ids) == "x<tool>"


@pytest.mark.parametrize(
    ("pre", "flag", "bos"),
    [
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama3", None, True),
        ("llama-bpe", False, False),
        ("tekken", None, True),
    ],
)
def test_bos_follows_the_file_and_else_the_family(pre, flag, bos):
    metadata = metadata_of(original_tokenizer(pre), pre, add_bos_token=flag)
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert tokenizer.adds_bos_token is bos
    assert (tokenizer.encode("x")[0] == 0) is bos
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, None)


def test_eos_and_chat_template_are_read():
    metadata = metadata_of(original_tokenizer("smollm"), "smollm", add_eos_token=True, padding_token_id=1)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert tokenizer.encode("x")[-1] == tokenizer.pad_token_id == 1
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<|a|>hi"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"tokenizer.ggml.model is 'bert'; supported are \['gpt2', 'llama'\]"),
        ({"model": None}, "no tokenizer.ggml.model"),
        ({"pre": "viking"}, "tokenizer.ggml.pre is 'viking'.*known are .*'smollm'"),
        ({"pre": None}, "no tokenizer.ggml.pre"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens must be a list, got str"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges holds 'ab'"),
        ({"merges": ["zz qq"]}, "tokenizer.ggml.merges does not fit tokenizer.ggml.tokens"),
        ({"token_type": [1, 2]}, "token_type has 2 entries for 369 tokens"),
        ({"token_type": [7] * 369}, "tokenizer.ggml.token_type: 7 is not a valid TokenType; types go from 1 to 6"),
        ({"token_type": None}, "^the GGUF metadata has no tokenizer.ggml.token_type$"),
        ({"bos_token_id": 369}, "bos_token_id is 369, but ids go from 0 to 368"),
        ({"bos_token_id": None, "add_bos_token": True}, "adds a bos_token, but .* no tokenizer.ggml.bos_token_id"),
    ],
)
def test_wrong_metadata_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf_metadata(metadata_of(original_tokenizer("smollm"), "smollm", **changes))


def test_token_that_stands_twice_is_refused():
    metadata = metadata_of(original_tokenizer("smollm"), "smollm")
    metadata["tokenizer.ggml.tokens"][-1] = "!"
    with pytest.raises(ValueError, match="holds '!' twice"):
        Tokenizer.from_gguf_metadata(metadata)


def pieces_of(tokenizer, text):
    return [tokenizer.backend.id_to_token(id_) for id_ in tokenizer.encode(text, add_special_tokens=False)]


def test_sentencepiece_joins_by_score(sentencepiece):
    # "an" has a better score than "▁a", which would lead away from "▁and".
    assert pieces_of(sentencepiece, "the and") == ["▁the", "▁and"]
    assert pieces_of(sentencepiece, "then") == ["▁the", "n"]
    assert pieces_of(sentencepiece, "  a") == ["▁▁", "▁a"]  # the prefix comes even before a space
    assert pieces_of(sentencepiece, "") == []


def test_sentencepiece_falls_back_to_bytes(sentencepiece):
    assert pieces_of(sentencepiece, "é\n😀") == ["▁", "é", "<0x0A>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    for text in TEXTS:
        if "<tool>" not in text:  # the text behind an added token gets a prefix space of its own
            assert sentencepiece.decode(sentencepiece.encode(text)) == text


def test_sentencepiece_without_byte_tokens_has_one_unknown_token_for_a_run():
    metadata = sentencepiece_metadata()
    kept = [id_ for id_, type_ in enumerate(metadata["tokenizer.ggml.token_type"]) if type_ != 6]
    for key in ("tokens", "token_type", "scores"):
        metadata[f"tokenizer.ggml.{key}"] = [metadata[f"tokenizer.ggml.{key}"][id_] for id_ in kept]
    assert pieces_of(Tokenizer.from_gguf_metadata(metadata), "a 日本 a") == ["▁a", "▁", "<unk>", "▁a"]


def test_sentencepiece_special_tokens(sentencepiece):
    assert sentencepiece.encode("a")[0] == sentencepiece.bos_token_id == 1
    assert pieces_of(sentencepiece, "a</s>a<tool>") == ["▁a", "</s>", "▁a", "<tool>"]
    assert sentencepiece.decode(sentencepiece.encode("a</s>b<tool>")) == "a b<tool>"


def test_sentencepiece_without_prefix_space():
    tokenizer = Tokenizer.from_gguf_metadata(
        {**sentencepiece_metadata(), "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    )
    assert pieces_of(tokenizer, "the the") == ["t", "he", "▁the"]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_sentencepiece_ids_are_those_of_transformers(sentencepiece):
    metadata = sentencepiece_metadata()
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    merges = transformers.tokenization_utils_base.generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    theirs = transformers.LlamaTokenizer(vocab=vocab, merges=merges)
    # Texts that start with a space are left out: transformers gives those no prefix, sentencepiece does.
    for text in ("the and an hand", "band  thean   the", "a\n\nthe é 日本語 😀."):
        assert sentencepiece.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


def test_placeholder_scores_are_refused():
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.scores"] = [-1000.0] * len(metadata["tokenizer.ggml.tokens"])
    with pytest.raises(ValueError, match=r"gives every piece -1000.0, so the order of the merges is lost"):
        Tokenizer.from_gguf_metadata(metadata)
    metadata["tokenizer.ggml.scores"] = [0.0]
    with pytest.raises(ValueError, match="scores has 1 entries for"):
        Tokenizer.from_gguf_metadata(metadata)
