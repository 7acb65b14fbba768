"""A tiny model with a tokenizer and a chat template, and the command run in this process."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from eagle_jax.cli import session
from eagle_jax.cli.app import main

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
CHAT_TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"


def write_tokenizer(folder: Path, *, chat: bool) -> None:
    """Byte-level BPE that gives each of the 512 ids of the golden target a text; its special tokens are those of the target."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog"], trainer)
    backend.add_tokens([f"w{id_}," for id_ in range(backend.get_vocab_size(), 512)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    if chat:
        config["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def bare_model() -> str:
    """A target without a tokenizer."""
    return str(GOLDEN / "target_A")


@pytest.fixture(scope="session")
def head() -> str:
    return str(GOLDEN / "head_A_e3")


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "chat"
    shutil.copytree(GOLDEN / "target_A", folder)
    write_tokenizer(folder, chat=True)
    return str(folder)


@pytest.fixture(scope="session")
def text_model(tmp_path_factory) -> str:
    """A target with a tokenizer but without a chat template."""
    folder = tmp_path_factory.mktemp("models") / "text"
    shutil.copytree(GOLDEN / "target_A", folder)
    write_tokenizer(folder, chat=False)
    return str(folder)


@pytest.fixture(autouse=True)
def _no_compilation_cache(monkeypatch, tmp_path):
    """The cache is a setting of the whole process, which other tests must not find changed."""
    monkeypatch.setattr(session, "keep_compiled_programs", lambda folder: folder)
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def command(capsys):
    """Runs the command; returns its exit code, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as ended:  # argparse
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(autouse=True)
def _loudness_of_this_test_alone():
    """--quiet and --verbose set the level of the library's logger, which other tests read."""
    logger = logging.getLogger("eagle_jax")
    level = logger.level
    yield
    logger.setLevel(level)
