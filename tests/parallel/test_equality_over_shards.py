"""Whatever the number of devices, the tokens are those of one: greedy, seeded, penalised, and with their log-probabilities."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import golden
from support.drive import Completion, make_engine, make_request, serve
from support.float64_models import Float64Llama
from support.near_ties import NearTies
from support.spread import spread_module
from support.tiny import draft_config, llama_config, random_head, random_llama

from eagle_jax.decoding.report import TokenLogProbs
from eagle_jax.decoding.rules import Rule
from eagle_jax.drafters.tree import StaticTree, TreeConfig
from eagle_jax.engine.core import EngineCore
from eagle_jax.engine.request import Request
from eagle_jax.models import DraftConfig, DraftHead, Llama, LlamaConfig
from eagle_jax.parallel import make_mesh
from eagle_jax.sampling import SamplingMode, SamplingParams

TREE = TreeConfig(total_tokens=10, depth=2, top_k=3)
GREEDY = SamplingParams()
DRAWN = [
    GREEDY,
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.9, top_k=5, top_p=0.95),
    SamplingParams(temperature=1.2, min_p=0.05),
]
CONTROLLED = [
    *DRAWN,
    SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, logprobs=4),
    SamplingParams(logit_bias={0: 1.5, 4: -2.0}, min_tokens=5, logprobs=2),
    SamplingParams(temperature=1.0, allowed_token_ids=[0, 2, 3, 5], logprobs=20),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """A target and a head, and how many of them divide."""

    target: LlamaConfig
    head: DraftConfig
    seed: int = 0

    @property
    def models(self) -> tuple[Llama, DraftHead]:
        return random_llama(self.target, self.seed), random_head(self.head, self.seed + 1)


@functools.cache
def tiny(vocabulary: int = 7, draft: int = 5, heads: int = 4, kv_heads: int = 2, **changes: Any) -> Case:
    """Vocabularies that no number of devices divides; a head without an embedding of its own unless it is asked for."""
    inner = 16 * heads
    target = llama_config(
        vocab_size=vocabulary, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=inner
    )
    head = draft_config(
        target, draft_vocab_size=draft, num_attention_heads=heads, num_key_value_heads=1, head_dim=8,
        intermediate_size=inner, **changes,
    )  # fmt: skip
    return Case(target, head)


def requests_for(vocabulary: int, params: list[SamplingParams], count: int) -> list[Request]:
    rng = np.random.default_rng(vocabulary)
    return [
        make_request(
            prompt=rng.integers(0, vocabulary, int(rng.integers(1, 28))).tolist(),
            max_new_tokens=int(rng.integers(12, 30)),
            sampling=params[i % len(params)],
            seed=i,
            stop_ids=[1] if i % 5 == 4 else [],
        )
        for i in range(count)
    ]


def engine_for(
    case: Case | tuple[Llama, DraftHead],
    tp: int = 1,
    draft_tp: int = 1,
    data: int = 1,
    *,
    tree: TreeConfig | StaticTree = TREE,
    max_length: int = 64,
    **options: Any,
) -> EngineCore:
    mesh = make_mesh(tp, data)
    target, head = case.models if isinstance(case, Case) else case
    if draft_tp == 1 and tp > 1 and head.embed is None:
        head = with_own_embedding(target, head)
    target, head = spread_module(target, mesh), spread_module(head, mesh, draft_tp)
    return make_engine(target, head, tree=tree, slots=4, max_length=max_length, prefill_chunk=8, mesh=mesh, **options)


def run(case: Case | tuple[Llama, DraftHead], requests: list[Request], *sizes: int, **options: Any) -> list[Completion]:
    return serve(engine_for(case, *sizes, **options), requests)


def with_own_embedding(target: Llama, head: DraftHead) -> DraftHead:
    """The head with a copy of the target's table, as a head that is whole on every device has it."""
    own = random_head(dataclasses.replace(head.config, own_embedding=True), 0)
    for name in ("fc", "layers", "norm", "lm_head", "vocabulary"):
        setattr(own, name, getattr(head, name))
    own.embed.weight.set_value(target.embed.weight[...])
    return own


def assert_same(got: list[Completion], wanted: list[Completion]) -> None:
    assert [c.token_ids for c in got] == [c.token_ids for c in wanted]
    assert [c.stopped for c in got] == [c.stopped for c in wanted]
    assert [c.accepted_lengths for c in got] == [c.accepted_lengths for c in wanted]


def collected(engine: EngineCore, requests: list[Request]) -> tuple[list[Completion], list[list[TokenLogProbs]]]:
    """Completions and the log-probabilities of their tokens."""
    done = serve(engine, requests)
    return done, [completion.log_probs for completion in done]


def assert_same_log_probs(got: list[list[TokenLogProbs]], wanted: list[list[TokenLogProbs]]) -> None:
    assert any(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.rank == b.rank
            assert [id_ for id_, _ in a.top] == [id_ for id_, _ in b.top]
            values = [[x.chosen, *(value for _, value in x.top)] for x in (a, b)]
            np.testing.assert_allclose(values[0], values[1], rtol=1e-4, atol=1e-4)


def test_two_devices_say_what_one_says() -> None:
    """Greedy and drawn side by side; vocabularies of 7 and 5, which do not divide; more requests than slots."""
    case, requests = tiny(), requests_for(7, DRAWN, 6)
    wanted = run(case, requests)
    assert_same(run(case, requests, 2, 2), wanted)
    assert max(length for c in wanted for length in c.accepted_lengths) > 2, "drafts must be accepted"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 2, 2), (4, 1, 2), (4, 4, 1), (1, 1, 4)], ids=str)
def test_all_that_requests_can_ask_for(sizes: tuple[int, int, int]) -> None:
    """Penalties, biases, bans and log-probabilities; some prompts of several chunks."""
    case, requests = tiny(), requests_for(7, CONTROLLED, 15)
    results = [collected(engine_for(case, *s), requests) for s in ((1, 1, 1), sizes)]
    (wanted, wanted_probs), (got, got_probs) = results
    assert_same(got, wanted)
    assert_same_log_probs(got_probs, wanted_probs)
    assert max(length for c in wanted for length in c.accepted_lengths) > 2, "drafts must be accepted"


SIZES = [
    (tp, draft_tp, data)
    for tp in (1, 2, 4, 8)
    for draft_tp in sorted({1, tp})
    for data in (1, 2)
    if tp * data <= 8 and (tp, data) != (1, 1)
]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("mode", [SamplingMode.GREEDY, SamplingMode.SAMPLING], ids=str)
def test_random_models(sizes: tuple[int, int, int], mode: SamplingMode) -> None:
    """A vocabulary of 97, key/value heads that are split and, from 4 shards on, replicated, three draws of weights."""
    ties = NearTies()
    base = tiny(97, 53, heads=8, kv_heads=2)
    for seed in range(3):
        case = dataclasses.replace(base, seed=10 * seed)
        requests = requests_for(97, DRAWN if mode else [GREEDY], 9)
        wanted, got = run(case, requests), run(case, requests, *sizes)
        reference = functools.cache(lambda case=case: Float64Llama(case.models[0]))
        for request, a, b in zip(requests, got, wanted, strict=True):
            if request.params.greedy:
                ties.compare(a.token_ids, b.token_ids, request.prompt_token_ids, lambda t, r=reference: r()(t)[0][-1])
            else:
                assert a.token_ids == b.token_ids
    ties.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "tree"),
    [
        (Rule(rejection_sample_method="standard", draft_sample_method="greedy"), TREE),
        (Rule(rejection_sample_method="block"), TreeConfig.chain(3)),
        (Rule(rejection_sample_method="traversal"), StaticTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0]])),
        (Rule(rejection_sample_method="synthetic", synthetic_acceptance_length=2.5), TreeConfig.chain(3)),
    ],
    ids=lambda x: x.name if isinstance(x, Rule) else "",
)
@pytest.mark.parametrize("draft_tp", [1, 4])
def test_rules_of_acceptance(rule: Rule, tree: TreeConfig | StaticTree, draft_tp: int) -> None:
    """The same random numbers decide, so even these outputs are the same."""
    case, requests = tiny(), requests_for(7, DRAWN, 9)
    options: dict[str, Any] = {"rule": rule, "tree": tree, "mode": SamplingMode.SAMPLING}
    assert_same(run(case, requests, 4, draft_tp, **options), run(case, requests, **options))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["head_A_e3", "head_A_e1"])
@pytest.mark.parametrize("draft_tp", [1, 2])
def test_golden_models(name: str, draft_tp: int) -> None:
    """Trained heads, one of them without an embedding, a norm or an output head of its own."""
    models = golden.target("target_A").model, golden.draft(name, "target_A").head
    if draft_tp == 1 and models[1].lm_head is None:
        pytest.skip("the loader gives a head that is whole on every device an output head of its own")
    requests = [make_request(prompt=list(range(5 + i, 25 + 3 * i)), max_new_tokens=40) for i in range(5)]
    tree = TreeConfig(total_tokens=26, depth=3, top_k=4)
    wanted = run(models, requests, tree=tree, max_length=128)
    assert max(length for c in wanted for length in c.accepted_lengths) > 3
    assert_same(run(models, requests, 2, draft_tp, tree=tree, max_length=128), wanted)


@pytest.mark.slow
def test_ties_across_the_border_of_shards_go_to_the_lowest_id() -> None:
    """Equal rows of both output heads, ids 1 and 5, in different shards of 4 and 2: the tie is exact on any number of devices."""
    target, head = tiny(8, 8).models
    for module in (target.lm_head, head.lm_head):
        assert module is not None
        weight = np.array(module.weight[...])
        weight[5] = weight[1]
        module.weight.set_value(jnp.asarray(weight))
    requests = [make_request(prompt=[i, 1, 5], max_new_tokens=30) for i in range(4)]
    got = run((target, head), requests, 2, 2, tree=TreeConfig.chain(2))
    emitted = {t for c in got for t in c.token_ids}
    assert 5 not in emitted
    assert 1 in emitted


@pytest.mark.slow
def test_shape_invariant_rounds() -> None:
    """In bfloat16 with shape-invariant rounds: accepting drafts or none gives the same bits, so the same tokens."""
    target, head = tiny().models
    case = (random_llama(target.config, 0, dtype=jnp.bfloat16), random_head(head.config, 1, dtype=jnp.bfloat16))
    requests = requests_for(7, [GREEDY], 8)
    plain = [dataclasses.replace(r, accept_limit=0) for r in requests]
    engine = engine_for(case, 4, 4, 1, tree=TreeConfig.chain(3), shape_invariant=True)
    drafted, alone = serve(engine, requests), serve(engine, plain)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in alone]
    assert max(length for c in drafted for length in c.accepted_lengths) > 1
    assert max(length for c in alone for length in c.accepted_lengths) == 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "named"),
    [
        (9, 3, 2, r"num_attention_heads 9, which tensor_parallel_size 2 "),
        (4, 2, 8, r"num_attention_heads 4, which tensor_parallel_size 8 "),
        (12, 3, 2, r"num_key_value_heads 3, of which tensor_parallel_size 2 "),
        (6, 2, 4, r"num_attention_heads 6, which tensor_parallel_size 4 "),
    ],
)
def test_what_does_not_divide_is_an_error_that_names_both(heads: int, kv_heads: int, tp: int, named: str) -> None:
    config = llama_config(num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=48)
    with pytest.raises(ValueError, match=named):
        nnx.eval_shape(lambda: Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(0), shards=tp))
