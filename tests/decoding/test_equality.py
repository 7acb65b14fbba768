"""Speculative decoding says exactly what plain decoding says, on random models whose heads are often right."""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support import golden
from support.drive import Completion, make_engine, make_request, serve
from support.float64_models import Float64Llama
from support.near_ties import NearTies
from support.tiny import draft_config, llama_config, random_head, random_llama

from eagle_jax.drafters.tree import StaticTree, TreeConfig
from eagle_jax.engine.request import Request
from eagle_jax.models import DraftConfig, Eagle3Head, Llama, LlamaConfig

MAX_LENGTH, CHUNK = 64, 8


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is compiled: three programs each (a state, a chunk, rounds)."""

    tree: TreeConfig | StaticTree
    slots: int
    vocabulary: int = 6
    draft_vocabulary: int = 5

    @property
    def kind(self) -> str:
        return "static" if isinstance(self.tree, StaticTree) else "chain" if self.tree.top_k == 1 else "dynamic"

    def __str__(self) -> str:
        return f"{self.kind} {self.tree.total_tokens}/{self.tree.max_depth}/{self.tree.top_k}, {self.slots} slots"

    @functools.cached_property
    def configs(self) -> tuple[LlamaConfig, DraftConfig]:
        target = llama_config(vocab_size=self.vocabulary)
        return target, draft_config(target, draft_vocab_size=self.draft_vocabulary)


def comb(depth: int, children: int) -> StaticTree:
    """A path of best guesses with `children` at each of its nodes."""
    return StaticTree.from_paths([(0,) * level + (rank,) for level in range(depth) for rank in range(children)])


def pairwise() -> list[Shape]:
    """Rows in which each pair of (kind, depth, top_k, slots) occurs that can: top_k 8 and V with vocabularies of just that."""
    rows = []
    for depth in range(1, 9):
        for column, children in enumerate((1, 2, 8, 6)):
            slots = (1, 3, 8)[(4 * depth + column) % 3]
            vocabulary, draft = {8: (9, 8), 6: (6, 6)}.get(children, (6, 5))
            tree: TreeConfig | StaticTree
            if children == 1:
                tree = TreeConfig.chain(depth)
            elif (depth + column // 2 + depth // 4) % 2:
                tree = comb(depth, children)
            else:
                pool = children + (depth - 1) * children**2
                tree = TreeConfig(total_tokens=min(pool + 1, 40), depth=depth - 1, top_k=children)
            rows.append(Shape(tree, slots, vocabulary, draft))
    return rows


# Fifteen programs, and three for each vocabulary's plain engine.
SHAPES = [
    Shape(TreeConfig.chain(1), 8),
    Shape(TreeConfig.chain(5), 3),
    Shape(TreeConfig(total_tokens=12, depth=3, top_k=3), 8),
    Shape(TreeConfig(total_tokens=31, depth=1, top_k=5), 1),
    Shape(comb(4, 3), 3),
]
CAMPAIGN = [
    Shape(TreeConfig(total_tokens=n, depth=d, top_k=k), b)
    for n, d, k, b in (
        (3, 1, 1, 3), (4, 2, 1, 8), (5, 3, 1, 1), (7, 5, 1, 3), (8, 6, 1, 8), (9, 7, 1, 1), (2, 0, 5, 8), (6, 0, 5, 3),
        (10, 3, 2, 1), (16, 7, 2, 3), (40, 4, 5, 8), (60, 7, 5, 3), (5, 7, 5, 8), (2, 4, 2, 3),
    )
]  # fmt: skip


def target_and_head(seed: int, shape: Shape = SHAPES[0]) -> tuple[Llama, Eagle3Head]:
    target, head = shape.configs
    return random_llama(target, seed), random_head(head, seed + 1)


def plain(target: Llama, requests: list[Request]) -> list[Completion]:
    return serve(make_engine(target, None, tree=None, slots=8, max_length=MAX_LENGTH, prefill_chunk=CHUNK), requests)


def speculative(target: Llama, head: Eagle3Head, shape: Shape, requests: list[Request]) -> list[Completion]:
    engine = make_engine(target, head, tree=shape.tree, slots=shape.slots, max_length=MAX_LENGTH, prefill_chunk=CHUNK)
    return serve(engine, requests)


class Campaign:
    """One shape over many random draws."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.ties = NearTies()
        self.lengths: Counter[int] = Counter()

    def draw(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        target, head = target_and_head(seed, self.shape)
        requests = []
        for _ in range(int(rng.integers(1, 2 * self.shape.slots + 1))):
            prompt = rng.integers(0, self.shape.vocabulary, int(rng.integers(1, 31))).tolist()
            stops = (
                rng.integers(0, self.shape.vocabulary, int(rng.integers(0, 2))).tolist() if rng.random() < 0.3 else []
            )
            budget = int(rng.integers(1, 45))  # some reach past the context
            requests.append(make_request(prompt=prompt, max_new_tokens=budget, stop_ids=stops))
        wanted = plain(target, requests)
        got = speculative(target, head, self.shape, requests)
        reference = functools.cache(lambda: Float64Llama(target))
        for request, a, b in zip(requests, got, wanted, strict=True):
            same = self.ties.compare(
                a.token_ids, b.token_ids, request.prompt_token_ids, lambda t: reference()(t)[0][-1]
            )
            assert not same or a.stopped == b.stopped
            room = min(request.max_new_tokens, MAX_LENGTH - len(request.prompt_token_ids))
            assert len(a.token_ids) == room or (a.stopped and a.token_ids[-1] in request.stop_ids)
            assert not set(a.token_ids[:-1]) & set(request.stop_ids)
            self.lengths.update(a.accepted_lengths)

    def check(self) -> None:
        self.ties.check()
        print(f"{self.shape}: accepted lengths {sorted(self.lengths.items())}")
        assert len([n for n in self.lengths.values() if n > 2]) >= min(3, self.shape.tree.max_depth + 1), (
            "drafts must be accepted"
        )


def campaign(shape: Shape, examples: int) -> None:
    case = Campaign(shape)

    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.integers(0, 2**32 - 1))
    def every_draw(seed: int) -> None:
        case.draw(seed)

    every_draw()
    case.check()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_models(shape: Shape) -> None:
    campaign(shape, examples=10)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES + CAMPAIGN, ids=str)
def test_random_models_at_length(shape: Shape) -> None:
    campaign(shape, examples=200)


@pytest.mark.slow
@pytest.mark.parametrize("shape", pairwise(), ids=str)
def test_random_models_over_pairs_of_settings(shape: Shape) -> None:
    campaign(shape, examples=8 if shape.slots > 1 else 20)  # one slot runs few rounds a draw


def test_the_pairs_of_settings_are_covered() -> None:
    def pairs(rows: Iterable[tuple[object, ...]]) -> set[object]:
        return {(i, row[i], j, row[j]) for row in rows for i, j in itertools.combinations(range(4), 2)}

    rows = [(shape.kind, shape.tree.max_depth, shape.tree.top_k, shape.slots) for shape in pairwise()]
    every = itertools.product(("chain", "static", "dynamic"), range(1, 9), (1, 2, 8, 6), (1, 3, 8))
    possible = [row for row in every if (row[0] == "chain") == (row[2] == 1)]
    assert pairs(rows) == pairs(possible)


def test_exactly_equal_logits_go_to_the_lowest_id() -> None:
    """Two identical rows of the output head: a tie in every program, whatever its shapes."""
    target, head = target_and_head(3)
    for module in (target.lm_head, head.lm_head):
        assert module is not None
        weight = np.array(module.weight[...])
        weight[3] = weight[1]
        module.weight.set_value(jnp.asarray(weight))
    requests = [make_request(prompt=[i, 1, 3], max_new_tokens=40) for i in range(6)]
    wanted = plain(target, requests)
    got = speculative(target, head, SHAPES[2], requests)
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
    requests = [make_request(prompt=rng.integers(3, 512, n).tolist(), max_new_tokens=40) for n in (1, 2, 17, 30)]
    for request, completion in zip(
        requests,
        serve(make_engine(target, None, tree=None, slots=3, max_length=128, prefill_chunk=16), requests),
        strict=True,
    ):
        tokens = [*request.prompt_token_ids, *completion.token_ids]
        choices = reference(tokens)[0].argmax(-1)[len(request.prompt_token_ids) - 1 : -1].tolist()
        ties.compare(completion.token_ids, choices, request.prompt_token_ids)
    ties.check()
