"""Seed-exact sampling: the text for a seed is its definition's, whatever is drafted and whoever is in the batch.

Committed seeds have no near ties, so equality is demanded to the last token.
"""

import functools
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support.drive import Completion, make_engine, make_request, serve
from support.enumeration import by_transformers
from support.float64_models import Float64Llama
from support.tiny import draft_config, llama_config, random_head, random_llama

from eagle_jax import SamplingParams
from eagle_jax.decoding.rules import SEEDED, Rule, make_rule
from eagle_jax.drafters.tree import StaticTree, TreeConfig
from eagle_jax.engine.request import Request
from eagle_jax.models import Eagle3Head, Llama
from eagle_jax.sampling.noise import Stream, seed_words, stream_key, vocabulary_gumbel

VOCABULARY = 6
TARGET = llama_config(vocab_size=VOCABULARY)
HEAD = draft_config(TARGET, draft_vocab_size=5)
STATIC = StaticTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
SHAPES = {
    "chain of 4, 3 slots": (TreeConfig.chain(4), 3),
    "tree 12/2/3, 8 slots": (TreeConfig(total_tokens=12, depth=2, top_k=3), 8),
    "static tree, 1 slot": (STATIC, 1),
}
SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 3},
    {},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2, "repetition_penalty": 1.5},
    {"temperature": 1.2, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.3, "frequency_penalty": -0.3},
    {"temperature": 1.0, "logit_bias": {2: 1.5, 0: -2.0}, "top_k": 4, "top_p": 0.9},
    {"temperature": 2.0, "allowed_token_ids": [1, 3, 4]},
    {"temperature": 0.9, "min_tokens": 12, "logprobs": 2},
    {"temperature": 1e-6},
]


def models(seed: int) -> tuple[Llama, Eagle3Head]:
    return random_llama(TARGET, seed), random_head(HEAD, seed + 1)


def requests(seed: int) -> list[Request]:
    """One of each setting, in an order and with prompts that depend on the seed."""
    rng = np.random.default_rng(seed)
    out = []
    for index in rng.permutation(len(SETTINGS)):
        out.append(
            make_request(
                prompt=rng.integers(0, VOCABULARY, int(rng.integers(1, 20))).tolist(),
                max_new_tokens=int(rng.integers(14, 30)),
                stop_ids=[5] if "min_tokens" in SETTINGS[index] else [],
                sampling=SamplingParams(max_tokens=None, **SETTINGS[index]),
                seed=int(rng.integers(2**53)),
            )
        )
    return out


def decode(seed: int, tree: TreeConfig | StaticTree | None, slots: int, rule: Rule = SEEDED) -> list[Completion]:
    target, head = models(seed)
    engine = make_engine(
        target, None if tree is None else head, tree=tree, slots=slots, max_length=64, prefill_chunk=8,
        rule=rule,
    )  # fmt: skip
    return serve(engine, requests(seed))


plain = functools.cache(functools.partial(decode, tree=None, slots=8))


def same(seed: int, completions: list[Completion]) -> None:
    for request, got, wanted in zip(requests(seed), completions, plain(seed), strict=True):
        assert got.token_ids == wanted.token_ids, request.params
        assert got.stopped == wanted.stopped


def test_plain_decoding_is_its_definition() -> None:
    """Against numpy and transformers: penalties, cuts, and the noise of each position."""
    checked = 0
    for seed in (0, 1):
        reference = Float64Llama(models(seed)[0])
        for request, completion in zip(requests(seed), plain(seed), strict=True):
            params, prompt, output = request.params, list(request.prompt_token_ids), completion.token_ids
            logits = reference([*prompt, *output])[0]
            options = {
                name: getattr(params, name)
                for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "top_p", "min_p")
            } | ({"top_k": params.top_k} if params.top_k > 0 else {})
            options |= {"temperature": 0.0 if params.greedy else params.temperature, "logit_bias": dict(params.biases)}
            for i, token in enumerate(output):
                row = logits[len(prompt) + i - 1].copy()
                if params.allowed_token_ids is not None:
                    row[[v for v in range(VOCABULARY) if v not in params.allowed_token_ids]] = -np.inf
                if i < params.min_tokens:
                    row[list(request.stop_ids)] = -np.inf
                p = by_transformers(row, [*prompt, *output[:i]], output[:i], options)
                key = stream_key(
                    jnp.asarray(seed_words(request.params.seed)), jnp.asarray(len(prompt) + i), Stream.TARGET
                )
                noise = np.asarray(vocabulary_gumbel(key, jnp.arange(VOCABULARY)), np.float64)
                with np.errstate(divide="ignore"):
                    assert token == int(np.argmax(np.log(p) + (0 if params.greedy else noise))), (params, i)
                checked += 1
    assert checked > 300


@pytest.mark.parametrize(
    "shape", [pytest.param(name, marks=[pytest.mark.slow] if "static" in name else []) for name in SHAPES]
)
def test_speculative_text_is_the_plain_text(shape: str) -> None:
    lengths = []
    for seed in range(8):
        completions = decode(seed, *SHAPES[shape])
        same(seed, completions)
        lengths += [n for c in completions for n in c.accepted_lengths]
    print(f"{shape}: accepted length {np.mean(lengths):.3f}")
    assert {1, 2, 3} <= set(lengths)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafts", ["probabilistic", "greedy"])
def test_speculative_text_is_the_plain_text_at_length(shape: str, drafts: str) -> None:
    for seed in range(100, 160):
        same(seed, decode(seed, *SHAPES[shape], rule=make_rule("seeded", drafts)))


def test_seeds_matter_only_where_tokens_are_drawn() -> None:
    target, _ = models(0)
    engine = make_engine(target, None, tree=None, slots=8, max_length=64, prefill_chunk=8)
    texts = {}
    for temperature, seed in itertools.product((0.0, 1.0), (1, 2, 2**40, -1)):
        params = SamplingParams(temperature=temperature)
        [done] = serve(engine, [make_request(prompt=[1, 2, 3], max_new_tokens=30, sampling=params, seed=seed)])
        texts[temperature, seed] = tuple(done.token_ids)
    assert len({texts[0.0, seed] for seed in (1, 2, 2**40, -1)}) == 1
    assert len({texts[1.0, seed] for seed in (1, 2, 2**40, -1)}) == 4


def test_a_target_that_breaks_down_raises() -> None:
    target, _ = models(0)
    assert target.lm_head is not None
    weight = target.lm_head.weight[...]
    target.lm_head.weight.set_value(weight.at[:].set(jnp.nan))
    engine = make_engine(target, None, tree=None, slots=8, max_length=64, prefill_chunk=8)
    request = make_request(prompt=[1, 2, 3], max_new_tokens=5, sampling=SamplingParams(temperature=1.0), seed=1)
    with pytest.raises(FloatingPointError, match="no token of prompt 0 has a probability at position 3"):
        serve(engine, [request])
    # One broken token is passed over.
    target.lm_head.weight.set_value(weight.at[2].set(jnp.nan))
    engine = make_engine(target, None, tree=None, slots=8, max_length=64, prefill_chunk=8)
    [done] = serve(
        engine, [make_request(prompt=[1, 2, 3], max_new_tokens=40, sampling=SamplingParams(temperature=2.0), seed=1)]
    )
    assert 2 not in done.token_ids
    assert len(set(done.token_ids)) > 2


def test_shape_invariant_programs_keep_every_bit_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program, whose slots accept drafts or none: the same text and cache, across the border of a block of keys too."""
    target = random_llama(TARGET, 5, dtype=jnp.bfloat16)
    head = random_head(HEAD, 6, dtype=jnp.bfloat16)
    engine = make_engine(
        target, head, tree=TreeConfig.chain(4), slots=8, max_length=400, prefill_chunk=64,
        shape_invariant=True,
    )  # fmt: skip
    texts, caches, states = [], [], []
    decode = engine.programs.decode

    def keep(*args: Any, **options: Any) -> Any:
        state, report = decode(*args, **options)
        states[:] = [state]
        return state, report

    monkeypatch.setattr(engine.programs, "decode", keep)
    for limit in (0, None, 2):
        rng = np.random.default_rng(0)
        batch = [
            make_request(
                prompt=rng.integers(0, VOCABULARY, length).tolist(), max_new_tokens=100, seed=length,
                sampling=SamplingParams(temperature=temperature), accept_limit=limit,
            )
            for length in (1, 60, 190, 250)
            for temperature in (0.0, 0.8)
        ]  # fmt: skip
        done = serve(engine, batch)
        texts.append([c.token_ids for c in done])
        state = states[-1]
        last = state.target_cache.values[-1].astype(jnp.float32)  # behind all other layers
        rows = jnp.arange(last.shape[2]) < state.lengths[:, None]
        caches.append(np.asarray(jnp.where(rows[:, None, :, None], last, 0)))
        lengths = {n for c in done for n in c.accepted_lengths}
        assert max(lengths) == (5 if limit is None else limit + 1)
    assert texts[0] == texts[1] == texts[2]
    assert np.array_equal(caches[0], caches[1])
    assert np.array_equal(caches[0], caches[2])
