"""`eagle-jax plan`: rounds of published sizes compiled for topologies that are only named, with memory and collectives."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.cli.app import main
from eagle_jax.cli.plan import to_text
from eagle_jax.parallel.counting import count_collectives

ROOT = Path(__file__).parents[2]
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (pip install 'eagle-jax[tpu]')"
)

# As libtpu 0.0.52 prints a loop of 5 turns in a loop of unknown length: without known_trip_count, and asynchronous.
TPU_TEXT = """HloModule jit_f
%turn_condition (p: (s32[], f32[8])) -> pred[] {
  %five = s32[]{:T(128)} constant(5), metadata={op_name="jit(f)"}
  %p = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %five), direction=LT, metadata={op_name="jit(f)/while/cond/lt"}
}

%turn (q: (s32[], f32[8])) -> (s32[], f32[8]) {
  %q = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %x = f32[8]{0:T(128)} get-tuple-element(%q), index=1
  %s = f32[8]{0:T(128)} all-reduce-start(%x), to_apply=%add, metadata={op_name="jit(f)/while/body/draft/while/body/psum"}
  %d = f32[8]{0:T(128)} all-reduce-done(%s), metadata={op_name="jit(f)/while/body/draft/while/body/psum"}
  ROOT %t = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%x, %d)
}

%round (r: (s32[], f32[8])) -> (s32[], f32[8]) {
  %r = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %w = (s32[]{:T(128)}, f32[8]{0:T(128)}) while(%r), condition=%turn_condition, body=%turn, metadata={op_name="a/while"}
  ROOT %g = (s32[], f32[8]) all-gather(%w), dimensions={0}, metadata={op_name="jit(f)/while/body/verify/all_gather"}
}

%go_on (v: (s32[], f32[8])) -> pred[] {
  %v = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  ROOT %and = pred[] and(%v, %v)
}

ENTRY %main (a: (s32[], f32[8])) -> (s32[], f32[8]) {
  %a = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  ROOT %outer = (s32[]{:T(128)}, f32[8]{0:T(128)}) while(%a), condition=%go_on, body=%round, metadata={op_name="b/while"}
}
"""


def test_loops_of_tpu_programs_are_counted() -> None:
    assert count_collectives(TPU_TEXT) == {"draft": {"all-reduce": 5}, "verify": {"all-gather": 1}}
    with pytest.raises(ValueError, match="no ENTRY computation"):
        count_collectives("module @jit_f {}")


def test_a_report_for_people() -> None:
    settings = {"tensor_parallel_size": 8, "draft_tensor_parallel_size": 1, "data_parallel_size": 1}
    report: dict[str, Any] = {
        "model": "70B", "topology": "v5p:2x2x2", "device": "TPU v5", "devices": 8, "device_bytes": 95 * 2**30,
        "settings": settings | {"batch": 8, "max_model_len": 4096, "dtype": "bfloat16"},
        "target_bytes": 2**34, "draft_bytes": 2**31, "cache_bytes": 2**30, "argument_bytes": 2**34,
        "temporary_bytes": 2**28, "total_bytes": 2**34, "fits": True, "compile_seconds": 3.0,
        "flops": 2.5e11, "bytes_accessed": 1.84e10,
        "collectives": {"draft": {"all-reduce": 1}, "verify": {"all-reduce": 161, "all-gather": 1}},
    }  # fmt: skip
    text = to_text(report)
    assert "all 16.00 GiB of 95.00 GiB" in text
    assert "250 GFLOP, 18.4 GB" in text
    assert "GFLOP" not in to_text(report | {"flops": None})
    assert "collectives a round: 163 (draft 1, verify 162)" in text
    assert "it fits" in text
    assert "does NOT fit: no room" in to_text(report | {"fits": False, "reason": "no room"})


@needs_libtpu
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "8B", "--topology", "v99:2x2"], "topology 'v99:2x2' cannot be had"),
        (["--model", "8B", "--topology", "v5e:2x2", "--tp", "3"], "num_attention_heads 32, which tensor_parallel_size 3"),
        (["--model", "8B", "--topology", "v5e:2x2", "--tp", "8"], "needs 8 devices, and there are 4"),
        (["--model", "8B", "--topology", "v5e:2x2", "--tp", "4", "--draft-tp", "2"], "must be 1 or tensor_parallel_size 4"),
        (["--model", "8B", "--topology", "v5e:2x2", "--dp", "4", "--batch", "6"], "batch 6 is no multiple"),
        (["--model", "8B", "--topology", "v5e:2x2", "--plain", "--tree", "8,2,3"], "--plain excludes"),
        (["--model", "13B", "--topology", "v5e:2x2"], "neither a config.json nor a published geometry"),
    ],
)  # fmt: skip
def test_what_cannot_be(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def plan(*arguments: str) -> dict[str, Any]:
    """The report of the command in a process of its own, because libtpu reads its environment when it is loaded."""
    done = subprocess.run(
        [sys.executable, "-m", "eagle_jax.cli", "plan", "--json", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=7200, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    ("model", "topology", "tp", "layers"),
    [
        ("8B", "v5e:2x2", 4, 32),
        ("8B", "v6e:1x1x1", 1, 32),
        ("8B", "v5p:2x2x2", 1, 32),
        ("8B", "tpu7x:2x2x1", 1, 32),
        ("70B", "v5e:4x4", 16, 80),
        ("70B", "v5p:2x2x2", 8, 80),
        ("70B", "v6e:2x4x1", 8, 80),
        ("70B", "tpu7x:2x2x1", 8, 80),
    ],
)
def test_published_models_fit(model: str, topology: str, tp: int, layers: int) -> None:
    """Eight sequences of 4096 tokens, bfloat16, the tree of 60 nodes."""
    report = plan("--model", model, "--topology", topology, "--tp", str(tp), "--batch", "8", "--max-model-len", "4096")
    print(report)
    assert report["fits"]
    assert report["devices"] == tp
    assert report["flops"] > 2 * 60 * 8 * report["target_bytes"] / 2 / 2
    assert report["argument_bytes"] >= report["target_bytes"] + report["draft_bytes"] + report["cache_bytes"]
    if tp == 1:
        assert report["collectives"] == {}
        return
    assert sum(report["collectives"]["verify"].values()) <= 2 * layers + 4


@pytest.mark.slow
@needs_libtpu
def test_what_does_not_fit_is_said() -> None:
    report = plan("--model", "8B", "--topology", "v5e:2x2", "--tp", "1", "--plain", "--batch", "4")
    assert not report["fits"]
    assert report["target_bytes"] > 14 * 2**30
