import pytest
from small_tokenizers import byte_level_backend, sentencepiece_metadata

from eagle_jax.text import Tokenizer


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    special = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    return Tokenizer(byte_level_backend(), special_tokens=special)


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return Tokenizer.from_gguf_metadata(sentencepiece_metadata())


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece"])
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)
