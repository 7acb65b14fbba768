"""Progress is drawn for people at a terminal, and nowhere else."""

import sys

import pytest
from support.pairs import TINY_PROMPTS

from eagle_jax import generate
from eagle_jax.entrypoints.progress import progress_bar, spinner


@pytest.mark.parametrize(
    ("terminal", "progress", "drawn"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_bar_needs_a_wish_and_a_terminal(tiny, capsys, monkeypatch, terminal, progress, drawn):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("FORCE_COLOR", "1")
    generate(tiny[0], TINY_PROMPTS, max_new_tokens=2, max_num_seqs=4, progress=progress)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("Generating" in err) == drawn


def test_nothing_is_imported_for_a_bar_that_is_not_drawn(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with progress_bar("x", 3, enabled=False) as advance, spinner("y", enabled=False):
        advance(1)
