"""Every block of code in README and docs is run, or checked where it cannot be; `pages.py` says how it is marked."""

import ast
import importlib
import inspect
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from documentation.pages import MARKS, NO_CODE, PAGES, PYTHON, ROOT, SHELL, Block, blocks, command_lines

from eagle_jax import LLM
from eagle_jax.cli.app import build_parser, main
from eagle_jax.entrypoints.vllm_keywords import ONE_VALUE, WITHOUT_MEANING
from eagle_jax.loading import shipped

TARGET, HEAD = "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct-eagle3"
README = (ROOT / "README.md").read_text(encoding="utf-8")
ALL = [block for page in PAGES for block in blocks(page)]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def named(page) -> str:
    return str(page.relative_to(ROOT))


def test_no_block_escapes():
    for page in PAGES:
        fences = re.findall(r"^ *```(?!`)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) == 2 * len(blocks(page)), page
    for block in ALL:
        assert block.language in (PYTHON, SHELL, *NO_CODE), f"{block.name}: {block.language!r} is not tested"
        assert block.mark in MARKS, f"{block.name}: unknown mark {block.mark!r}"
    # A comment that was meant as a mark but stands before no block would be passed over.
    for page in PAGES:
        marks = re.findall(r"<!-- test:", page.read_text(encoding="utf-8"))
        assert len(marks) == sum((b.mark is not None) + bool(b.given) for b in blocks(page)), page


def run_python(page, marks: tuple[str | None, ...], chat_model: str) -> int:
    """Runs the blocks with these marks in one namespace, with a tiny model in the place of the one they name."""
    namespace: dict = {}
    done = 0
    for block in blocks(page):
        if block.language == PYTHON and block.mark in marks:
            code = (block.given + block.code).replace(TARGET, chat_model)
            exec(compile(code, block.name, "exec"), namespace)
            done += 1
    return done


def pages_with(*marks: str | None):
    found = [page for page in PAGES if any(b.language == PYTHON and b.mark in marks for b in blocks(page))]
    return pytest.mark.parametrize("page", found, ids=named)


@pytest.fixture(autouse=True)
def _a_tiny_head_is_the_released_one(monkeypatch, head):
    """Under its name; pages load no other one."""
    for module in ("eagle_jax.loading.draft", "eagle_jax.loading.shipped"):
        monkeypatch.setattr(f"{module}.shipped_head", lambda name: Path(head))


@pages_with(None)
def test_python_runs(page, chat_model):
    assert run_python(page, (None,), chat_model)


@pytest.mark.slow
@pages_with("slow")
def test_slow_python_runs(page, chat_model):
    assert run_python(page, (None, "slow"), chat_model)


@pytest.mark.parametrize("block", [b for b in ALL if b.language == PYTHON], ids=lambda block: block.name)
def test_python_compiles_and_imports_what_there_is(block: Block):
    tree = ast.parse(block.given + block.code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("eagle_jax", "pallas_kernels"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module}.{alias.name}"


COMMANDS = [
    pytest.param(line, id=f"{block.name} {line[:40]}")
    for block in ALL
    if block.language == SHELL
    for line in command_lines(block)
]
RUNNABLE = [
    pytest.param(block, id=block.name)
    for block in ALL
    if block.language == SHELL
    and block.mark != "checked"
    and any(line.startswith("eagle-jax") for line in command_lines(block))
]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_one_that_there_is(line: str):
    words = [word for word in shlex.split(line) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    match words:
        case ["eagle-jax", *arguments]:
            assert callable(build_parser().parse_args(arguments).run)
        case ["pip", "install", *packages]:
            for extras in re.findall(r"(?:\.|eagle-jax)\[([\w,]+)\]", " ".join(packages)):
                assert set(extras.split(",")) <= set(EXTRAS)
        case ["./run", command, *_]:
            script = (ROOT / "run").read_text()
            assert re.search(rf"^    {command}\)", script, re.MULTILINE)
        case ["python", script, *_] if script.endswith(".py"):
            assert (ROOT / script).is_file()
        case ["mkdocs" | "twine" | "jupytext" | "pytest" | "export", *_] | []:
            pass
        case _:
            pytest.fail(f"nothing here checks {line!r}")


@pytest.mark.slow
@pytest.mark.parametrize("block", RUNNABLE)
def test_commands_run(block: Block, chat_model, head, tmp_path, monkeypatch, capsys):
    """With the tiny models for every target and head, in an empty folder with the files that commands read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("eagle_jax.loading.default_target", lambda: chat_model)
    (tmp_path / "prompts.txt").write_text("Hello\nWhat is a fox?\n")
    for line in command_lines(block):
        words = shlex.split(line)
        if words[0] != "eagle-jax":
            continue
        for option, value in (("--model", chat_model), ("--target", chat_model), ("--draft", head)):
            if option in words:
                words[words.index(option) + 1] = value
        assert main(words[1:]) == 0, capsys.readouterr().err


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


def test_released_heads_are_called_as_the_pages_call_them():
    assert HEAD in shipped.shipped_heads()
