"""Compiled programs are kept for the next process without being asked, unless the user has chosen otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from eagle_jax.engine.compilation_cache import keep_compiled_programs

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def test_what_the_user_chose_wins(monkeypatch, tmp_path):
    changed = {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: changed.__setitem__(name, value))
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path))
    assert keep_compiled_programs() == Path(jax.config.jax_compilation_cache_dir), "that of the tests"
    assert changed == {}
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", None)
    assert keep_compiled_programs() == tmp_path / "compiled"
    assert changed["jax_compilation_cache_dir"] == str(tmp_path / "compiled")


@pytest.mark.slow
def test_the_next_process_finds_the_programs(tmp_path):
    code = f"""
        import jax
        hits = []
        jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
        from eagle_jax import LLM, SamplingParams
        LLM({str(GOLDEN / "target_A")!r}).generate([[1, 2]], SamplingParams(max_tokens=4), use_tqdm=False)
        print(hits.count("/jax/compilation_cache/cache_hits"))
    """
    environment = os.environ | {"EAGLE_JAX_CACHE": str(tmp_path)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)

    def hits() -> int:
        lines = "\n".join(line.strip() for line in code.strip().splitlines())
        done = subprocess.run(
            [sys.executable, "-c", lines], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert hits() == 0
    assert list((tmp_path / "compiled").iterdir())
    assert hits() >= 3
