"""Tiny models in the place of those that the pages name."""

import pytest
from support.chat_model import GOLDEN, write_chat_model

from eagle_jax.cli import session


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory) -> str:
    return write_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="session")
def head() -> str:
    return str(GOLDEN / "head_A_e3")


@pytest.fixture(autouse=True)
def _no_settings_of_the_process(monkeypatch, tmp_path):
    """Commands keep compiled programs and files in folders that other tests must not find changed."""
    monkeypatch.setattr(session, "keep_compiled_programs", lambda: None)
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path / "cache"))
