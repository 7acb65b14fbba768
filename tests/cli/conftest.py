"""A tiny model with a tokenizer and a chat template, and the command run in this process."""

import logging

import pytest
from support.chat_model import GOLDEN, write_chat_model

from eagle_jax.cli import session
from eagle_jax.cli.app import main


@pytest.fixture(scope="session")
def bare_model() -> str:
    """A target without a tokenizer."""
    return str(GOLDEN / "target_A")


@pytest.fixture(scope="session")
def head() -> str:
    return str(GOLDEN / "head_A_e3")


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory) -> str:
    return write_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="session")
def text_model(tmp_path_factory) -> str:
    """A target with a tokenizer but without a chat template."""
    return write_chat_model(tmp_path_factory.mktemp("models") / "text", chat=False)


@pytest.fixture(autouse=True)
def _no_compilation_cache(monkeypatch, tmp_path):
    """The cache is a setting of the whole process, which other tests must not find changed."""
    monkeypatch.setattr(session, "keep_compiled_programs", lambda: None)
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
