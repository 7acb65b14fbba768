"""The rules of acceptance on given distributions: what one round emits, completed by draws from p, is distributed as p says.

The tables are p and q after every text of up to two tokens, with q far from p. Drafts are drawn by the noise that drafters use.
"""

import dataclasses
import functools
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.enumeration import p_value

from eagle_jax.decoding import rejection
from eagle_jax.decoding.rejection import accept_by
from eagle_jax.decoding.rules import Rule, make_rule
from eagle_jax.drafters.tree import DraftTree, StaticTree, ancestor_mask
from eagle_jax.parallel.vocabulary import Vocabulary
from eagle_jax.sampling.noise import Stream, seed_words, stream_key, vocabulary_gumbel
from eagle_jax.sampling.processing import NO_TOKEN

V, LENGTH, SLOTS, MANY_SLOTS = 4, 3, 20_000, 50_000
CHAIN = StaticTree.from_paths([[0], [0, 0], [0, 0, 0]])
TREE = StaticTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 1, 1]])


def tables(seed: int, sharpness: float, never: int | None = None) -> np.ndarray:
    """A distribution after every text, `[1 + V + V^2, V]`; text t of the level below row c is row `V * c + 1 + t`."""
    logits = sharpness * np.random.default_rng(seed).standard_normal((1 + V + V * V, V))
    if never is not None:
        logits[:, never] = -np.inf
    weights = np.exp(logits)
    return weights / weights.sum(-1, keepdims=True)


P, Q = tables(1, 1.0), tables(2, 1.5)
P_CUT, Q_CUT = tables(1, 1.0, never=0), tables(2, 1.5, never=1)


def joint(p: np.ndarray) -> np.ndarray:
    out = np.zeros((V,) * LENGTH)
    for text in itertools.product(range(V), repeat=LENGTH):
        row = 0
        out[text] = 1
        for token in text:
            out[text] *= p[row, token]
            row = V * row + 1 + token
    return out


def many_seeds(count: int) -> np.ndarray:
    return np.stack([seed_words(1000 + i) for i in range(count)])


def drawn_tree(
    shape: StaticTree, q: jax.Array, seeds: jax.Array, positions: jax.Array, stream: Stream
) -> tuple[Any, Any]:
    """Tokens and table rows of the nodes, `[B, N]`; children are the largest sums of log q and noise, in order."""
    first, second = stream_key(seeds, positions, stream)
    tokens, rows = [jnp.zeros(seeds.shape[0], jnp.int32)], [jnp.zeros(seeds.shape[0], jnp.int32)]
    orders: dict[int, jax.Array] = {}
    for node in range(1, shape.total_tokens):
        parent = int(shape.parents[node])
        if parent not in orders:
            noise = vocabulary_gumbel((first, second), jnp.arange(V), jnp.full(first.shape, parent))
            orders[parent] = jax.lax.top_k(jnp.log(q)[rows[parent]] + noise, V)[1]
        tokens.append(orders[parent][:, shape.ranks[node]])
        rows.append(V * rows[parent] + 1 + tokens[-1])
    return jnp.stack(tokens, axis=1), jnp.stack(rows, axis=1)


def emitted(
    rule: Rule, shape: StaticTree, p: np.ndarray, q: np.ndarray, *, point_mass: bool = False, slots: int = SLOTS
) -> tuple[np.ndarray, np.ndarray]:
    """The three tokens that each slot says, and how many drafts it accepted."""

    @jax.jit
    def run(seeds: jax.Array) -> tuple[jax.Array, jax.Array]:
        lengths = jnp.full((seeds.shape[0],), 9, jnp.int32)
        settings = types.SimpleNamespace(seeds=seeds, greedy=jnp.zeros(seeds.shape[0], bool))
        state: Any = types.SimpleNamespace(
            lengths=lengths, sampling=types.SimpleNamespace(settings=settings, vocabulary=Vocabulary(V))
        )
        if point_mass:  # the same tokens for everybody: the likeliest of q
            tokens, rows = [0], [0]
            for node in range(1, shape.total_tokens):
                parent = int(shape.parents[node])
                tokens.append(int(np.argsort(-q[rows[parent]], kind="stable")[shape.ranks[node]]))
                rows.append(V * rows[parent] + 1 + tokens[-1])
            token, row = (jnp.broadcast_to(jnp.asarray(x), (seeds.shape[0], len(x))) for x in (tokens, rows))
        else:
            token, row = drawn_tree(shape, jnp.asarray(q, jnp.float32), seeds, lengths, Stream.DRAFT)
        inner = np.isin(np.arange(shape.total_tokens), shape.parents)
        # Behind the last drafted level the tables end; nothing is read there that decides about the first three tokens.
        safe = jnp.minimum(row, len(p) - 1)
        last = jnp.asarray(shape.depths == LENGTH)
        processed = jnp.where(last[None, :, None], 0, jnp.log(jnp.asarray(p, jnp.float32))[safe])
        proposals = jnp.where(jnp.asarray(inner)[None, :, None], jnp.asarray(q, jnp.float32)[safe], 0)
        parents, depths = (jnp.broadcast_to(jnp.asarray(x), token.shape) for x in (shape.parents, shape.depths))
        tree = DraftTree(
            token,
            parents,
            depths,
            jnp.zeros(token.shape),
            None if point_mass else proposals,
            None if point_mass else shape,
        )
        output: Any = types.SimpleNamespace(
            processed=processed, ancestors=ancestor_mask(parents, shape.max_depth), choices=jnp.zeros_like(token)
        )
        acceptance = accept_by(rule, tree, output, state, shape.max_depth)
        return acceptance.tokens, acceptance.counts

    tokens, counts = map(np.array, run(jnp.asarray(many_seeds(slots))))
    rng = np.random.default_rng(0)
    row = np.zeros(slots, int)
    for i in range(LENGTH):  # what the round did not emit is drawn from p
        drawn = (p[np.minimum(row, len(p) - 1)].cumsum(-1) < rng.random((slots, 1))).sum(-1)
        tokens[:, i] = np.where(i <= counts, tokens[:, i], drawn)
        row = V * row + 1 + tokens[:, i]
    return tokens[:, :LENGTH], counts


def test_the_test_of_distributions_finds_small_errors() -> None:
    """Draws from p itself pass, and draws from slightly wrong probabilities do not."""
    rng = np.random.default_rng(0)
    counts = rng.multinomial(SLOTS, joint(P).ravel()).reshape((V,) * LENGTH)
    assert p_value(counts, joint(P)) > 1e-3
    other = 0.94 * joint(P) + 0.06 * joint(Q)
    assert p_value(rng.multinomial(SLOTS, other.ravel()).reshape((V,) * LENGTH), joint(P)) < 1e-9


def histogram(tokens: np.ndarray) -> np.ndarray:
    counts = np.zeros((V,) * LENGTH, int)
    np.add.at(counts, tuple(tokens.T), 1)
    return counts


CASES = {
    "standard, sampled chain": (
        {"rejection_sample_method": "standard", "draft_sample_method": "probabilistic"},
        CHAIN,
        False,
    ),
    "block": ({"rejection_sample_method": "block"}, CHAIN, False),
    "recursive": ({"rejection_sample_method": "recursive"}, TREE, False),
    "traversal": ({"rejection_sample_method": "traversal"}, TREE, False),
    "standard, greedy chain": ({"rejection_sample_method": "standard"}, CHAIN, True),
    "standard, greedy tree": ({"rejection_sample_method": "standard"}, TREE, True),
}


@functools.cache
def outcome(case: str, cut: bool, slots: int) -> tuple[np.ndarray, np.ndarray]:
    options, shape, point_mass = CASES[case]
    p, q = (P_CUT, Q_CUT) if cut else (P, Q)
    return emitted(make_rule(**options), shape, p, q, point_mass=point_mass, slots=slots)


def check(case: str, cut: bool, slots: int) -> None:
    tokens, counts = outcome(case, cut, slots)
    p = p_value(histogram(tokens), joint(P_CUT if cut else P))
    print(f"{case}: p = {p:.3g}, {counts.mean():.3f} drafts accepted")
    assert p > 1e-3 / (2 * len(CASES))
    assert cut or counts.mean() > 0.2, "drafts must be accepted for this to prove anything"


@pytest.mark.parametrize("case", CASES)
def test_a_round_emits_what_p_says(case: str) -> None:
    check(case, False, SLOTS)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [False, True], ids=["dense", "some impossible"])
@pytest.mark.parametrize("case", CASES)
def test_many_rounds_emit_what_p_says(case: str, cut: bool) -> None:
    check(case, cut, MANY_SLOTS)


def test_joint_rules_accept_more() -> None:
    """Each rule that looks further ahead accepts more, on these tables by many standard errors (about 0.007)."""
    mean = {case: outcome(case, False, SLOTS)[1].mean() for case in CASES}
    print(mean)
    assert mean["block"] > mean["standard, sampled chain"]
    assert mean["traversal"] > mean["recursive"] > mean["standard, sampled chain"]


def walk_with_uniform_q(tree: DraftTree, target: jax.Array, uniforms: jax.Array, walk: Any = rejection.walk) -> Any:
    return walk(dataclasses.replace(tree, probabilities=jnp.full_like(target, 1 / V)), target, uniforms)


MUTANTS: dict[str, tuple[str, Any]] = {
    "the residual is the target": ("residual", lambda p, q, rate=1.0: p),
    "q is not what drafts were drawn from": ("walk", walk_with_uniform_q),
    "drafting and accepting share a stream": ("stream_key", lambda s, at, _: stream_key(s, at, Stream.DRAFT)),
    "accepting and resampling share a stream": ("stream_key", lambda s, at, _: stream_key(s, at, Stream.ACCEPT)),
}
"""A name in `rejection` and what breaks it. (Taking q as 1 in both places is no mutant: it is the rule for greedy drafts.)"""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_broken_rules_are_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken = MUTANTS[mutant]
    monkeypatch.setattr(rejection, name, broken)
    rule = make_rule("standard", "probabilistic")
    p = p_value(histogram(emitted(rule, CHAIN, P, Q)[0]), joint(P))
    print(f"{mutant}: p = {p:.3g}")
    assert p < 1e-9


@pytest.mark.parametrize("case", ["block", pytest.param("traversal", marks=pytest.mark.slow)])
def test_equal_distributions_accept_everything(case: str) -> None:
    """p = q leaves no residual anywhere, up to rounding."""
    options, shape, _ = CASES[case]
    tokens, counts = emitted(make_rule(**options), shape, P, P)
    assert counts.mean() > LENGTH - 1e-3
    assert p_value(histogram(tokens), joint(P)) > 1e-4


@pytest.mark.parametrize(
    "case", ["recursive", *[pytest.param(c, marks=pytest.mark.slow) for c in ("block", "traversal")]]
)
def test_tokens_that_cannot_be_and_broken_numbers_are_never_accepted(case: str) -> None:
    """q proposes only what p excludes; NaN in q; a target of which nothing is left."""
    options, shape, _ = CASES[case]
    p = np.zeros_like(P)
    p[:, 2:] = P[:, 2:] / P[:, 2:].sum(-1, keepdims=True)
    q = np.zeros_like(Q)
    q[:, :2] = Q[:, :2] / Q[:, :2].sum(-1, keepdims=True)
    tokens, counts = emitted(make_rule(**options), shape, p, q)
    assert not counts.any()
    assert set(np.unique(tokens)) == {2, 3}
    broken = np.where(np.arange(V) == 1, np.nan, Q)
    tokens, _ = emitted(make_rule(**options), shape, P, broken)
    assert (tokens >= 0).all()


def test_a_target_without_probabilities_emits_no_token() -> None:
    seeds = jnp.asarray(many_seeds(5))
    settings = types.SimpleNamespace(seeds=seeds)
    state: Any = types.SimpleNamespace(
        lengths=jnp.arange(5), sampling=types.SimpleNamespace(settings=settings, vocabulary=Vocabulary(V))
    )
    assert rejection.resample(jnp.zeros((5, V)), state).tolist() == [NO_TOKEN] * 5


def test_synthetic_acceptance_has_its_rates() -> None:
    rule = make_rule("synthetic", synthetic_acceptance_rates=[0.9, 0.5, 0.0])
    _, counts = emitted(rule, CHAIN, P, Q)
    np.testing.assert_allclose([(counts > d).mean() for d in range(3)], [0.9, 0.5, 0], atol=0.01)
    for length, wanted in ((1, (0, 0, 0)), (1.5, (0.5, 0, 0)), (2.75, (1, 0.75, 0)), (4, (1, 1, 1))):
        assert make_rule("synthetic", synthetic_acceptance_length=length).synthetic_rates(3) == wanted


def test_depth_first_visits_children_before_their_parents() -> None:
    nodes, entering = rejection.depth_first(StaticTree.from_paths([[0], [1], [0, 0], [0, 1]]))
    assert nodes.tolist() == [1, 3, 3, 4, 4, 1, 2, 2, 0]
    assert entering.tolist() == [True, True, False, True, False, False, True, False, False]
