"""Prompts in every form, and what is no prompt."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.letters import letters_tokenizer

from eagle_jax.entrypoints.prompts import PromptReader
from eagle_jax.text import Tokenizer

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def reader() -> PromptReader:
    return PromptReader(tokenizer=letters_tokenizer(), vocab_size=512)


def ids_of(reader, prompts):
    return [prompt.token_ids for prompt in reader.read(prompts)]


def test_one_prompt_of_each_form(reader):
    encode = reader.tokenizer.encode
    for prompt, ids in [
        ("abc", encode("abc")),
        ({"prompt": "abc"}, encode("abc")),
        ([3, 4, 5], [3, 4, 5]),
        ((3, 4, 5), [3, 4, 5]),
        (np.array([3, 4, 5]), [3, 4, 5]),
        (jnp.array([3, 4, 5]), [3, 4, 5]),
        ([np.int32(3), np.int64(4)], [3, 4]),
        ({"prompt_token_ids": [3, 4]}, [3, 4]),
        ({"prompt_token_ids": np.array([3, 4])}, [3, 4]),
        (MESSAGES, encode("u hello a ")),
    ]:
        assert ids_of(reader, prompt) == [ids], prompt
        assert ids_of(reader, [prompt, prompt]) == [ids, ids], prompt


def test_several_prompts_of_mixed_forms(reader):
    encode = reader.tokenizer.encode
    prompts = ["abc", [3, 4], MESSAGES, {"prompt_token_ids": (9,)}]
    assert ids_of(reader, prompts) == [encode("abc"), [3, 4], encode("u hello a "), [9]]
    assert ids_of(reader, np.array([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert [prompt.text for prompt in reader.read(prompts)] == ["abc", None, "u hello a ", None]


def test_chat_puts_texts_into_the_template(reader):
    chat = dataclasses.replace(reader, chat=True)
    assert chat.read("hello")[0].text == "u hello a "
    assert chat.read([3, 4])[0].token_ids == [3, 4]
    assert dataclasses.replace(chat, add_generation_prompt=False).read("hello")[0].text == "u hello "


def test_chat_gets_no_second_bos(reader):
    from tokenizers import processors

    tokenizer = letters_tokenizer()
    tokenizer.backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    template = "<bos>{{ messages[0].content }}"
    tokenizer = Tokenizer(tokenizer.backend, special_tokens=tokenizer.special_tokens, chat_template=template)
    both = PromptReader(tokenizer=tokenizer, vocab_size=512)
    assert both.read("a")[0].token_ids.count(1) == 1
    assert both.read("<bos>a")[0].token_ids.count(1) == 1
    assert both.read([{"role": "user", "content": "a"}])[0].token_ids.count(1) == 1
    assert both.read([3])[0].token_ids == [3]


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ([], ValueError, "prompts is empty"),
        ("", ValueError, "prompt 0 is empty"),
        ([[]], ValueError, "prompt 0 is empty"),
        (["a", ""], ValueError, "prompt 1 is empty"),
        ({"prompt_token_ids": []}, ValueError, "prompt 0 is empty"),
        ([[3], [512]], ValueError, "prompt 1 has the token id 512; ids of this model are 0 to 511"),
        ([-1], ValueError, "prompt 0 has the token id -1"),
        ([3, 4.5], TypeError, "prompt 0 has 4.5 among its token ids"),
        ([3, True], TypeError, "prompt 0 has True among its token ids"),
        ([[3, "a"]], TypeError, "prompt 0 has 'a' among its token ids"),
        (np.array([1.5]), TypeError, "prompt 0 is of type float"),
        (None, TypeError, "prompt 0 is of type NoneType"),
        ([3, [4]], TypeError, r"prompt 0 has \[4\] among its token ids"),
        ({"prompt": "a", "image": 1}, ValueError, r"prompt 0 is a mapping with the keys \['image', 'prompt'\]"),
        ({"prompt": [1]}, TypeError, "prompt 0 has a list as 'prompt'"),
        ({"prompt_token_ids": "a"}, TypeError, "prompt 0 has a str as 'prompt_token_ids'"),
        ([*MESSAGES, 3], TypeError, "prompt 0 mixes chat messages"),
    ],
)
def test_what_is_no_prompt_is_refused(reader, prompts, error, message):
    with pytest.raises(error, match=message):
        reader.read(prompts)


def test_text_needs_a_tokenizer_and_a_chat_a_template(reader):
    without = PromptReader(tokenizer=None, vocab_size=512)
    with pytest.raises(ValueError, match="prompt 0 is text, but the target has no tokenizer"):
        without.read("a")
    with pytest.raises(ValueError, match="prompt 1 is text, but the target has no tokenizer"):
        without.read([[3], MESSAGES])
    plain = Tokenizer(letters_tokenizer().backend)
    with pytest.raises(ValueError, match="no chat template"):
        PromptReader(tokenizer=plain, vocab_size=512).read(MESSAGES)


def test_ids_of_a_tokenizer_beyond_the_model_are_refused(reader):
    small = dataclasses.replace(reader, vocab_size=5)
    with pytest.raises(ValueError, match="which its tokenizer gave"):
        small.read("xyz")
