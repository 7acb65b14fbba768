"""The README does what it says."""

import inspect
import re
import shlex
from pathlib import Path

import pytest

from eagle_jax import LLM
from eagle_jax.cli.app import build_parser
from eagle_jax.front.vllm_keywords import ONE_VALUE, WITHOUT_MEANING

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TARGET, HEAD = "HuggingFaceTB/SmolLM2-135M-Instruct", "checkpoints/smollm2-135m-instruct-eagle3"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", README, re.MULTILINE | re.DOTALL)


def test_every_python_block_runs(chat_model, head, capsys):
    """One after the other in one namespace, with a tiny model of the same kind in place of the one it names."""
    assert len(blocks("python")) == README.count("```python") >= 3
    namespace: dict = {}
    for block in blocks("python"):
        code = block.replace(TARGET, chat_model).replace(HEAD, head)
        exec(compile(code, "README.md", "exec"), namespace)
    assert (ROOT / HEAD / "model.safetensors").is_file()
    assert namespace["result"].metrics.mean_acceptance_length >= 1
    assert len(namespace["outputs"]) == 2
    assert "vllm:spec_decode_num_drafts" in capsys.readouterr().out


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines() if line.strip().startswith("eagle-jax")]


@pytest.mark.parametrize("line", commands())
def test_every_command_is_one_that_the_parser_takes(line):
    parsed = build_parser().parse_args(shlex.split(line)[1:])
    assert callable(parsed.run)


def test_the_two_commands_of_a_stranger_exist():
    script = (ROOT / "run").read_text()
    for command in ("demo", "test"):
        assert f"./run {command}" in README
        assert f"\n    {command})" in script


def test_the_keywords_of_llm_are_in_the_rows_where_they_belong():
    rows = re.findall(
        r"^\| (`.*?) \| (.*?) \|$", README.split("| keywords of `LLM` | |")[1].split("\n\n")[0], re.MULTILINE
    )
    work, idle, one_value = (re.findall(r"`(\w+)`", names) for names, _ in rows)
    assert set(work) <= set(inspect.signature(LLM).parameters)
    assert set(idle) <= set(WITHOUT_MEANING)
    assert set(one_value) <= set(ONE_VALUE)
