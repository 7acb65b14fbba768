"""`eagle-jax demo`, and the cache that makes its second run quick."""

import json
import os
import subprocess
import sys

import pytest

from eagle_jax import generate, load_target


@pytest.fixture
def demo(command, chat_model, head):
    def run(*arguments: str):
        return command("demo", "--model", chat_model, "--draft", head, "--max-tokens", "16", "--ignore-eos", *arguments)

    return run


def test_the_answer_and_the_table(demo, chat_model):
    code, out, err = demo("--prompt", "the fox", "--repeats", "1")
    assert code == 0
    answer = generate(load_target(chat_model), "the fox", max_new_tokens=16, chat=True, ignore_eos=True).texts[0]
    assert out.startswith(f"\n> the fox\n\n{answer}\n\n")
    for row in (
        "tokens per second",
        "speed-up",
        "accepted length, bonus included",
        "accepted at draft position 1",
        "accepted at draft position 2",
        "accepted at draft position 3",
        "compile time",
    ):
        assert row in out
    assert "draft position 4" not in out
    assert "Both gave the same tokens: 16 of them." in out
    assert "Running on cpu" in err


def test_the_measurements_as_json(demo):
    code, out, _ = demo("--json", "--repeats", "2")
    assert code == 0
    found = json.loads(out)
    assert found["tree"] == {"total_tokens": 4, "depth": 2, "top_k": 1}  # the default on CPU: a chain of 3
    assert found["tokens"] == 16
    assert found["same_tokens"] is True
    assert len(found["plain"]) == len(found["speculative"]) == 2
    assert min(found["plain"] + found["speculative"]) > 0
    assert found["speed_up"] == pytest.approx(sum(found["speculative"]) / sum(found["plain"]), rel=1e-6)
    assert len(found["metrics"]["acceptance_rates"]) == 3
    assert found["metrics"]["mean_acceptance_length"] == pytest.approx(15 / found["metrics"]["rounds"])


@pytest.mark.slow
def test_the_second_run_compiles_nothing(tmp_path, chat_model, head):
    """In processes of their own: the cache is for the next process."""
    environment = os.environ | {"EAGLE_JAX_CACHE": str(tmp_path)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [
        sys.executable,
        "-m",
        "eagle_jax.cli",
        "demo",
        "--json",
        "--repeats",
        "1",
        "--max-tokens",
        "8",
        "--ignore-eos",
    ]
    command += ["--model", chat_model, "--draft", head]

    def run() -> dict:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    first, second = run(), run()
    assert (first["compiled"], first["from_cache"]) == (6, 0)
    assert (second["compiled"], second["from_cache"]) == (0, 6)
