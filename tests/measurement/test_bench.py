"""`eagle-jax bench` on a tiny geometry: its report, its floor of bytes, and the comparison of two reports."""

import dataclasses
import json

import jax.numpy as jnp
import pytest
from flax import nnx
from support.drive import make_engine

from eagle_jax.cli.app import main
from eagle_jax.decoding.adaptive import AdaptiveSpeculation
from eagle_jax.drafters.tree import StaticTree, TreeConfig
from eagle_jax.engine import calibration
from eagle_jax.measurement import loops
from eagle_jax.measurement.bench import draft_steps, first_level
from eagle_jax.measurement.compare import compare, ratios
from eagle_jax.measurement.floor import Floor
from eagle_jax.measurement.geometry import PUBLISHED, eagle3_head_of, find_geometry
from eagle_jax.models import Eagle3Head, Llama
from eagle_jax.sampling import SamplingMode

CONFIG = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One run of the command: exit code, what it printed to a file, and the folder."""
    from eagle_jax.cli import session

    folder = tmp_path_factory.mktemp("bench")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    patch = pytest.MonkeyPatch()
    patch.setattr(session, "keep_compiled_programs", lambda: None)
    patch.setattr("eagle_jax.cli.bench.keep_compiled_programs", lambda: None)
    arguments = [
        "bench",
        "--model",
        str(folder / "config.json"),
        "--random-weights",
        "--tree",
        "6,2,2",
        "--context",
        "20",
    ]
    arguments += ["--batch", "2", "--runs", "2", "--steps", "3", "--accepted-length", "2.5", "--quiet"]
    try:
        code = main([*arguments, "--output", str(folder / "report.json"), "--picture", str(folder / "bars.png")])
        assert code == 0
        yield json.loads((folder / "report.json").read_text()), arguments, folder
    finally:
        patch.undo()


def test_the_report_holds_every_part(report):
    found, _, folder = report
    steps = {step["name"]: step for step in found["steps"]}
    parts = {part["name"]: part for part in found["parts"]}
    assert list(steps) == ["plain step", "round"]
    assert list(parts) == ["extend", "draft steps", "tree building", "verify", "accept and commit", "rest"]
    assert all(step["ms"] > 0 and step["floor_ms"] > 0 and len(step["runs"]) == 2 for step in steps.values())
    assert parts["draft steps"]["count"] == 2
    assert set(found["dispatch_ms"]) == {"plain", "speculative"}
    measured = sum(part["ms"] for part in parts.values())
    # Draft steps are a difference, cut at 0, so that the parts make up the round or more.
    assert measured == pytest.approx(steps["round"]["ms"], rel=1e-6) or measured > steps["round"]["ms"]
    speed = found["speed"]
    assert speed["acceptance"] == "synthetic"
    assert speed["break_even_accepted_length"] == pytest.approx(steps["round"]["ms"] / steps["plain step"]["ms"])
    assert speed["speculative_tokens_per_second"] == pytest.approx(2 * 2.5 / steps["round"]["ms"] * 1e3)
    assert found["compilation"]["speculative"]["programs"] == 3
    assert found["peak_memory_bytes"] > 2**20
    assert (folder / "bars.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_report_is_compared_with_another_run(report, monkeypatch, capsys):
    found, arguments, folder = report
    slower = json.loads(json.dumps(found))
    slower["steps"][1]["ms"] *= 1.2
    monkeypatch.setattr("eagle_jax.measurement.bench.run", lambda *_: slower)
    assert main([*arguments, "--check", str(folder / "report.json"), "--tolerance", "0.3"]) == 0
    assert main([*arguments, "--check", str(folder / "report.json")]) == 1
    assert "WORSE round / plain step" in capsys.readouterr().err
    assert main([*arguments, "--batch", "4", "--check", str(folder / "report.json")]) == 2
    assert "batch 2 and 4" in capsys.readouterr().err
    assert main([*arguments, "--check", str(folder / "config.json")]) == 2


def test_only_ratios_are_compared(report):
    found = report[0]
    slower = json.loads(json.dumps(found))
    for part in [*slower["steps"], *slower["parts"]]:
        part["ms"] *= 3
        part["floor_ms"] *= 3
    assert all(change.now == pytest.approx(change.before) for change in compare(found, slower))
    slower["steps"][0]["ms"] *= 1.3
    assert [c.name for c in compare(found, slower) if c.worse(0.1)] == ["plain step / its bytes at copy bandwidth"]
    assert ratios(found)["round / plain step"] == found["speed"]["break_even_accepted_length"]


def test_the_floor_of_a_published_geometry():
    """Llama 3.1 8B in bfloat16: 15.0 GB a forward; 6.1 GB for the extend step and seven draft steps."""
    config = PUBLISHED["Llama-3.1-8B"]
    target = nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    head = nnx.eval_shape(lambda: Eagle3Head(eagle3_head_of(config), dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    floor = Floor.of(target, head, slots=1, length=0)
    assert floor.target / 1e9 == pytest.approx(15.0, abs=0.05)
    assert (floor.extend + 7 * floor.draft_step) / 1e9 == pytest.approx(6.1, abs=0.05)
    assert floor.extend - floor.draft_step == 2 * 3 * 4096 * 4096
    cache = Floor.of(target, head, slots=4, length=1000)
    assert cache.target - floor.target == 4 * 1000 * 2 * 32 * 8 * 128 * 2


def test_geometries_have_names():
    assert find_geometry("8b") == find_geometry("Llama-3.1-8B")
    assert eagle3_head_of(find_geometry("8B")[1]).draft_vocab_size == 32000
    with pytest.raises(ValueError, match=r"'9B' is neither .* Llama-3.1-8B \(8B\)"):
        find_geometry("9B")


def test_trees_are_cut_to_their_first_level():
    tree = TreeConfig(total_tokens=60, depth=7, top_k=10)
    assert (first_level(tree).total_tokens, draft_steps(tree)) == (11, 7)
    static = StaticTree.from_paths([[0], [1], [0, 0]])
    assert (first_level(static).paths, draft_steps(static)) == (((0,), (1,)), 1)


def test_a_dispatch_is_not_part_of_a_step() -> None:
    runs: list[int] = []

    def run(steps: int) -> tuple[float, int]:
        runs.append(steps)
        return 3e-3 + 2e-3 * steps, steps

    found = loops.measure(run, runs=3, steps=10)
    assert found.ms == pytest.approx(2.0)
    assert found.dispatch_ms == pytest.approx(3.0)
    assert found.steps == 10
    assert runs == [1, 11, 1, 11, 1, 11, 1]
    found = loops.measure(run, runs=3)
    assert found.ms == pytest.approx(2.0)
    assert found.steps in (100, 101)  # of 2 ms, in 0.2 s
    assert calibration.step_seconds((8.0, 4), (9.0, 1)) == 2.0  # nothing but noise


def test_a_dispatch_is_not_part_of_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    _, config = find_geometry("135M")
    config = dataclasses.replace(config, num_hidden_layers=3, hidden_size=18, intermediate_size=8, vocab_size=16)
    target = Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    head = Eagle3Head(eagle3_head_of(config), dtype=jnp.float32, rngs=nnx.Rngs(0))
    adaptive = AdaptiveSpeculation((None, TreeConfig.chain(2)))
    engine = make_engine(target, head, tree=adaptive, slots=1, max_length=64, prefill_chunk=32)
    costs = {0: 1e-3, 1: 4e-3}
    monkeypatch.setattr(
        calibration,
        "_run",
        lambda programs, mode, adaptive, candidate, rounds, length: (5e-3 + costs[candidate] * rounds, rounds),
    )
    assert calibration.measure_candidates(engine.programs, SamplingMode.GREEDY) == pytest.approx([1.0, 4.0])
