"""A drafter that lives here alone: an oracle with faults, which the library knows by its name only."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.drive import Completion, make_engine, make_request, serve
from support.tiny import llama_config, random_llama

from eagle_jax.decoding.adaptive import AdaptiveSpeculation, forced
from eagle_jax.drafters.base import Drafter, DraftView, Outcome, Reading
from eagle_jax.drafters.registry import DrafterSpec, register
from eagle_jax.drafters.tree import DraftTree, TreeConfig
from eagle_jax.engine.config import EngineConfig

PERIOD = 5


@dataclasses.dataclass(frozen=True)
class Oracle(Drafter):
    """Drafts a chain of the right continuation, which it finds by the first token of a text; every fifth token is wrong.

    Its memory counts the tokens that it saw emitted.
    """

    texts: jax.Array
    """int32 `[V, S]`: the text that begins with each token."""
    num_nodes: int
    max_depth: int

    def init(self, slots: int, capacity: int) -> jax.Array:
        return jnp.zeros((slots,), jnp.int32)

    def prefill(self, memory: jax.Array, reading: Reading) -> jax.Array:
        return memory.at[reading.slot].set(reading.start + reading.valid)

    def propose(self, memory: jax.Array, view: DraftView) -> tuple[DraftTree, jax.Array]:
        batch, depths = memory.shape[0], jnp.arange(self.num_nodes, dtype=jnp.int32)
        places = memory[:, None] + depths
        known = jnp.take_along_axis(self.texts[view.tokens[:, 0]], places, axis=1, mode="clip")
        drafts = jnp.where(places % PERIOD == 0, (known + 1) % self.texts.shape[0], known)

        def all_slots(values: jax.Array) -> jax.Array:
            return jnp.broadcast_to(values, (batch, self.num_nodes))

        tokens = drafts.at[:, 0].set(view.roots)
        return DraftTree(tokens, all_slots(depths - 1), all_slots(depths), jnp.zeros(tokens.shape)), memory

    def observe(self, memory: jax.Array, outcome: Outcome) -> jax.Array:
        return memory + outcome.emitted


@register("oracle of this test")
def build(spec: DrafterSpec, target: Any, weights: Any, tree: Any, **options: Any) -> Oracle:
    return Oracle(weights, tree.total_tokens, tree.max_depth)


@pytest.fixture(scope="module")
def case() -> tuple[Any, list[Any], list[Completion], jax.Array]:
    """A target, requests, what plain decoding makes of them, and the texts."""
    target = random_llama(llama_config(), 3)
    requests = [make_request([first, 1, 2][: 1 + first % 3], 40) for first in range(6)]
    plain = serve(make_engine(target, None, slots=2, max_length=64, prefill_chunk=8), requests)
    texts = np.zeros((7, 64), np.int32)
    for request, completion in zip(requests, plain, strict=True):
        whole = [*request.prompt_token_ids, *completion.token_ids]
        texts[whole[0], : len(whole)] = whole
    return target, requests, plain, jnp.asarray(texts)


def test_it_drafts_in_an_engine(case: Any) -> None:
    target, requests, plain, texts = case
    options = {"slots": 2, "max_length": 64, "prefill_chunk": 8, "method": "oracle of this test"}
    engine = make_engine(target, texts, tree=TreeConfig.chain(4), **options)
    found = serve(engine, requests)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    for request, one in zip(requests, found, strict=True):
        place, lengths = len(request.prompt_token_ids), []
        while sum(lengths) < 39:  # up to the next wrong draft, which the bonus replaces
            lengths.append(min(5, -(place + 1) % PERIOD + 1, 39 - sum(lengths)))
            place += lengths[-1]
        assert one.accepted_lengths == lengths
    assert max(n for one in found for n in one.accepted_lengths) == 5


def test_it_is_one_of_several_candidates(case: Any) -> None:
    target, requests, plain, texts = case
    shapes = AdaptiveSpeculation((None, TreeConfig.chain(2), TreeConfig.chain(4)))
    options = {"slots": 2, "max_length": 64, "prefill_chunk": 8, "method": "oracle of this test"}
    engine = make_engine(target, texts, tree=shapes, costs=[1.0, 1.1, 1.2], **options)
    found = serve(engine, requests)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert {drafted for one in found for drafted in one.drafted} >= {4}
    engine.programs.costs.update(dict.fromkeys(engine.programs.costs, forced(shapes, 1)))
    assert {drafted for one in serve(engine, requests) for drafted in one.drafted} == {2}


def test_an_unknown_method_and_one_that_is_taken_are_named() -> None:
    with pytest.raises(ValueError, match="method 'medusa' is not known; known are 'eagle', 'eagle3'"):
        EngineConfig(max_model_len=64, max_num_seqs=1, prefill_chunk=8, method="medusa")
    with pytest.raises(ValueError, match="method 'eagle3' is registered already"):
        register("eagle3")
