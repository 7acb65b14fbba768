"""Speculative decoding says exactly what plain decoding says, on random models whose heads are often right."""

import functools
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support import golden
from support.drive import serve
from support.float64_models import Float64Llama
from support.near_ties import NearTies
from support.tiny import draft_config, llama_config, random_head, random_llama

from eagle_jax.decoding.engine import Completion, Engine, Request
from eagle_jax.decoding.tree import TreeConfig
from eagle_jax.models import Eagle3Head, Llama

VOCABULARY, MAX_LENGTH, CHUNK = 6, 64, 8
TARGET = llama_config(vocab_size=VOCABULARY)
HEAD = draft_config(TARGET, draft_vocab_size=5)

# Three programs each (a state, a chunk, rounds), and three for the plain engine: 15 in all by default.
SHAPES = {
    "chain of 1, 8 slots": (TreeConfig.chain(1), 8),
    "chain of 5, 3 slots": (TreeConfig.chain(5), 3),
    "tree 12/3/3, 8 slots": (TreeConfig(total_tokens=12, depth=3, top_k=3), 8),
    "tree 31/1/5, 1 slot": (TreeConfig(total_tokens=31, depth=1, top_k=5), 1),
}
CAMPAIGN = {
    f"{'chain' if k == 1 else 'tree'} {n}/{d}/{k}, {b} slots": (TreeConfig(total_tokens=n, depth=d, top_k=k), b)
    for n, d, k, b in (
        (3, 1, 1, 3), (4, 2, 1, 8), (5, 3, 1, 1), (7, 5, 1, 3), (8, 6, 1, 8), (9, 7, 1, 1), (2, 0, 5, 8), (6, 0, 5, 3),
        (10, 3, 2, 1), (16, 7, 2, 3), (40, 4, 5, 8), (60, 7, 5, 3), (5, 7, 5, 8), (2, 4, 2, 3),
    )
}  # fmt: skip


def target_and_head(seed: int) -> tuple[Llama, Eagle3Head]:
    return random_llama(TARGET, seed), random_head(HEAD, seed + 1)


def plain(target: Llama, requests: list[Request]) -> list[Completion]:
    return serve(Engine(target, None, tree=None, slots=8, max_length=MAX_LENGTH, prefill_chunk=CHUNK), requests)


def speculative(
    target: Llama, head: Eagle3Head, tree: TreeConfig, slots: int, requests: list[Request]
) -> list[Completion]:
    engine = Engine(target, head, tree=tree, slots=slots, max_length=MAX_LENGTH, prefill_chunk=CHUNK)
    return serve(engine, requests)


class Campaign:
    """One shape over many random draws."""

    def __init__(self, tree: TreeConfig, slots: int):
        self.tree, self.slots = tree, slots
        self.ties = NearTies()
        self.lengths: Counter[int] = Counter()

    def draw(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        target, head = target_and_head(seed)
        requests = []
        for _ in range(int(rng.integers(1, 2 * self.slots + 1))):
            prompt = rng.integers(0, VOCABULARY, int(rng.integers(1, 31))).tolist()
            stops = rng.integers(0, VOCABULARY, int(rng.integers(0, 2))).tolist() if rng.random() < 0.3 else []
            budget = int(rng.integers(1, 45))  # some reach past the context
            requests.append(Request(prompt=prompt, max_new_tokens=budget, stop_ids=stops))
        wanted = plain(target, requests)
        got = speculative(target, head, self.tree, self.slots, requests)
        reference = functools.cache(lambda: Float64Llama(target))
        for request, a, b in zip(requests, got, wanted, strict=True):
            same = self.ties.compare(a.token_ids, b.token_ids, request.prompt, lambda t: reference()(t)[0][-1])
            assert not same or a.stopped == b.stopped
            room = min(request.max_new_tokens, MAX_LENGTH - len(request.prompt))
            assert len(a.token_ids) == room or (a.stopped and a.token_ids[-1] in request.stop_ids)
            assert not set(a.token_ids[:-1]) & set(request.stop_ids)
            self.lengths.update(a.accepted_lengths)

    def check(self) -> None:
        self.ties.check()
        print(f"{self.tree} with {self.slots} slots: accepted lengths {sorted(self.lengths.items())}")
        assert len([n for n in self.lengths.values() if n > 5]) >= min(3, self.tree.max_depth + 1), (
            "drafts must be accepted"
        )


def campaign(tree: TreeConfig, slots: int, examples: int) -> None:
    case = Campaign(tree, slots)

    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.integers(0, 2**32 - 1))
    def every_draw(seed: int) -> None:
        case.draw(seed)

    every_draw()
    case.check()


@pytest.mark.parametrize("shape", SHAPES)
def test_random_models(shape: str) -> None:
    campaign(*SHAPES[shape], examples=50)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES | CAMPAIGN)
def test_random_models_at_length(shape: str) -> None:
    campaign(*(SHAPES | CAMPAIGN)[shape], examples=200)


def test_exactly_equal_logits_go_to_the_lowest_id() -> None:
    """Two identical rows of the output head: a tie in every program, whatever its shapes."""
    target, head = target_and_head(3)
    for module in (target.lm_head, head.lm_head):
        assert module is not None
        weight = np.array(module.weight[...])
        weight[3] = weight[1]
        module.weight.set_value(jnp.asarray(weight))
    requests = [Request(prompt=[i, 1, 3], max_new_tokens=40) for i in range(VOCABULARY)]
    wanted = plain(target, requests)
    tree, slots = SHAPES["tree 12/3/3, 8 slots"]
    got = speculative(target, head, tree, slots, requests)
    assert [c.token_ids for c in got] == [c.token_ids for c in wanted]
    emitted = {t for c in wanted for t in c.token_ids}
    assert 3 not in emitted
    assert 1 in emitted


def test_golden_target_says_what_its_float64_definition_says() -> None:
    """Plain decoding against numpy, token for token: the anchor of every equality above."""
    target = golden.target("target_A").model
    reference = Float64Llama(target)
    ties = NearTies(lambda tokens: reference(tokens)[0][-1])
    rng = np.random.default_rng(0)
    requests = [Request(prompt=rng.integers(3, 512, n).tolist(), max_new_tokens=40) for n in (1, 2, 17, 30)]
    for request, completion in zip(
        requests,
        serve(Engine(target, None, tree=None, slots=3, max_length=128, prefill_chunk=16), requests),
        strict=True,
    ):
        tokens = [*request.prompt, *completion.token_ids]
        choices = reference(tokens)[0].argmax(-1)[len(request.prompt) - 1 : -1].tolist()
        ties.compare(completion.token_ids, choices, request.prompt)
    ties.check()
