"""Requests that arrive and leave while others run: each text is that of `LLM.generate` alone, and nothing is left behind."""

import asyncio
import contextlib
import gc
import random
import threading
import weakref

import jax
import pytest
from support.compilations import counting
from support.pairs import PROMPTS

from eagle_jax import LLM, AsyncLLM, SamplingParams

CHAIN = {"num_speculative_tokens": 4}
CLASSES = (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(logprobs=1))


def start(pair, slots=4, **settings):
    target, draft = pair
    return AsyncLLM(
        target, speculative_config={"model": draft, **CHAIN}, max_num_seqs=slots, **{"max_model_len": 160, **settings}
    )


def cases(count, texts, seed=0):
    """Prompts and parameters of every kind: greedy ones, sampled ones, log-probabilities, penalties, stop strings."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        place = draw.randrange(len(PROMPTS))
        prompt = PROMPTS[place][: draw.randint(1, len(PROMPTS[place]))]
        fields = {"max_tokens": draw.choice([0, 1, 7, 30, 60]), "ignore_eos": draw.random() < 0.7}
        least = min(5, fields["max_tokens"])
        if number % 10 == 0:
            fields |= {"temperature": 0.9, "seed": number}
        fields |= draw.choice(
            [
                {},
                {},
                {"logprobs": 2},
                {"repetition_penalty": 1.2},
                {"stop": texts[place][10:13]},
                {"min_tokens": least},
            ]
        )
        found.append((prompt, SamplingParams(**fields)))
    return found


@pytest.fixture(scope="module")
def alone(pair):
    """The whole continuation of each prompt, by `LLM`."""
    return LLM(pair[0], speculative_config={"model": pair[1], **CHAIN}, max_model_len=160)


async def consume(llm, prompt, params, request_id, seen=None):
    """The last output; every one before it is a beginning of it."""
    before = ""
    async for output in llm.generate(prompt, params, request_id):
        assert output.request_id == request_id
        [one] = output.outputs
        assert one.text.startswith(before)
        before = one.text
        if seen is not None:
            seen.append(len(one.token_ids))
        if output.finished:
            return output
    raise AssertionError("the last output is finished")


async def storm(llm, requests, seed, mean_wait=0.003):
    """Requests at random moments, a third of them aborted at random moments; what became of each."""
    draw = random.Random(seed)
    doomed = set(draw.sample(range(len(requests)), len(requests) // 3))

    async def one(number, prompt, params):
        name = f"request {number}"
        task = asyncio.ensure_future(consume(llm, prompt, params, name))
        if number in doomed:
            await asyncio.sleep(draw.expovariate(20))
            if number % 2:
                await llm.abort(name)
            else:
                task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            return await task

    tasks = []
    for number, (prompt, params) in enumerate(requests):
        tasks.append(asyncio.create_task(one(number, prompt, params)))
        await asyncio.sleep(draw.expovariate(1 / mean_wait))
    return await asyncio.gather(*tasks), doomed


@pytest.mark.parametrize(
    ("slots", "count"),
    [(4, 60), *(pytest.param(slots, 200, marks=pytest.mark.slow) for slots in (1, 4, 16))],
)
def test_a_storm_of_requests(pair, alone, slots, count):
    texts = [
        out.outputs[0].text
        for out in alone.generate(PROMPTS, SamplingParams(max_tokens=60, ignore_eos=True), use_tqdm=False)
    ]
    requests = cases(count, texts)
    wanted = [out.outputs[0] for out in (alone.generate([p], s, use_tqdm=False)[0] for p, s in requests)]
    llm = start(pair, slots)

    async def run():
        await llm.warmup(*CLASSES)
        await storm(llm, requests[:10], 1)
        before = sum(x.nbytes for x in jax.live_arrays())
        with counting() as compiled:
            outputs, doomed = await storm(llm, requests, 2)
        assert compiled == []
        gc.collect()
        assert llm.num_requests == 0
        assert sum(x.nbytes for x in jax.live_arrays()) < before + 2**20
        again = await asyncio.gather(*(consume(llm, p, s, str(n)) for n, (p, s) in enumerate(requests[: slots + 1])))
        return outputs, doomed, again

    outputs, doomed, again = asyncio.run(run())
    whole = cut = 0
    for number, (output, full) in enumerate(zip(outputs, wanted, strict=True)):
        if output is None:
            assert number in doomed
            continue
        [got] = output.outputs
        if got.finish_reason == "abort":
            assert number in doomed
            assert full.token_ids[: len(got.token_ids)] == got.token_ids
            cut += 1
            continue
        assert (got.text, got.token_ids, got.finish_reason) == (full.text, full.token_ids, full.finish_reason)
        assert (got.stop_reason, got.seed) == (full.stop_reason, full.seed)
        assert (got.logprobs is None) == (full.logprobs is None)
        whole += 1
    assert whole >= count - len(doomed)
    assert max(n for output in outputs if output for n in output.metrics.accepted_lengths) > 1
    assert [out.outputs[0].token_ids for out in again] == [one.token_ids for one in wanted[: slots + 1]]
    llm.shutdown()


def test_outputs_grow_and_metrics_count(pair, alone):
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    llm, seen = start(pair), []
    output = asyncio.run(consume(llm, PROMPTS[0], params, "a", seen))
    assert seen[0] == 1, "the first token comes as soon as the prompt is read"
    assert seen == sorted(set(seen))
    assert len(seen) > 2
    [wanted] = alone.generate([PROMPTS[0]], params, use_tqdm=False)
    assert (output.outputs, output.metrics) == (wanted.outputs, wanted.metrics)
    counters = {counter.name: getattr(counter, "value", None) for counter in llm.get_metrics()}
    assert counters["vllm:generation_tokens"] == 90
    llm.shutdown()


def test_a_consumer_that_leaves_or_fails_or_is_interrupted_aborts_its_request(pair, alone):
    params = SamplingParams(max_tokens=140, ignore_eos=True)
    llm = start(pair, slots=1)
    [wanted] = alone.generate([PROMPTS[1]], SamplingParams(max_tokens=20), use_tqdm=False)

    async def leave():
        async for _ in llm.generate(PROMPTS[0], params, "a"):
            break

    async def fail():
        async for _ in llm.generate(PROMPTS[0], params, "a"):
            raise ZeroDivisionError

    async def interrupted():
        async for _ in llm.generate(PROMPTS[0], params, "a"):
            raise KeyboardInterrupt

    async def cancelled():
        task = asyncio.create_task(consume(llm, PROMPTS[0], params, "a"))
        await asyncio.sleep(0.02)
        task.cancel()
        await task

    for consumer, error in (
        (leave, None), (fail, ZeroDivisionError), (interrupted, KeyboardInterrupt), (cancelled, asyncio.CancelledError)
    ):  # fmt: skip
        with pytest.raises(error) if error else contextlib.nullcontext():
            asyncio.run(consumer())
        gc.collect()  # a generator that was left is closed when it is collected
        # The only slot is free, the name too, in another event loop.
        output = asyncio.run(asyncio.wait_for(consume(llm, PROMPTS[1], SamplingParams(max_tokens=20), "a"), 30))
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert llm.num_requests == 0
    llm.shutdown()


def test_an_aborted_request_says_so(pair):
    llm = start(pair, slots=1)

    async def run():
        running = asyncio.create_task(consume(llm, PROMPTS[0], SamplingParams(max_tokens=140, ignore_eos=True), "a"))
        waiting = asyncio.create_task(consume(llm, PROMPTS[1], SamplingParams(max_tokens=140), "b"))
        await asyncio.sleep(0.05)
        with pytest.raises(ValueError, match="request_id 'a' is in use"):
            await consume(llm, PROMPTS[0], SamplingParams(), "a")
        await llm.abort(["a", "b", "never heard of"])
        return await running, await waiting

    running, waiting = asyncio.run(run())
    assert {out.outputs[0].finish_reason for out in (running, waiting)} == {"abort"}
    assert waiting.outputs[0].token_ids == []
    llm.shutdown()


def test_a_broken_step_ends_the_requests_and_not_the_engine(pair, alone, monkeypatch):
    llm = start(pair)
    decode = type(llm._engine.programs).decode
    monkeypatch.setattr(type(llm._engine.programs), "decode", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(consume(llm, PROMPTS[0], SamplingParams(max_tokens=9), "a"))
    monkeypatch.setattr(type(llm._engine.programs), "decode", decode)
    output = asyncio.run(consume(llm, PROMPTS[0], SamplingParams(max_tokens=9), "a"))
    [wanted] = alone.generate([PROMPTS[0]], SamplingParams(max_tokens=9), use_tqdm=False)
    assert output.outputs == wanted.outputs
    llm.shutdown()


def test_wrong_input_is_said_at_the_first_output(pair):
    llm = start(pair)
    for arguments, error, message in (
        ((PROMPTS[:2], SamplingParams(), "a"), ValueError, "prompt must be one prompt, got 2"),
        (([1] * 160, SamplingParams(), "a"), ValueError, "leaves no room"),
        ((PROMPTS[0], {"temperature": 0}, "a"), TypeError, "sampling_params must be SamplingParams"),
        ((PROMPTS[0], SamplingParams(), 7), TypeError, "request_id must be a text"),
        ((PROMPTS[0], SamplingParams(stop_token_ids=range(100)), "a"), ValueError, "stop ids; at most 64"),
    ):
        with pytest.raises(error, match=message):
            asyncio.run(consume(llm, *arguments))
    llm.shutdown()
    llm.shutdown()
    for late in (consume(llm, PROMPTS[0], SamplingParams(), "a"), llm.warmup()):
        with pytest.raises(RuntimeError, match="was shut down"):
            asyncio.run(late)


def test_shutdown_fails_what_runs_and_frees_the_thread(pair):
    llm = start(pair)

    async def run():
        task = asyncio.create_task(consume(llm, PROMPTS[0], SamplingParams(max_tokens=140, ignore_eos=True), "a"))
        await asyncio.sleep(0.05)
        llm.shutdown()
        await task

    with pytest.raises(RuntimeError, match="was shut down"):
        asyncio.run(run())
    before = threading.active_count()
    forgotten = start(pair)
    assert threading.active_count() == before + 1
    gone = weakref.ref(forgotten)
    del forgotten
    gc.collect()
    assert gone() is None
    assert threading.active_count() == before
