"""Adaptive speculation: texts are those of plain decoding, whatever candidates were run; the choice falls, climbs and probes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import golden
from support.drive import make_engine, make_plan, make_request, prefill_slots, serve
from support.float64_models import Float64Llama
from support.near_ties import NearTies
from support.tiny import draft_config, llama_config, random_head, random_llama

from eagle_jax.decoding.adaptive import DUE_ROWS, FIRST_GUESS, AdaptiveSpeculation, AdaptiveState, forced, gain
from eagle_jax.decoding.loop import decode, init_state
from eagle_jax.decoding.rules import make_rule
from eagle_jax.drafters.tree import StaticTree, TreeConfig
from eagle_jax.engine.core import EngineCore
from eagle_jax.engine.request import Request
from eagle_jax.sampling import SamplingMode

SPECULATION = AdaptiveSpeculation((None, TreeConfig.chain(2), TreeConfig(total_tokens=8, depth=3, top_k=3)))
COSTS = {
    "dear": [1.0, 1.5, 2.4],
    "plain": forced(SPECULATION, 0),
    "chain": forced(SPECULATION, 1),
    "tree": forced(SPECULATION, 2),
}
OPTIONS = {"slots": 2, "max_length": 4000, "prefill_chunk": 16}


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    target = random_llama(llama_config(), 11)
    return target, random_head(draft_config(target.config), 12)


@pytest.fixture(scope="module")
def engine(models: tuple[Any, Any]) -> EngineCore:
    return make_engine(*models, tree=SPECULATION, costs=COSTS["dear"], **OPTIONS)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    rng = np.random.default_rng(5)
    return [
        make_request(prompt=rng.integers(0, 7, n).tolist(), max_new_tokens=m)
        for n, m in ((3, 90), (17, 60), (1, 1), (30, 80))
    ]


@pytest.fixture(scope="module")
def plain(models: tuple[Any, Any], requests: list[Request]) -> list[list[int]]:
    engine = make_engine(models[0], None, tree=None, **OPTIONS)
    return [completion.token_ids for completion in serve(engine, requests)]


@pytest.mark.parametrize("costs", COSTS)
def test_texts_are_those_of_plain_decoding(models, engine, requests, plain, costs) -> None:
    engine.programs.costs[SamplingMode.GREEDY] = COSTS[costs]
    completions = serve(engine, requests)
    reference, ties = Float64Llama(models[0]), NearTies()
    for completion, wanted, request in zip(completions, plain, requests, strict=True):
        ties.compare(completion.token_ids, wanted, request.prompt_token_ids, lambda tokens: reference(tokens)[0][-1])
        assert len(completion.drafted) == len(completion.accepted_lengths)
        depth_of = dict(zip(SPECULATION.drafted, SPECULATION.depths, strict=True))
        assert set(completion.drafted) <= set(SPECULATION.drafted)
        pairs = zip(completion.drafted, completion.accepted_lengths, strict=True)
        assert all(length <= depth_of[drafted] + 1 for drafted, length in pairs)
    ties.check()
    used = {drafted for completion in completions for drafted in completion.drafted}
    expected = {"plain": {0}, "chain": {2}, "tree": {7}}.get(costs)
    assert used == expected if expected else 0 in used and len(used) > 1
    lengths = [n for completion in completions for n in completion.accepted_lengths]
    assert (max(lengths) > 1) == (costs != "plain")
    # The same requests take the same candidates, also when tokens are read often.
    again = serve(engine, requests, rounds_per_dispatch=3) if costs == "dear" else completions
    alone = serve(engine, requests[:1]) if costs == "dear" else completions[:1]
    assert [c.token_ids for c in again] == [c.token_ids for c in completions]
    # What earlier calls have lost or won does not matter.
    assert [c.drafted for c in serve(engine, requests)] == [c.drafted for c in completions]
    assert alone[0].token_ids == completions[0].token_ids


def test_the_program_updates_the_caches_in_place(engine) -> None:
    """As the programs without a choice do: each candidate is a loop, because XLA would copy the caches for a conditional."""
    state = jax.eval_shape(init_state, engine.programs.plan, engine.programs.weights)
    cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.target_cache, state.draft.cache)))
    memory = engine.programs.compile_program("decode", SamplingMode.GREEDY).memory_analysis()
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < 0.2 * cache


def test_drafting_resumes_after_plain_rounds_as_if_it_had_never_stopped(models) -> None:
    """The draft cache does not tell through which candidates it was filled, nor how long features were only kept."""
    plan, weights = make_plan(*models, SPECULATION, **OPTIONS)
    prompts = [[1, 2, 3, 4], [5, 0]]

    def run(*parts: tuple[int, int]) -> Any:
        state = prefill_slots(plan, weights, prompts, [110, 110])
        drafted: list[int] = []
        for candidate, rounds in parts:
            costs = jnp.asarray(forced(SPECULATION, candidate))
            state = dataclasses.replace(state, adaptive=dataclasses.replace(state.adaptive, costs=costs))
            for _ in range(-(-rounds // 20)):  # a report has room for so many
                arguments = jax.device_put((np.ones((2,), bool), np.int32(min(rounds, 20)), np.int32(99)))
                with jax.transfer_guard("disallow"):  # the choice, too, is made on the device
                    state, report = decode(plan, weights, state, *arguments)
                drafted.extend(plan.layout.unpack(report)[0].drafted)
                rounds -= 20
        return jax.device_get(state), drafted

    chains, _ = run((1, 200))
    mixed, drafted = run((0, 5), (2, 3), (0, DUE_ROWS + 8), (1, 6), (0, 1), (2, 200))
    assert chains.tokens.tolist() == mixed.tokens.tolist()
    assert drafted[:8] == [0] * 5 + [7] * 3
    assert (mixed.draft.lengths > DUE_ROWS + 16).all()
    for a, b in zip(jax.tree.leaves(chains.draft.cache), jax.tree.leaves(mixed.draft.cache), strict=True):
        for slot in range(2):
            rows = min(chains.draft.lengths[slot], mixed.draft.lengths[slot])
            np.testing.assert_allclose(a[slot, :, :rows], b[slot, :, :rows], atol=2e-5 * np.abs(a).max())


def simulate(costs: list[float], rate: Any, tokens: int, seed: int = 0) -> tuple[float, list[int]]:
    """Time a token in plain rounds, and the candidates that were run, for a head whose chains accept at a rate."""
    rng = np.random.default_rng(seed)
    adaptive = AdaptiveState.empty(SPECULATION, 1)
    running = jnp.ones((1,), bool)
    steps = [
        jax.jit(lambda state, count, r=r: state.record(SPECULATION, r, count, running).choose(SPECULATION, running))
        for r in range(len(SPECULATION.candidates))
    ]
    adaptive = dataclasses.replace(adaptive, costs=jnp.asarray(costs, jnp.float32)).choose(SPECULATION, running)
    done, spent, used = 0, 0.0, []
    while done < tokens:
        candidate = int(adaptive.candidate)
        used.append(candidate)
        accepts = 0 if candidate == 0 else 1 - (1 - rate(done)) ** gain(SPECULATION.candidates[candidate])
        count = 0
        while count < SPECULATION.depths[candidate] and rng.random() < accepts:
            count += 1
        adaptive = steps[candidate](adaptive, jnp.asarray([count], jnp.int32))
        done, spent = done + count + 1, spent + costs[candidate] / costs[0]
    return spent / done, used


def test_the_choice_falls_to_plain_decoding_and_climbs() -> None:
    costs = [1.0, 1.3, 1.7]
    per_token, used = simulate(costs, lambda _: 0.0, 256)
    assert per_token < 1.03, "never slower than plain decoding by more than 3 %"
    assert used[0] != 0, "it starts by drafting"
    assert used.count(0) > 0.9 * len(used)
    assert any(used[100:]), "it probes now and then"
    per_token, used = simulate(costs, lambda _: 0.9, 256)
    assert set(used[10:]) == {2}
    assert per_token < 0.5
    # A beginning that is hard is not held against the rest: attempts come soon at first.
    for seed in range(3):
        used = simulate(costs, lambda done: 0.9 * (done > 16), 64, seed)[1]
        plain = used.index(0)
        assert sum(candidate > 0 for candidate in used[plain : plain + 24]) >= 2
    # Where drafting costs next to nothing more, estimates are never low enough to give it up: the accounts are.
    for cheap in ([1.0, 1.04, 1.16], [1.0, 1.02, 1.3], [1.0, 1.1, 1.11]):
        assert simulate(cheap, lambda _: 0.0, 256)[0] < 1.018
        assert simulate(cheap, lambda _: 0.0, 1024)[0] < 1.009
        assert simulate(cheap, lambda _: 0.3, 256)[0] < 0.95
    # No attempt is made that costs too much.
    assert not any(simulate([1.0, 1e30, 1e30], lambda _: 0.9, 64)[1])
    # A text that becomes easy is noticed, and one that becomes hard.
    assert simulate(costs, lambda done: 0.9 * (done > 128), 400)[1][-1] == 2
    assert simulate(costs, lambda done: 0.9 * (done < 100), 250)[1][-1] == 0


def test_what_belongs_to_all_slots_is_forgotten_with_the_last_of_them() -> None:
    running, zero = jnp.ones((2,), bool), jnp.zeros((2,), jnp.int32)
    for slots in (1, 2):
        fresh = AdaptiveState.empty(SPECULATION, slots)
        fresh = dataclasses.replace(fresh, costs=jnp.asarray([1.0, 1.5, 2.5]))
        used = fresh.record(SPECULATION, 2, zero[:slots], running[:slots])
        assert float(used.in_hand - fresh.in_hand) == pytest.approx(1 - 2.5 * 0.995)
        won = fresh.record(SPECULATION, 1, zero[:slots] + jnp.arange(1, slots + 1), running[:slots])
        assert float(won.in_hand - fresh.in_hand) == pytest.approx({1: 2, 2: 2.5}[slots] - 1.5 * 0.995)
        attempt = dataclasses.replace(used, plain_rounds=zero[0] + 9)
        vain = attempt.record(SPECULATION, 1, zero[:slots], running[:slots])
        assert float(vain.probe_budget) == pytest.approx(float(attempt.probe_budget) / 2)
        better = vain.record(SPECULATION, 1, zero[:slots] + 2, running[:slots])
        assert float(better.probe_budget) == pytest.approx(float(attempt.probe_budget))
        assert float(vain.record(SPECULATION, 1, zero[:slots], running[:slots]).probe_budget) == vain.probe_budget
        names = ("plain_rounds", "probe_budget", "in_hand")
        started = dataclasses.replace(vain, plain_rounds=zero[0] + 3).start(zero[0])
        kept = [float(getattr(started, name)) for name in names]
        assert (kept == [float(getattr(fresh, name)) for name in names]) == (slots == 1)
        assert float(started.tested[0].sum()) == 0
        assert all(float(getattr(started.restart(), name)) == float(getattr(fresh, name)) for name in names)


def test_the_expected_lengths_are_those_of_the_guess_before_anything_was_seen() -> None:
    lengths = AdaptiveState.empty(SPECULATION, 1).expected_lengths(SPECULATION)[0]
    chance = 1 - (1 - FIRST_GUESS) ** gain(SPECULATION.candidates[2])
    wanted = [1, 1 + 0.5 + 0.25, 1 + chance + chance**2 + chance**3 + chance**4]
    np.testing.assert_allclose(lengths, wanted, rtol=1e-5)


@pytest.mark.slow
def test_an_accepting_head_climbs_and_a_batch_is_one_choice() -> None:
    target, head = golden.target("target_A").model, golden.draft("head_A_e3", "target_A").head
    adaptive = AdaptiveSpeculation((None, TreeConfig.chain(1), TreeConfig(total_tokens=12, depth=2, top_k=4)))
    engine = make_engine(target, head, tree=adaptive, costs=[1.0, 1.5, 1.55], slots=2, max_length=96, prefill_chunk=16)
    completions = serve(engine, [make_request(prompt=p, max_new_tokens=60) for p in ([5, 6, 7, 8], [1, 300])])
    assert completions[0].drafted[-5:] == [11] * 5
    together = min(len(completion.drafted) for completion in completions)
    assert completions[0].drafted[:together] == completions[1].drafted[:together]


def test_what_cannot_be_a_choice_is_said(models) -> None:
    with pytest.raises(ValueError, match="plain decoding"):
        AdaptiveSpeculation((TreeConfig.chain(1), None))
    with pytest.raises(ValueError, match="differ"):
        AdaptiveSpeculation((None, TreeConfig.chain(1), TreeConfig.chain(1)))
    assert AdaptiveSpeculation((None, StaticTree.from_paths([[0], [1]]))).max_depth == 1
    with pytest.raises(ValueError, match="works with one shape of trees"):
        make_engine(*models, tree=SPECULATION, rule=make_rule("block"), **OPTIONS)
    with pytest.raises(ValueError, match="costs must hold a positive time for each of 3 candidates"):
        serve(make_engine(*models, tree=SPECULATION, costs=[1.0], **OPTIONS), [make_request([1], 2)])
