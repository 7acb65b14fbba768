"""The expectations that come with the package."""

import json
from pathlib import Path

import pytest

from eagle_jax.evaluation.errors import EvaluationError
from eagle_jax.evaluation.expectations import Expectation, find_expectation, shipped_expectations
from eagle_jax.loading.shipped import shipped_heads


def test_those_of_a_released_head_belong_to_its_present_weights():
    """Fails when a head is replaced. Record its expectations anew then: eagle-jax eval --test --record"""
    own = [e for e in shipped_expectations() if e.draft in shipped_heads()]
    assert {e.draft for e in own} == set(shipped_heads())
    for expectation in own:
        assert expectation.draft_digest == shipped_heads()[expectation.draft].sha256, expectation.name
        assert expectation.draft_log_probs is not None
        assert expectation.packaged_target


@pytest.mark.parametrize(
    ("draft", "length", "tolerance"),
    [
        ("yuhuili/EAGLE-LLaMA3.1-Instruct-8B", 2.296, 0.02),
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", 2.811, 0.02),
        ("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", 2.60, 0.05),
    ],
)
def test_what_vllm_publishes_is_recorded(draft, length, tolerance):
    target = "meta-llama/Llama-3.1-8B-Instruct"
    [found] = [e for e in shipped_expectations() if e.belongs_to(target, draft)]
    assert (found.mean_acceptance_length, found.tolerance) == (length, tolerance)
    assert found.settings["num_spec_tokens"] == 3
    assert found.settings["dataset_name"] == ["mt_bench"]
    assert (found.settings["num_prompts"], found.settings["output_len"], found.settings["temp"]) == (80, 256, 0.0)
    assert found.belongs_to("/models/Llama-3.1-8B-Instruct", None)
    assert not found.belongs_to("/models/Llama-3.3-70B-Instruct", None)


def test_an_expectation_is_the_same_after_writing_and_reading(tmp_path):
    for expectation in shipped_expectations():
        expectation.write(tmp_path / f"{expectation.name}.json")
        assert Expectation.read(tmp_path / f"{expectation.name}.json") == expectation


@pytest.mark.parametrize("change", [{"settings": {"tmp": 1}}, {"surprise": 1}, {"draft_log_probs": {"chains": [{}]}}])
def test_what_is_no_expectation_is_refused(tmp_path, change):
    found, path = find_expectation("llama-3.1-8b-eagle3")
    assert found is not None
    file = tmp_path / "x.json"
    file.write_text(json.dumps(json.loads(Path(path).read_text()) | change))
    with pytest.raises(EvaluationError, match=r"x\.json"):
        find_expectation(str(file))
