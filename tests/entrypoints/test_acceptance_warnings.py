"""What is said when a head and its target hardly belong together, and what is counted."""

import logging

import pytest
from support import golden

from eagle_jax import LLM, SamplingParams
from eagle_jax.metrics import AcceptanceMetrics, CumulativeCounters, acceptance_warning


def test_few_accepted_drafts_are_suspicious():
    text = acceptance_warning(200, [6, 1, 0])
    assert text is not None
    assert text.startswith("the mean acceptance length is 1.03, so the target rejects nearly every draft")
    assert acceptance_warning(200, [10, 1, 0]) is None
    assert acceptance_warning(99, [0, 0, 0]) is None, "too few rounds to say"
    assert acceptance_warning(200, []) is None, "nothing was drafted"


def test_drafts_that_are_always_accepted_are_suspicious_too():
    text = acceptance_warning(200, [200, 199, 198])
    assert text is not None
    assert "99 % of the rounds accepted a draft at every depth" in text
    assert acceptance_warning(200, [200, 190, 180]) is None


def test_requests_that_were_told_to_accept_nothing_do_not_count_as_drafts():
    counters = CumulativeCounters(3)
    counters.add(None, prompt_tokens=5, output_tokens=7)
    assert [getattr(c, "value", None) or getattr(c, "values", 0) for c in counters.read()] == [5, 7, 0, 0, 0, [0, 0, 0]]


def test_an_llm_warns_once(monkeypatch, caplog):
    monkeypatch.setattr("eagle_jax.metrics.FEW_ACCEPTED", 9.0)  # whatever the head reaches counts as little
    folder = golden.FOLDER
    config = {"model": str(folder / "head_A_e3"), "tree": {"total_tokens": 8, "depth": 2, "top_k": 3}}
    llm = LLM(str(folder / "target_A"), speculative_config=config)
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    with caplog.at_level(logging.WARNING, logger="eagle_jax"):
        for _ in range(4):
            llm.generate({"prompt_token_ids": [5, 9, 300]}, params)
    found = [record.message for record in caplog.records if "rejects nearly every draft" in record.message]
    assert len(found) == 1
    assert found[0].startswith(f"{folder / 'head_A_e3'}: the mean acceptance length is ")
    drafts = next(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_drafts")
    assert drafts > 100


@pytest.mark.slow
def test_plain_decoding_of_a_shape_invariant_llm_leaves_the_draft_counters_alone():
    folder = golden.FOLDER
    config = {"model": str(folder / "head_A_e3"), "num_speculative_tokens": 3}
    llm = LLM(str(folder / "target_A"), speculative_config=config, shape_invariant=True)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    llm.generate({"prompt_token_ids": [5, 9, 300]}, params)
    before = {m.name: m for m in llm.get_metrics()}
    llm.generate({"prompt_token_ids": [5, 9, 300]}, params, speculate=False)
    after = {m.name: m for m in llm.get_metrics()}
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"vllm:prompt_tokens", "vllm:generation_tokens"}


def test_rounds_that_drafted_nothing_are_no_drafts():
    """Adaptive speculation that decodes plainly most of the time says nothing against its head."""
    counters = CumulativeCounters(2)
    metrics = AcceptanceMetrics(
        accepted_lengths=[1] * 400 + [2] * 100, accepted_at_depth=[100, 0], drafted=200, plain_rounds=400
    )
    counters.add(AcceptanceMetrics.total([metrics]), 5, 601)
    values = {metric.name: getattr(metric, "value", None) for metric in counters.read()}
    assert values["vllm:spec_decode_num_drafts"] == 100
    assert values["vllm:spec_decode_num_draft_tokens"] == 200
    assert counters.warning is None
    few = AcceptanceMetrics(accepted_lengths=[1] * 500, accepted_at_depth=[4, 0], drafted=400, plain_rounds=300)
    other = CumulativeCounters(2)
    other.add(few, 5, 501)
    assert "rejects nearly every draft" in other.warning
