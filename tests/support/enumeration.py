"""Exact tests of distributions: what rounds emit over many seeds, against all continuations enumerated.

Every slot continues the same prompt with a seed of its own, through the functions that decode for users: a batch of thousands of
slots is a sample of thousands. Settings are dealt out to the slots in turn, so each stands beside all others.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle_jax import SamplingParams
from eagle_jax.decoding.loop import init_state, prefill
from eagle_jax.decoding.plan import Plan, Weights
from eagle_jax.decoding.round import decode_round
from eagle_jax.decoding.rules import SEEDED, Rule
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafters.registry import DrafterSpec
from eagle_jax.drafters.tree import StaticTree, TreeConfig
from eagle_jax.models import CacheContext, Eagle3Head, Llama
from eagle_jax.models.module_def import ModuleDef
from eagle_jax.sampling import SamplingMode
from eagle_jax.sampling.settings import SlotSettings
from support.drive import prompt_chunks
from support.tiny import draft_config, llama_config, random_head, random_llama

VOCABULARY = 6
EMITTED = 3
PROMPT = (2, 0, 5, 3)
ROOT = 1
"""The token that is already decided where the rounds begin."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallPlan(Plan):
    """A plan whose caches have just room for these texts."""

    @property
    def capacity(self) -> int:
        return 16


@functools.cache
def target(seed: int = 0) -> Llama:
    config = llama_config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    return random_llama(config, seed, gain=1.2)


@functools.cache
def head(missing: int | None = None, seed: int = 7) -> Eagle3Head:
    """A head that has nothing to do with the target; its vocabulary lacks one token, or holds all."""
    size = VOCABULARY - (missing is not None)
    config = draft_config(
        target().config, draft_vocab_size=size, capture_layers=(0, 1), intermediate_size=16, num_attention_heads=1,
    )  # fmt: skip
    module = random_head(config, seed, gain=1.2)
    if missing is not None:
        assert module.vocabulary is not None
        module.vocabulary.set_value(jnp.asarray([i for i in range(VOCABULARY) if i != missing], jnp.int32))
    return module


def by_transformers(logits: np.ndarray, history: Sequence[int], output: Sequence[int], request: dict) -> np.ndarray:
    """The distribution after one context: float64 `[V]` from logits `[V]`, by other people's code."""
    ids = torch.tensor([list(history)])
    scores = torch.tensor(logits[None], dtype=torch.float64)
    bias = dict(request.get("logit_bias", {}))
    scores = scores + torch.tensor([[bias.get(i, 0.0) for i in range(logits.size)]])
    if "repetition_penalty" in request:
        scores = RepetitionPenaltyLogitsProcessor(request["repetition_penalty"])(ids, scores)
    counts = torch.tensor(np.bincount(list(output), minlength=logits.size))
    scores = scores - request.get("frequency_penalty", 0) * counts - request.get("presence_penalty", 0) * (counts > 0)
    if request.get("temperature", 0) == 0:
        return np.eye(logits.size)[int(scores.argmax())]
    steps = LogitsProcessorList([TemperatureLogitsWarper(float(request["temperature"]))])
    for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if name in request:
            steps.append(warper(request[name]))
    return np.asarray(torch.softmax(steps(ids, scores), -1))[0]


@functools.cache
def next_logits() -> dict[tuple[int, ...], np.ndarray]:
    """The target's logits after every continuation of up to two tokens of prompt and root."""
    found: dict[tuple[int, ...], np.ndarray] = {}
    model = target()
    for length in range(EMITTED):
        texts = list(itertools.product(range(VOCABULARY), repeat=length))
        tokens = jnp.asarray([[*PROMPT, ROOT, *text] for text in texts])
        count, size = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(size), (count, size))
        out = model(tokens, CacheContext(positions, model.empty_cache(count, 16), jnp.zeros((count,), jnp.int32)))
        rows = np.asarray(model.logits(out.hidden[:, -1:])[:, 0])
        found |= dict(zip(texts, rows, strict=True))
    return found


def joint(request: dict) -> np.ndarray:
    """Probability of every continuation of three tokens, float64 `[V, V, V]`."""
    logits = next_logits()
    out = np.zeros((VOCABULARY,) * EMITTED)

    @functools.cache
    def after(text: tuple[int, ...]) -> np.ndarray:
        return by_transformers(logits[text], [*PROMPT, ROOT, *text], [ROOT, *text], request)

    for text in itertools.product(range(VOCABULARY), repeat=EMITTED):
        out[text] = np.prod([after(text[:i])[text[i]] for i in range(EMITTED)])
    return out


def make_plan(
    tree: TreeConfig | StaticTree | None, rule: Rule, missing: int | None, mode: SamplingMode
) -> tuple[SmallPlan, Weights]:
    """The plan of a configuration and its weights."""
    target_def, target_state = ModuleDef.split(target())
    head_def, head_state = (None, None) if tree is None else ModuleDef.split(head(missing))
    plan = SmallPlan(
        target_def=target_def, drafter=None if tree is None else DrafterSpec("eagle3", head_def), tree=tree,
        slots=1, max_length=15, prefill_chunk=4, rule=rule, mode=mode,
    )  # fmt: skip
    return plan, Weights(target_state, head_state)


@functools.cache
def prefilled(depth: int, missing: int | None, mode: SamplingMode) -> DecodeState:
    """One slot whose rounds can begin; what a state holds depends on the tree's depth alone."""
    plan, weights = make_plan(TreeConfig.chain(depth) if depth else None, SEEDED, missing, mode)
    state = init_state(plan, weights)
    greedy = SlotSettings.of(SamplingParams(), 0, VOCABULARY, mode)
    for chunk in prompt_chunks(plan, 0, PROMPT, len(PROMPT) + 1 + EMITTED):
        state, _ = prefill(plan, weights, state, dataclasses.replace(chunk, sampling=greedy))
    assert state.sampling is not None
    history = state.sampling.history
    assert history is not None  # as if the root had been drawn
    history = dataclasses.replace(history, counts=jnp.zeros_like(history.counts).at[0, ROOT].set(1))
    state = dataclasses.replace(
        state,
        tokens=state.tokens.at[0, len(PROMPT)].set(ROOT),
        sampling=dataclasses.replace(state.sampling, history=history),
    )
    return jax.device_get(state)


class Sampler:
    """Rounds of one configuration over many seeds. Traces anew, so that a test may break the code before.

    Args:
      tree: shape of the drafts; None decodes plainly.
      rule: of acceptance.
      requests: settings, as keywords of `SamplingParams`, dealt out to the slots in turn.
      slots_each: slots of each request in a batch.
      missing: a token that the head cannot draft.
    """

    def __init__(
        self,
        tree: TreeConfig | StaticTree | None,
        rule: Rule,
        requests: Sequence[dict],
        *,
        slots_each: int = 1000,
        missing: int | None = None,
    ):
        self.requests = requests
        params = [SamplingParams(max_tokens=None, **request) for request in requests]
        mode = max(SamplingMode.SAMPLING, *(p.mode for p in params))
        self.plan, self.weights = make_plan(tree, rule, missing, mode)
        self._one = prefilled(0 if tree is None else tree.max_depth, missing, mode)
        self._settings = [SlotSettings.of(p, 0, VOCABULARY, mode) for p in params]
        self.slots = slots_each * len(requests)
        # These programs run long enough for LLVM's optimisation to pay, which the tests otherwise do without.
        self.rounds = jax.jit(self._rounds, compiler_options={"xla_backend_optimization_level": 2})
        self.accepted = 0
        self.drafted_rounds = 0

    def _rounds(self, weights: Any, state: DecodeState) -> DecodeState:
        model, drafter = self.plan.modules(weights)
        assert state.sampling is not None
        state = dataclasses.replace(state, sampling=state.sampling.of_mode(self.plan.mode))

        def body(_: Any, state: DecodeState) -> DecodeState:
            return decode_round(model, drafter, state, self.plan.rule)[0]

        return jax.lax.fori_loop(0, EMITTED, body, state)

    def sample(self, first_seed: int) -> np.ndarray:
        """Three tokens of every slot, `[B, 3]`; slot b has settings b modulo their number."""
        state = jax.tree.map(lambda x: np.repeat(x, self.slots, axis=0), self._one)
        settings = jax.tree.map(lambda *x: np.resize(np.stack(x), (self.slots, *np.shape(x[0]))), *self._settings)
        seeds = first_seed + np.arange(self.slots, dtype=np.uint64)
        words = np.stack([seeds & 0xFFFFFFFF, seeds >> np.uint64(32)], axis=1).astype(np.uint32)
        settings = dataclasses.replace(settings, seeds=words)
        state = dataclasses.replace(state, sampling=dataclasses.replace(state.sampling, settings=settings))
        state = self.rounds(self.weights, state)
        assert (np.asarray(state.lengths) == len(PROMPT) + EMITTED).all()
        self.accepted += int(state.accepted_at_depth.sum())
        self.drafted_rounds += int(state.rounds.sum())
        return np.asarray(state.tokens)[:, len(PROMPT) + 1 : len(PROMPT) + 1 + EMITTED]

    def counts(self, samples: int, first_seed: int = 1) -> np.ndarray:
        """How often each continuation came out of `samples` seeds for each request, `[requests, V, V, V]`."""
        found = np.zeros((len(self.requests), *(VOCABULARY,) * EMITTED), np.int64)
        each = self.slots // len(self.requests)
        for start in range(0, samples, each):
            tokens = self.sample(first_seed + start * len(self.requests))
            np.add.at(found, (np.arange(self.slots) % len(self.requests), *tokens.T), 1)
        return found


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square test of counts against probabilities, cells with less than 5 expected pooled; 0 for what cannot happen."""
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities.ravel() * counts.sum()
    observed = counts.ravel()
    small = expected < 5
    cells = [*zip(observed[~small], expected[~small], strict=True)]
    if expected[small].sum() > 0:
        cells.append((observed[small].sum(), expected[small].sum()))
    if len(cells) < 2:
        return 1.0
    got, wanted = map(np.array, zip(*cells, strict=True))
    return float(stats.chi2.sf(((got - wanted) ** 2 / wanted).sum(), len(cells) - 1))
