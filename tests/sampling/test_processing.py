"""Processing of logits against the processors of transformers, and by hand where those say nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle_jax import SamplingParams
from eagle_jax.parallel.vocabulary import Vocabulary
from eagle_jax.sampling import SamplingMode, processing
from eagle_jax.sampling.processing import NO_TOKEN, log_probabilities, probabilities
from eagle_jax.sampling.settings import SlotSettings

INF, NAN = np.inf, np.nan
process_logits, control_logits, draw = map(
    jax.jit, (processing.process_logits, processing.control_logits, processing.draw)
)


def settings(*requests: dict, vocab_size: int, mode: SamplingMode = SamplingMode.SAMPLING) -> SlotSettings:
    """Settings of one slot a request."""
    slots = SlotSettings.empty(len(requests), Vocabulary(vocab_size))
    for slot, request in enumerate(requests):
        one = SlotSettings.of(SamplingParams(max_tokens=None, **request), slot, vocab_size, mode)
        assert one is not None
        slots = slots.put(jnp.int32(slot), one, Vocabulary(vocab_size))
    return slots


def process(logits, *requests: dict) -> np.ndarray:
    logits = jnp.asarray(logits, jnp.float32)
    return np.asarray(process_logits(logits, settings(*requests, vocab_size=logits.shape[-1])))


def by_transformers(logits: np.ndarray, request: dict) -> np.ndarray:
    """Probabilities of rows `[N, V]`."""
    if request.get("temperature", 0) == 0:
        return np.asarray(torch.softmax(torch.tensor(logits), -1))
    steps = LogitsProcessorList([TemperatureLogitsWarper(float(request["temperature"]))])
    if "top_k" in request:
        steps.append(TopKLogitsWarper(request["top_k"]))
    if "top_p" in request:
        steps.append(TopPLogitsWarper(request["top_p"]))
    if "min_p" in request:
        steps.append(MinPLogitsWarper(request["min_p"]))
    rows = torch.tensor(logits)
    return np.asarray(torch.softmax(steps(torch.zeros(len(logits), 1, dtype=torch.long), rows), -1))


REQUESTS = [
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.0, "top_k": 2, "top_p": 0.1},
    {"temperature": 2.0, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.6, "min_p": 0.05},
    {"temperature": 0.4, "top_p": 0.05},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 3.0, "top_k": 1000, "top_p": 0.999},
]


@pytest.mark.parametrize("vocab_size", [7, 97, 5000])
def test_slots_of_one_batch_are_processed_as_by_transformers(vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = (4 * rng.standard_normal((len(REQUESTS), 6, vocab_size))).astype(np.float32)
    requests = [
        request | ({"top_k": min(request["top_k"], vocab_size)} if "top_k" in request else {}) for request in REQUESTS
    ]
    ours = np.asarray(probabilities(jnp.asarray(process(logits, *requests))))
    for slot, request in enumerate(requests):
        wanted = by_transformers(logits[slot], request)
        assert np.array_equal(ours[slot] > 0, wanted > 0), request
        np.testing.assert_allclose(ours[slot], wanted, atol=2e-6, err_msg=str(request))


@pytest.mark.parametrize("shortlist", [1, 4, 30])
def test_cuts_behind_the_shortlist_are_the_same(shortlist, monkeypatch):
    logits = (2 * np.random.default_rng(1).standard_normal((len(REQUESTS), 6, 97))).astype(np.float32)
    wanted = process(logits, *REQUESTS)
    monkeypatch.setattr(processing, "SHORTLIST", shortlist)
    got = jax.jit(lambda x: processing.process_logits(x, settings(*REQUESTS, vocab_size=97)))(jnp.asarray(logits))
    assert np.array_equal(got, wanted)


def test_the_order_is_temperature_first():
    """A cut before the temperature would keep two tokens here, and not four."""
    kept = process([[np.arange(3.0, -5, -1)]], {"temperature": 2.0, "top_p": 0.8})[0, 0] > -INF
    assert kept.tolist() == [True] * 4 + [False] * 4


def test_equally_likely_tokens_stay_or_go_together():
    logits = np.log([[[0.4, 0.2, 0.2, 0.1, 0.1]]])
    for request, kept in (
        ({"top_k": 2}, 3), ({"top_k": 3}, 3), ({"top_k": 4}, 5), ({"top_p": 0.39}, 1), ({"top_p": 0.41}, 3),
        ({"top_p": 0.79}, 3), ({"top_p": 0.81}, 5), ({"min_p": 0.51}, 1), ({"min_p": 0.49}, 3),
    ):  # fmt: skip
        assert (process(logits, {"temperature": 1.0} | request) > -INF).sum() == kept, request


@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-6, 9.9e-6, 1e-5, 1e-4])
def test_tiny_temperatures_are_finite_and_greedy(temperature):
    logits = 50 * np.random.default_rng(0).standard_normal((1, 9, 300))
    slots = settings({"temperature": temperature}, vocab_size=300)
    processed = process_logits(jnp.asarray(logits, jnp.float32), slots)
    assert not np.isnan(processed).any()
    noise = jnp.asarray(np.random.default_rng(1).gumbel(size=(1, 9, 300)), jnp.float32)
    assert np.array_equal(draw(processed, noise, slots), logits.argmax(-1))


def test_tokens_without_a_probability_are_never_drawn():
    rows = np.array(
        [[[NAN, 1, 0, -INF], [-INF, NAN, 2, NAN], [INF, 5, NAN, 3], [NAN] * 4, [-INF] * 4, [1, INF, INF, -INF]]]
    )
    noise = jnp.asarray(
        np.random.default_rng(0).gumbel(size=(1, 6, 4)) + 20 * np.eye(4)[[0, 1, 2, 3, 0, 3]], jnp.float32
    )
    for request in (
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.5, "top_k": 3, "top_p": 0.99, "min_p": 1e-6},
    ):
        slots = settings(request, vocab_size=4)
        processed = process_logits(jnp.asarray(rows, jnp.float32), slots)
        assert not np.isnan(processed).any()
        for shift in range(20):
            chosen = np.asarray(draw(processed, jnp.roll(noise, shift, axis=1), slots))[0]
            assert chosen[0] in (1, 2)
            assert chosen[1] == 2
            assert chosen[2] == 0
            assert chosen[3] == chosen[4] == NO_TOKEN
            assert chosen[5] in (1, 2)
        p = np.asarray(probabilities(processed))[0]
        assert np.isfinite(p).all()
        np.testing.assert_allclose(p.sum(-1), [1, 1, 1, 0, 0, 1], atol=1e-6)
        assert not np.isnan(log_probabilities(processed)).any()


def controlled(logits, request, *, prompt=(), output=(), stop_ids=()) -> np.ndarray:
    """One row `[V]` after prompt and output."""
    size = len(logits)
    slots = settings(request, vocab_size=size, mode=SamplingMode.FULL)
    counts = np.bincount(np.array(output, int), minlength=size)[None, None]
    in_prompt = np.isin(np.arange(size), prompt)[None]
    stops = np.array([[*stop_ids, -1, -1]], np.int32)
    assert slots.controls is not None
    return np.asarray(
        control_logits(
            jnp.asarray([[logits]], jnp.float32), slots.controls, jnp.asarray(in_prompt), jnp.asarray(counts, jnp.int32),
            jnp.asarray([[len(output)]], jnp.int32), jnp.asarray(stops),
        )
    )[0, 0]  # fmt: skip


def test_repetition_penalty_is_that_of_transformers_on_prompt_and_output():
    logits = np.random.default_rng(0).standard_normal(9).astype(np.float32)
    prompt, output = [1, 2, 2], [2, 5, 5, 5, 7]
    processor = RepetitionPenaltyLogitsProcessor(penalty=1.7)
    wanted = processor(torch.tensor([prompt + output]), torch.tensor(logits[None]))[0].numpy()
    got = controlled(logits, {"repetition_penalty": 1.7}, prompt=prompt, output=output)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert not np.allclose(got, logits)


def test_presence_and_frequency_penalties_count_the_output_alone():
    got = controlled(
        np.zeros(6), {"presence_penalty": 0.5, "frequency_penalty": 0.25}, prompt=[0, 1, 1], output=[1, 3, 3]
    )
    np.testing.assert_allclose(got, [0, -0.75, 0, -1.0, 0, 0])


def test_bias_comes_before_penalties():
    got = controlled(np.full(3, -1.0), {"logit_bias": {1: 3.0}, "repetition_penalty": 2.0}, prompt=[0, 1])
    np.testing.assert_allclose(got, [-2, 1, -1])


def test_bans_hold_whatever_the_bias():
    got = controlled(
        np.ones(5),
        {"allowed_token_ids": [1, 3], "logit_bias": {0: 50.0, 3: 2.0}, "repetition_penalty": 0.5},
        prompt=[0],
    )
    assert got.tolist() == [-INF, 1, -INF, 3, -INF]


def test_stop_ids_are_banned_until_there_are_min_tokens():
    for count, banned in ((0, True), (2, True), (3, False)):
        got = controlled(np.zeros(5), {"min_tokens": 3}, output=[1] * count, stop_ids=[4, 0])
        assert (got == -INF).tolist() == [banned, False, False, False, banned]
