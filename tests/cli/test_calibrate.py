"""`eagle-jax calibrate`."""

import json
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_command_prints_what_was_measured(command, bare_model, head):
    arguments = ["calibrate", "--model", bare_model, "--draft", head, "--tokens", "100", "--quiet"]
    code, out, _ = command(*arguments, "--json")
    assert code == 0
    report = json.loads(out)
    assert report["candidates"][0] == {"candidate": "plain", "ms": report["candidates"][0]["ms"], "plain_rounds": 1.0}
    assert json.loads(Path(report["file"]).read_text())["candidates"] == report["candidates"]
    code, out, _ = command(*arguments)
    assert code == 0
    assert "1.00 plain rounds" in out
