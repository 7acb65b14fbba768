"""Requests that come, run together and leave at any step: each text is what the request gives alone."""

import dataclasses
import random

import numpy as np
import pytest
from support.drive import completed, make_engine, make_request, serve
from support.tiny import draft_config, llama_config, random_head, random_llama

from eagle_jax import SamplingParams
from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.engine.config import EngineConfig

TREE = TreeConfig(total_tokens=10, depth=2, top_k=3)
KINDS = (
    {},
    {"temperature": 0.9},
    {"temperature": 1.2, "top_k": 4, "seed": 5},
    {"repetition_penalty": 1.3},
    {"logprobs": 2},
    {"temperature": 0.7, "presence_penalty": 0.5, "logprobs": 1},
)


@pytest.fixture(scope="module")
def models():
    target = random_llama(llama_config(), 11)
    return target, random_head(draft_config(target.config), 12)


@pytest.fixture(scope="module")
def engine(models):
    return make_engine(*models, tree=TREE, slots=3, max_length=96, prefill_chunk=8)


@pytest.fixture(scope="module")
def requests():
    draw = np.random.default_rng(3)
    return [
        make_request(
            draw.integers(0, 7, int(draw.integers(1, 30))).tolist(),
            int(draw.integers(1, 50)),
            sampling=SamplingParams(max_tokens=None, **KINDS[index % len(KINDS)]),
            seed=index,
            index=index,
            rounds_per_dispatch=[None, 1, 3][index % 3],
        )
        for index in range(24)
    ]


@pytest.fixture(scope="module")
def alone(engine, requests):
    return [serve(engine, [request])[0] for request in requests]


@pytest.mark.parametrize("seed", range(3))
def test_requests_of_all_modes_come_and_go(engine, requests, alone, seed):
    draw = random.Random(seed)
    waiting = draw.sample(requests, len(requests))
    doomed = {request.request_id for request in draw.sample(requests, 8)}
    outputs, live = {}, []
    while waiting or engine.has_unfinished_requests:
        for _ in range(draw.choice([0, 1, 2, 5])):
            if waiting:
                live.append(waiting.pop())
                engine.add_request(live[-1])
        if live and draw.random() < 0.5:
            one = draw.choice(live).request_id
            if one in doomed:
                engine.abort(one)
        for delta in engine.step():
            assert delta.index not in outputs
            if delta.output is not None:
                outputs[delta.index] = delta.output
                live = [request for request in live if request.request_id != delta.request_id]
    assert engine.num_requests == len(engine.outputs) == 0
    assert set(outputs) == set(range(len(requests)))
    aborted = 0
    for request, wanted in zip(requests, alone, strict=True):
        [got] = outputs[request.index].outputs
        if got.finish_reason == "abort":
            assert request.request_id in doomed
            assert got.token_ids == wanted.token_ids[: len(got.token_ids)]
            aborted += 1
            continue
        done = completed(engine, outputs[request.index])
        assert done == wanted
        if request.params.logprobs is not None:
            assert [at.rank for at in done.log_probs] == [at.rank for at in wanted.log_probs]
            assert [len(at) for at in got.logprobs] >= [request.params.logprobs] * len(got.token_ids)
    assert aborted > 1
    assert max(n for one in alone for n in one.accepted_lengths) > 1


def test_long_outputs_take_several_reports(models):
    """A report holds 128 tokens of a slot; the 300 of this output are those of plain decoding."""
    engine, plain = (
        make_engine(models[0], head, tree=tree, slots=1, max_length=320, prefill_chunk=8)
        for head, tree in ((models[1], TREE), (None, None))
    )
    one = make_request([1, 2, 3], 300)
    [got], [wanted] = serve(engine, [one]), serve(plain, [one])
    assert got.token_ids == wanted.token_ids
    assert len(got.token_ids) == 300
    assert len(got.drafted) == len(got.accepted_lengths) < 299
    assert set(got.drafted) == {9}


def test_times_come_from_steps(engine):
    engine.times.prefill = engine.times.decode = 0.0
    serve(engine, [make_request([1] * 40, 30)])
    assert engine.times.prefill > 0
    assert engine.times.decode > 0


def test_what_cannot_be_asked_of_an_engine(models):
    engine = make_engine(models[0], None, slots=1, max_length=64, prefill_chunk=8)
    one = make_request([1, 2], 5)
    engine.add_request(one)
    with pytest.raises(ValueError, match=f"request_id '{one.request_id}' is in use"):
        engine.add_request(one)
    engine.abort("unknown")
    while engine.has_unfinished_requests:
        engine.step()
    engine.add_request(one)  # the id is free again
    engine.shutdown()
    assert not engine.has_unfinished_requests
    with pytest.raises(RuntimeError, match="shut down"):
        engine.step()
    with pytest.raises(RuntimeError, match="shut down"):
        engine.add_request(one)


def test_an_error_of_one_request_leaves_the_others(models):
    """The only allowed id may not come before the fifth token, so there is nothing to emit."""
    engine = make_engine(models[0], None, slots=2, max_length=64, prefill_chunk=8)
    nothing = SamplingParams(max_tokens=None, allowed_token_ids=[3], min_tokens=5)
    impossible = make_request([1], 9, stop_ids=[3], sampling=nothing, index=1)
    good = make_request([1, 2], 9, sampling=SamplingParams(logprobs=0), index=0)
    wanted = serve(engine, [good])[0].token_ids
    for request in (good, impossible):
        engine.add_request(dataclasses.replace(request, rounds_per_dispatch=1))
    ended = {}
    while engine.has_unfinished_requests:
        ended.update({delta.index: delta for delta in engine.step() if delta.finished})
    assert ended[0].output.outputs[0].token_ids == wanted
    assert ended[0].error is None
    assert isinstance(ended[1].error, FloatingPointError)
    assert "prompt 1" in str(ended[1].error)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 1}, "max_model_len must be an integer of at least 2, got 1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1, got 0"),
        ({"prefill_chunk": True}, "prefill_chunk must be an integer of at least 1, got True"),
        ({"logprobs_mode": "raw"}, "logprobs_mode must be 'raw_logprobs' or 'processed_logprobs', got 'raw'"),
        ({"shape_invariant": True}, "shape_invariant needs a draft"),
        ({"shape_invariant": True, "tree": TREE}, "shape_invariant works on chains"),
        ({"seed": -(2**63) - 1}, "seed"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{"max_model_len": 64, "max_num_seqs": 1, "prefill_chunk": 8, **settings})
