"""Trees whose right answer is known: every round accepts exactly what it should, whoever else is in the batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.drive import make_plan, prefill_slots, run_to_end
from support.float64_models import Float64Llama
from support.near_ties import NearTies
from support.oracle import Script, with_oracle
from support.tiny import llama_config, random_llama

from eagle_jax.decoding.state import LENGTH

SLOTS, DEPTH, NEW, MAX_LENGTH, CHUNK = 5, 4, 40, 72, 8
BEYOND = DEPTH + 2  # tokens known past the budget, so that the drafts of the last round are right as well
VOCABULARY = 97
PROMPTS = (1, 2, 7, 8, 21)  # lengths around the chunk's


@pytest.fixture(scope="module")
def texts() -> tuple[Any, list[list[int]]]:
    """A target and what it writes behind five prompts, by plain decoding; checked against float64."""
    target = random_llama(llama_config(vocab_size=VOCABULARY), seed=5)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, n).tolist() for n in PROMPTS]
    plan, weights = make_plan(target, None, None, slots=SLOTS, max_length=MAX_LENGTH, prefill_chunk=CHUNK)
    state = prefill_slots(plan, weights, prompts, [len(p) + NEW + BEYOND for p in prompts])
    _, reports = run_to_end(plan, weights, state)
    texts = [prompt + report.token_ids for prompt, report in zip(prompts, reports, strict=True)]
    reference, ties = Float64Llama(target), NearTies()
    for prompt, text in zip(prompts, texts, strict=True):
        choices = reference(text)[0].argmax(-1)[len(prompt) - 1 : -1].tolist()
        ties.compare(text[len(prompt) :], choices, prompt, lambda tokens: reference(tokens)[0][-1])
    ties.check()
    assert all(len(set(text)) > 5 for text in texts), "texts that repeat one token prove little"
    return target, texts


def run(
    target: Any, texts: list[list[int]], children: int, spoiled: np.ndarray, ranks: np.ndarray
) -> list[dict[str, Any]]:
    """Decodes every text with the oracle; `spoiled [B, R]`, `ranks [B, R, D]`."""
    base, weights = make_plan(target, None, None, slots=SLOTS, max_length=MAX_LENGTH, prefill_chunk=CHUNK)
    table = np.zeros((SLOTS, MAX_LENGTH), np.int32)
    for row, text in zip(table, texts, strict=True):
        row[: len(text)] = text
    script = Script(jnp.asarray(table), jnp.asarray(spoiled), jnp.asarray(ranks))
    plan, weights = with_oracle(base, weights, script, DEPTH, children)
    prompts = [text[: len(text) - NEW - BEYOND] for text in texts]
    state = prefill_slots(plan, weights, prompts, [len(text) - BEYOND for text in texts])
    state, reports = run_to_end(plan, weights, state)
    keys = jax.device_get(state.target_cache.keys[1])
    return [
        {
            "text": prompts[b] + report.token_ids,
            "lengths": report.round_lengths,
            "depths": report.accepted_at_depth,
            "finish": report.finish,
            "keys": keys[b, :, : report.length],
        }
        for b, report in enumerate(reports)
    ]


def schedule(children: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """For each slot and round, where the right path is spoiled (D + 1: nowhere), and the rank of the right child."""
    rng = np.random.default_rng(seed)
    spoiled = rng.integers(1, DEPTH + 2, (SLOTS, MAX_LENGTH + 1)).astype(np.int32)
    spoiled[0], spoiled[1] = DEPTH + 1, 1  # all accepted, nothing accepted
    ranks = rng.integers(0, children, (SLOTS, MAX_LENGTH + 1, DEPTH)).astype(np.int32)
    return spoiled, ranks


def expected_lengths(spoiled: np.ndarray) -> list[int]:
    """Tokens of each round, the last one cut at the budget; the prefill gives the first token."""
    out: list[int] = []
    while sum(out) + 1 < NEW:
        out.append(min(int(spoiled[len(out)]), NEW - 1 - sum(out)))
    return out


@pytest.mark.parametrize("children", [1, 3])
def test_accepted_lengths_are_exactly_those_of_the_script(texts: Any, children: int) -> None:
    target, wanted = texts
    spoiled, ranks = schedule(children, seed=children)
    results = run(target, wanted, children, spoiled, ranks)
    for slot, result in enumerate(results):
        lengths = expected_lengths(spoiled[slot])
        assert result["lengths"] == lengths
        assert result["text"] == wanted[slot][:-BEYOND]
        assert result["finish"] == LENGTH
        rounds = spoiled[slot, : len(lengths)]
        assert result["depths"][:DEPTH] == [int((rounds > d).sum()) for d in range(1, DEPTH + 1)]
        assert not any(result["depths"][DEPTH:]), "a decoy was accepted"
    assert results[0]["lengths"][:-1] == [DEPTH + 1] * (len(results[0]["lengths"]) - 1)
    assert set(results[1]["lengths"]) == {1}
    assert {n for r in results for n in r["lengths"]} == set(range(1, DEPTH + 2))
    # The caches hold what plain decoding left there: the rows do not remember through which tree they came.
    none = run(target, wanted, children, np.ones_like(spoiled), ranks)
    for result, plain in zip(results, none, strict=True):
        np.testing.assert_allclose(result["keys"], plain["keys"], atol=1e-5 * np.abs(plain["keys"]).max())


@pytest.mark.parametrize("children", [1, 3])
def test_a_row_does_not_depend_on_its_place_or_mates(texts: Any, children: int) -> None:
    target, wanted = texts
    spoiled, ranks = schedule(children, seed=10 + children)
    straight = run(target, wanted, children, spoiled, ranks)
    order = [3, 0, 4, 2, 1]
    permuted = run(target, [wanted[i] for i in order], children, spoiled[order], ranks[order])
    others = spoiled.copy()
    others[1:] = schedule(children, seed=99)[0][1:]
    strangers = run(target, wanted, children, others, ranks)
    for place, slot in enumerate(order):
        for field in ("text", "lengths", "depths"):
            assert permuted[place][field] == straight[slot][field]
    for field in ("text", "lengths", "depths"):
        assert strangers[0][field] == straight[0][field]


@pytest.mark.parametrize("children", [1, 3])
def test_the_right_child_may_have_any_rank(texts: Any, children: int) -> None:
    target, wanted = texts
    spoiled = np.full((SLOTS, MAX_LENGTH + 1), DEPTH + 1, np.int32)
    ranks = np.zeros((SLOTS, MAX_LENGTH + 1, DEPTH), np.int32)
    for slot in range(SLOTS):
        ranks[slot] = [(slot + d) % children for d in range(DEPTH)]
    for slot, result in enumerate(run(target, wanted, children, spoiled, ranks)):
        assert result["text"] == wanted[slot][:-BEYOND]
        assert result["lengths"] == expected_lengths(spoiled[slot])
