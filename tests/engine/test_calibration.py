"""`tree="auto"`: the adaptive is calibrated once, its file is read back, and texts are those of plain decoding."""

import dataclasses
import json

import pytest
from support.pairs import TINY_PROMPTS, decoder_of

from eagle_jax import LLM, generate, speculative_generate
from eagle_jax.decoding.adaptive import AdaptiveSpeculation
from eagle_jax.decoding.rules import make_rule
from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.engine import calibration
from eagle_jax.engine.calibration import Calibration
from eagle_jax.speculative_config import AUTO, SpeculativeConfig, default_candidates, tree_config

SPECULATION = AdaptiveSpeculation((None, TreeConfig.chain(2)))


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path))
    return tmp_path / "calibration"


def test_the_first_use_calibrates_and_the_next_reads_the_file(tiny, cache, monkeypatch):
    target, draft = tiny
    decoder = decoder_of(target, draft, SPECULATION)
    found = decoder.calibrate(prompts=1, tokens=100)
    [file] = cache.iterdir()
    assert file == found.file
    held = json.loads(file.read_text())
    assert [entry["candidate"] for entry in held["candidates"]] == ["plain", "chain 2"]
    assert held["candidates"][0]["plain_rounds"] == 1.0
    assert held["batch"] == 1
    assert held["model"]["layers"] == 2
    assert all(entry["ms"] > 0 for entry in held["candidates"])

    monkeypatch.setattr(calibration, "measure_candidates", lambda programs, mode: pytest.fail("measured again"))
    assert decoder.calibrate(prompts=1, tokens=90).ms == pytest.approx(found.ms, abs=1e-4)
    held["candidates"][1]["ms"] = 1e-3
    file.write_text(json.dumps(held))
    result = speculative_generate(target, draft, TINY_PROMPTS[:1], max_new_tokens=80, tree=SPECULATION)
    assert result.token_ids == generate(target, TINY_PROMPTS[:1], max_new_tokens=80).token_ids

    monkeypatch.setattr(calibration, "measure_candidates", lambda programs, mode: [2.0, 3.0])
    for broken in ("", "{}", "[]", json.dumps({**held, "jax": "0.1"}), json.dumps({**held, "candidates": []})):
        file.write_text(broken)
        assert decoder.calibrate(prompts=1, tokens=90).ms == [2.0, 3.0]
    assert Calibration.read(file, found.key).ms == [2.0, 3.0]
    assert decoder.calibrate(prompts=1, tokens=90, again=True).ms == [2.0, 3.0]


def test_auto_is_the_choice_of_the_platform(tiny):
    _, draft = tiny
    assert tree_config(None, "auto", where="here") == AUTO
    assert SpeculativeConfig.from_dict({"model": "m", "tree": "auto"}).tree == AUTO
    for platform in ("cpu", "gpu"):
        adaptive = default_candidates(draft.config, platform)
        assert adaptive.candidates[0] is None
        assert adaptive.top_k <= draft.config.draft_vocab_size
    assert default_candidates(draft.config, "cpu").total_tokens < default_candidates(draft.config, "gpu").total_tokens
    own = dataclasses.replace(draft, num_speculative_tokens=7)
    assert TreeConfig.chain(7) in decoder_of(tiny[0], own, AUTO).config.tree.candidates
    assert decoder_of(*tiny, AUTO).config.max_depth == default_candidates(draft.config, "cpu").max_depth


def test_what_goes_with_a_choice_of_trees_is_said(tiny):
    with pytest.raises(ValueError, match="'block' works with one shape of trees"):
        SpeculativeConfig.from_dict({"model": "m", "tree": "auto", "rejection_sample_method": "block"})
    with pytest.raises(ValueError, match="'block' works with one shape of trees"):
        decoder_of(*tiny, SPECULATION, rule=make_rule("block"))
    with pytest.raises(ValueError, match="shape_invariant works on chains"):
        decoder_of(*tiny, AUTO, shape_invariant=True)
    with pytest.raises(ValueError, match="only a choice of several trees can be calibrated"):
        decoder_of(*tiny, TreeConfig.chain(1)).calibrate(prompts=1, tokens=20)
    with pytest.raises(ValueError, match="'wide' is not known; known are 'auto'"):
        tree_config(None, "wide", where="here")
    with pytest.raises(TypeError, match="or 'auto', got 'wide'"):
        decoder_of(*tiny, "wide")


@pytest.mark.slow
def test_auto_in_a_batch_that_samples(tiny, cache, monkeypatch):
    target, draft = tiny
    # As measured, drafting does not pay with a model so small.
    monkeypatch.setattr(calibration, "measure_candidates", lambda programs, mode: [1.0, 1.1, 1.2, 1.3])
    options = {"max_new_tokens": 60, "temperature": 0.8, "seed": [1, 2, 3, 4]}
    result = speculative_generate(target, draft, TINY_PROMPTS, tree="auto", **options)
    assert result.token_ids == generate(target, TINY_PROMPTS, **options).token_ids
    assert [json.loads(file.read_text())["mode"] for file in cache.iterdir()] == ["sampling"]
    assert 0 < result.metrics.total.drafted <= 3 * result.metrics.total.rounds
    llm = LLM(target)
    assert llm.generate(TINY_PROMPTS[:1], use_tqdm=False)[0].metrics.drafted == 0
