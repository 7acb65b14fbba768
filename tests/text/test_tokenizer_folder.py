import json
import subprocess
import sys

import pytest
import transformers
from small_tokenizers import SPECIAL, byte_level_backend, write_folder

from eagle_jax.text import Tokenizer

CONFIG = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>", "chat_template": "in config"}
TEXTS = ["", "the quick brown fox", "naïve naïf two words", "日本語 😀\n\n\t  x", "a<|end|>b <|begin|>", "1234  5678"]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_those_of_transformers(tmp_path, text):
    write_folder(tmp_path, config={**CONFIG, "tokenizer_class": "PreTrainedTokenizerFast"})
    ours, theirs = Tokenizer.from_folder(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for add in (True, False):
        assert ours.encode(text, add_special_tokens=add) == theirs.encode(text, add_special_tokens=add)
    ids = theirs.encode(text)
    for skip in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip) == expected
    assert (ours.vocab_size, ours.chat_template) == (len(theirs), theirs.chat_template)
    ids = (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id)
    assert ids == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 1, 2)


def test_folder_without_tokenizer_is_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert Tokenizer.from_folder(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "qwen.tiktoken", "tekken.json"])
def test_vocabulary_that_must_be_converted_says_how(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=rf"has {name} but no tokenizer.json.*AutoTokenizer.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


def test_path_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        Tokenizer.from_folder(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="not a folder"):
        Tokenizer.from_folder(tmp_path / "file")


def test_tokenizer_json_alone_is_enough(tmp_path):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (None, None, None)
    assert tokenizer.chat_template is None
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"
    assert not tokenizer.adds_bos_token


def test_special_tokens_as_objects_and_in_the_map(tmp_path):
    config = {"bos_token": {"content": "<|begin|>", "lstrip": False}, "pad_token": None}
    special = {"bos_token": "<|end|>", "eos_token": {"content": "<|end|>"}, "pad_token": "<|pad|>"}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, config=config, special_tokens_map__json=special))
    # The configuration wins, its null included; the map fills what it does not mention. Id 0 is an id.
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, None)
    assert tokenizer.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pad_token": "[PAD]"}, r"pad_token in .* is '\[PAD\]', which is not in the vocabulary"),
        ({"eos_token": 2}, "eos_token in .* must be a string or an object with a string content, got 2"),
        ({"add_bos_token": True}, "sets add_bos_token but names no bos_token"),
        ({"add_bos_token": "yes"}, "add_bos_token in .* must be true or false, got 'yes'"),
        ({"chat_template": 1}, "chat_template in .* must be a string or a list, got int"),
        ({"chat_template": [{"name": "rag", "template": ""}]}, r"without a \"default\" entry: \['rag'\]"),
    ],
)
def test_wrong_configuration_is_refused(tmp_path, config, message):
    write_folder(tmp_path, config=config)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json is not a file that tokenizers .* can read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json must hold a JSON object, got list"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, message):
    write_folder(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_chat_template_files_win_over_the_configuration(tmp_path):
    write_folder(tmp_path, config=CONFIG)
    assert Tokenizer.from_folder(tmp_path).chat_template == "in config"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "in json"}))
    assert Tokenizer.from_folder(tmp_path).chat_template == "in json"
    (tmp_path / "chat_template.jinja").write_text("in jinja é", encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).chat_template == "in jinja é"


def test_default_of_several_chat_templates_is_taken(tmp_path):
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, config={"chat_template": templates}))
    assert tokenizer.chat_template == "plain"


@pytest.mark.parametrize("in_json", [True, False])
@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("add_eos", [None, True, False])
def test_add_bos_and_add_eos_win_over_tokenizer_json(tmp_path, in_json, add_bos, add_eos):
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "add_bos_token": add_bos, "add_eos_token": add_eos}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_level_backend(adds_bos=in_json), config))
    body = tokenizer.encode("fox", add_special_tokens=False)
    bos = [0] if (in_json if add_bos is None else add_bos) else []
    eos = [1] if add_eos else []
    assert tokenizer.encode("fox") == bos + body + eos
    assert tokenizer.encode("<|begin|>fox") == [0, *body, *eos]
    assert tokenizer.adds_bos_token is bool(bos)


def test_one_token_may_be_bos_and_eos(tmp_path):
    config = {"bos_token": "<|begin|>", "eos_token": "<|begin|>"}
    # The one in front is BOS, and switching it off does not bring it back as EOS.
    for add_bos, expected in ((True, [0]), (False, [])):
        write_folder(tmp_path, config={**config, "add_bos_token": add_bos})
        assert Tokenizer.from_folder(tmp_path).encode("") == expected


def test_saved_truncation_and_padding_do_not_cut_prompts(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=8, pad_id=2)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend, CONFIG))
    text = "the quick brown fox jumps over"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a")) == 2


def test_vocabulary_size_covers_every_id(byte_level):
    assert byte_level.backend.id_to_token(byte_level.vocab_size - 1) == "two words"
    assert byte_level.backend.id_to_token(byte_level.vocab_size) is None
    assert byte_level.decode([byte_level.vocab_size]) == ""  # a padded row of the embedding


def test_wrong_arguments_are_refused(byte_level):
    with pytest.raises(TypeError, match="text must be a str, got bytes"):
        byte_level.encode(b"x")
    with pytest.raises(ValueError, match="ids must be >= 0, got -1"):
        byte_level.decode([3, -1])
    with pytest.raises(ValueError, match="bos_token is '<s>', which is not in the vocabulary"):
        Tokenizer(byte_level_backend(), special_tokens={"bos_token": "<s>"})


def test_special_tokens_in_text_are_found_and_skipped(byte_level):
    for id_, token in enumerate(SPECIAL):
        ids = byte_level.encode(f"a{token}b", add_special_tokens=False)
        assert ids[1] == id_
        assert byte_level.decode(ids) == "ab"
        assert byte_level.decode(ids, skip_special_tokens=False) == f"a{token}b"


def test_library_needs_neither_transformers_nor_torch():
    code = "import sys, eagle_jax.text; print({'transformers', 'torch'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
