"""Where outputs end: stop ids at every place of a round, budgets, the last slots of the context, and slots that change hands."""

import dataclasses
import functools
from collections import Counter

import numpy as np
import pytest
from support import golden
from support.drive import Completion, completed, make_engine, make_request, serve, steps
from support.tiny import draft_config, llama_config, random_head, random_llama

from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.engine.core import EngineCore
from eagle_jax.engine.request import Request

VOCABULARY, MAX_LENGTH, CHUNK = 6, 64, 8
TINY = llama_config(vocab_size=VOCABULARY)
TREE = TreeConfig(total_tokens=14, depth=3, top_k=3)
SEED = 24

Output = list[int]


@functools.cache
def tiny_engine(max_length: int = MAX_LENGTH, speculative: bool = True, chunk: int = CHUNK) -> EngineCore:
    """A random target whose random head is right about every other time."""
    target, head = random_llama(TINY, SEED), random_head(draft_config(TINY), SEED + 1)
    if not speculative:
        return make_engine(target, None, tree=None, slots=3, max_length=max_length, prefill_chunk=CHUNK)
    return make_engine(target, head, tree=TREE, slots=3, max_length=max_length, prefill_chunk=chunk)


@functools.cache
def golden_engine(speculative: bool = True) -> EngineCore:
    """A trained head that drafts chains of five, of which it gets all numbers right."""
    target = golden.target("target_A").model
    if not speculative:
        return make_engine(target, None, tree=None, slots=3, max_length=120, prefill_chunk=16)
    head = golden.draft("head_A_e3", "target_A").head
    return make_engine(target, head, tree=TreeConfig.chain(5), slots=3, max_length=120, prefill_chunk=16)


ENGINES = {"tree": tiny_engine, "chain": golden_engine}


@functools.cache
def prompts(engine: str) -> tuple[tuple[int, ...], ...]:
    if engine == "chain":
        return tuple(tuple(t.prompt) for t in golden.traces() if t.name.startswith("greedy_A_e3_t6d4k1"))
    rng = np.random.default_rng(4)
    return tuple(tuple(rng.integers(0, VOCABULARY, n).tolist()) for n in (1, 3, 8, 9, 15, 20))


@functools.cache
def free_runs(engine: str) -> tuple[tuple[tuple[int, ...], Completion], ...]:
    """Prompts with what they become without stop ids; the tokens come from plain decoding, the rounds from the drafts."""
    requests = [make_request(prompt=p, max_new_tokens=40) for p in prompts(engine)]
    tokens = [c.token_ids for c in serve(ENGINES[engine](speculative=False), requests)]
    completions = serve(ENGINES[engine](), requests)
    assert [c.token_ids for c in completions] == tokens
    return tuple(zip(prompts(engine), completions, strict=True))


def cut(tokens: Output, stop_ids: set[int]) -> Output:
    at = next((i for i, t in enumerate(tokens) if t in stop_ids), None)
    return tokens if at is None else tokens[: at + 1]


def place_in_round(completion: Completion, index: int) -> tuple[str, int]:
    """Where a token of the output was emitted: the prefill, a depth of a round, or as its bonus."""
    if index == 0:
        return "prefill", 0
    index -= 1
    for length in completion.accepted_lengths:
        if index < length:
            return ("bonus", length - 1) if index == length - 1 else ("draft", index + 1)
        index -= length
    raise AssertionError("no such token")


@pytest.mark.parametrize(("engine", "depth"), [("tree", 3), ("chain", 5)])
def test_stop_ids_at_every_place_of_a_round(engine: str, depth: int) -> None:
    places: Counter[tuple[str, int]] = Counter()
    requests, wanted = [], []
    for prompt, completion in free_runs(engine):
        tokens = completion.token_ids
        for stop in dict.fromkeys(tokens):
            places[place_in_round(completion, tokens.index(stop))] += 1
            requests.append(make_request(prompt=prompt, max_new_tokens=40, stop_ids=[stop]))
            wanted.append(cut(tokens, {stop}))
    for request, got, tokens in zip(requests, serve(ENGINES[engine](), requests), wanted, strict=True):
        assert got.token_ids == tokens
        assert got.stopped
        assert got.token_ids.index(request.stop_ids[0]) == len(got.token_ids) - 1
    drafts = {d for kind, d in places if kind == "draft"}
    bonuses = {d for kind, d in places if kind == "bonus"}
    print(f"{engine}: stops tried at {sorted(places.items())}")
    assert places["prefill", 0]
    assert set(range(1, depth)) <= drafts if engine == "chain" else {1, 2} <= drafts
    assert {0, 1, 2} <= bonuses


@pytest.mark.parametrize("engine", ENGINES)
def test_several_stop_ids_end_at_the_earliest(engine: str) -> None:
    rng = np.random.default_rng(0)
    requests, wanted = [], []
    for prompt, completion in free_runs(engine):
        choices = list(dict.fromkeys(completion.token_ids))
        for _ in range(3):
            stops = rng.permutation(choices)[:3].tolist()
            absent = [] if engine == "tree" else [511, 510]
            requests.append(make_request(prompt=prompt, max_new_tokens=40, stop_ids=[*absent, *stops]))
            wanted.append(cut(completion.token_ids, set(stops)))
    assert [c.token_ids for c in serve(ENGINES[engine](), requests)] == wanted


def test_id_zero_can_be_a_stop_id_and_its_absence_is_no_stop() -> None:
    runs = [(p, c) for p, c in free_runs("tree") if 0 in c.token_ids[1:-1]]
    assert len(runs) > 2
    requests = [make_request(prompt=p, max_new_tokens=40, stop_ids=[0]) for p, _ in runs]
    for (_, free), got in zip(runs, serve(tiny_engine(), requests), strict=True):
        assert got.token_ids == cut(free.token_ids, {0})
        assert got.stopped
        assert len(free.token_ids) == 40, "the padding of the stop ids must not stop at id 0"


def test_stop_ids_in_the_prompt_do_not_stop() -> None:
    requests, wanted = [], []
    for prompt, completion in free_runs("tree"):
        stop = next((t for t in prompt if t != completion.token_ids[0]), None)
        if stop is not None:
            requests.append(make_request(prompt=prompt, max_new_tokens=40, stop_ids=[stop]))
            wanted.append(cut(completion.token_ids, {stop}))
    assert len(requests) > 3
    assert [c.token_ids for c in serve(tiny_engine(), requests)] == wanted


@pytest.mark.parametrize("engine", ENGINES)
def test_budgets_are_met_exactly(engine: str) -> None:
    runs = free_runs(engine)
    requests = [make_request(prompt=p, max_new_tokens=n) for n in range(1, 21) for p, _ in runs]
    wanted = [c.token_ids[:n] for n in range(1, 21) for _, c in runs]
    completions = serve(ENGINES[engine](), requests)
    assert [c.token_ids for c in completions] == wanted
    assert not any(c.stopped for c in completions)
    assert all(c.accepted_lengths == [] for c in completions[: len(runs)]), "one token comes from the prefill alone"


def test_a_stop_at_the_last_token_of_the_budget_is_a_stop() -> None:
    requests = []
    for prompt, completion in free_runs("tree"):
        for index, token in enumerate(completion.token_ids):
            if completion.token_ids.index(token) == index:
                requests.append(make_request(prompt=prompt, max_new_tokens=index + 1, stop_ids=[token]))
                requests.append(make_request(prompt=prompt, max_new_tokens=max(index, 1), stop_ids=[token]))
    for request, completion in zip(requests, serve(tiny_engine(), requests), strict=True):
        assert completion.stopped == (completion.token_ids[-1] in request.stop_ids)
        assert len(completion.token_ids) <= request.max_new_tokens
    assert sum(c.stopped for c in serve(tiny_engine(), requests[::2])) == len(requests) // 2


def test_the_last_slots_of_the_context_and_of_the_cache() -> None:
    """Prompts up to one token short of the context, and trees that stick out of what is left."""
    rng = np.random.default_rng(1)
    small, large = tiny_engine(), tiny_engine(8 * MAX_LENGTH)
    assert large.programs.plan.capacity > small.programs.plan.capacity
    for lengths in (range(MAX_LENGTH - 12, MAX_LENGTH), (1, 30, MAX_LENGTH - 1, 56, 57, 63)):
        asked = [rng.integers(0, VOCABULARY, n).tolist() for n in lengths]
        cramped = serve(small, [make_request(prompt=p, max_new_tokens=100) for p in asked])
        roomy = serve(large, [make_request(prompt=p, max_new_tokens=MAX_LENGTH - len(p)) for p in asked])
        assert [len(p) + len(c.token_ids) for p, c in zip(asked, cramped, strict=True)] == [MAX_LENGTH] * len(asked)
        for a, b in zip(cramped, roomy, strict=True):
            assert (a.token_ids, a.accepted_lengths, a.stopped) == (b.token_ids, b.accepted_lengths, False)


def test_a_cache_without_a_row_to_spare() -> None:
    """Capacity is rounded up; here it is exactly what the longest sequence and a whole path need."""
    exact = tiny_engine().programs.plan.capacity - (TREE.max_depth + 1) - 1
    # Whole chunks of 5 end at the same row: nothing but the path decides.
    engine, large = tiny_engine(exact, chunk=5), tiny_engine(8 * MAX_LENGTH)
    assert engine.programs.plan.capacity == tiny_engine().programs.plan.capacity
    assert dataclasses.replace(engine.programs.plan, max_length=exact + 1).capacity > engine.programs.plan.capacity
    rng = np.random.default_rng(2)
    asked = [rng.integers(0, VOCABULARY, n).tolist() for n in (exact - 1, exact - 2, exact - 7, 3, exact - 30)]
    tight = serve(engine, [make_request(prompt=p, max_new_tokens=999) for p in asked])
    roomy = serve(large, [make_request(prompt=p, max_new_tokens=exact - len(p)) for p in asked])
    assert [c.token_ids for c in tight] == [c.token_ids for c in roomy]
    assert [c.accepted_lengths for c in tight] == [c.accepted_lengths for c in roomy]


@pytest.mark.parametrize("rounds", [None, 1, 2, 3])
def test_slots_change_hands(rounds: int | None) -> None:
    """More requests than slots, ending at different times: each is what it is alone in an engine of its own."""
    rng = np.random.default_rng(3)
    requests = []
    for _ in range(17):
        stops = [0] if rng.random() < 0.4 else []
        prompt = rng.integers(0, VOCABULARY, int(rng.integers(1, 40))).tolist()
        requests.append(make_request(prompt=prompt, max_new_tokens=int(rng.integers(1, 40)), stop_ids=stops))
    together = serve(tiny_engine(), requests, rounds_per_dispatch=rounds)
    engine = tiny_engine(speculative=False)
    for request, got in zip(requests, together, strict=True):
        alone = serve(engine, [request])[0]
        assert (got.token_ids, got.stopped) == (alone.token_ids, alone.stopped)
    assert len({len(c.token_ids) for c in together}) > 5
    again = serve(tiny_engine(), requests[::-1])
    for a, b in zip(together, again[::-1], strict=True):
        assert a == b, "place, mates and former owners of a slot must not matter"


def test_dispatches_bring_what_their_rounds_emitted() -> None:
    requests = [make_request(prompt=p, max_new_tokens=30) for p in prompts("tree")[:3]]
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    completions = {}
    for deltas in steps(tiny_engine(), requests, rounds_per_dispatch=1):
        for delta in deltas:
            seen[delta.index].append(len(delta.token_ids))
            if delta.output:
                completions[delta.index] = delta.output.metrics
    for index, pieces in seen.items():
        assert pieces == [1, *completions[index].accepted_lengths]


@pytest.mark.parametrize("rounds", [1, 2])
def test_abort(rounds: int) -> None:
    runs = free_runs("tree")
    requests = [make_request(prompt=p, max_new_tokens=40, rounds_per_dispatch=rounds) for p, _ in runs]
    engine = tiny_engine()
    for index, request in enumerate(requests):
        engine.add_request(dataclasses.replace(request, index=index))
    outputs = {}
    number = 0
    while engine.has_unfinished_requests:
        number += 1
        if number == 4:
            engine.abort(requests[1].request_id)
            engine.abort(requests[5].request_id)  # not begun yet
            engine.abort("never heard of")
        outputs.update({delta.index: delta.output for delta in engine.step() if delta.output})
    assert set(outputs) == set(range(len(requests)))
    for index, (_, free) in enumerate(runs):
        [got] = outputs[index].outputs
        if index in (1, 5):
            assert len(got.token_ids) < len(free.token_ids)
            assert (index == 5) == (not got.token_ids)
            assert got.token_ids == free.token_ids[: len(got.token_ids)]
            assert got.finish_reason == "abort"
        else:
            assert completed(engine, outputs[index]) == free
    # Nothing of an abort stays behind.
    assert serve(engine, requests) == [c for _, c in runs]


def test_an_aborted_request_is_not_decoded_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the dispatch that is in flight when it is aborted."""
    prompt, _ = free_runs("tree")[0]
    engine = tiny_engine()
    dispatches = []
    decode = engine.programs.decode
    monkeypatch.setattr(
        engine.programs, "decode", lambda *a, **options: (dispatches.append(1), decode(*a, **options))[1]
    )
    request = make_request(prompt=prompt, max_new_tokens=40, rounds_per_dispatch=1)
    engine.add_request(request)
    while not engine.step():
        pass
    before = len(dispatches)
    engine.abort(request.request_id)
    [last] = engine.step()
    assert last.output is not None
    assert not engine.has_unfinished_requests
    assert len(dispatches) == before


def test_requests_that_are_forgotten_leave_a_usable_engine() -> None:
    runs = free_runs("tree")
    requests = [make_request(prompt=p, max_new_tokens=40, rounds_per_dispatch=1) for p, _ in runs]
    engine = tiny_engine()
    for request in requests:
        engine.add_request(request)
    for _ in range(3):
        engine.step()
    engine.reset()
    assert not engine.has_unfinished_requests
    assert serve(engine, requests) == [c for _, c in runs]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request(prompt=[], max_new_tokens=1), "prompt 0 is empty"),
        (make_request(prompt=[1] * MAX_LENGTH, max_new_tokens=1), f"prompt 0 has {MAX_LENGTH} tokens"),
        (make_request(prompt=[1], max_new_tokens=-1), "max_new_tokens of prompt 0 must be at least 0"),
        (make_request(prompt=[1], max_new_tokens=1, stop_ids=range(9)), "9 stop ids; at most 8"),
    ],
)
def test_requests_that_do_not_fit_are_refused_before_anything_runs(request_: Request, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_engine().add_request(request_)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"total_tokens": 1}, "total_tokens must be an integer of at least 2, got 1"),
        ({"depth": -1}, "depth must be an integer of at least 0"),
        ({"top_k": 0}, "top_k must be an integer of at least 1"),
        ({"top_k": True}, "top_k must be an integer"),
        ({"depth": 2.0}, "depth must be an integer"),
        ({"total_tokens": 32}, r"exceeds the 31 nodes that depth 3 and top_k 3 can reach"),
    ],
)
def test_trees_that_cannot_be_are_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeConfig(**({"total_tokens": 14, "depth": 3, "top_k": 3} | values))


def test_a_chain_is_a_tree() -> None:
    assert TreeConfig.chain(5) == TreeConfig(total_tokens=6, depth=4, top_k=1)
    assert TreeConfig.chain(1).max_depth == 1
    assert TreeConfig(total_tokens=3, depth=5, top_k=2).max_depth == 2
    for wrong in (0, -1, True, 2.0):
        with pytest.raises(ValueError, match="num_speculative_tokens"):
            TreeConfig.chain(wrong)  # type: ignore[arg-type]
