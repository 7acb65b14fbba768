"""The compiled programs of a configuration: make a state, prefill a chunk, decode rounds until something is done."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from eagle_jax.decoding.adaptive import UNDECIDED, AdaptiveSpeculation, AdaptiveState
from eagle_jax.decoding.placement import own_group, placed, spread, state_specs
from eagle_jax.decoding.plan import Plan, Weights
from eagle_jax.decoding.prefill import PromptChunk, prefill_chunk
from eagle_jax.decoding.report import Report
from eagle_jax.decoding.round import decode_round
from eagle_jax.decoding.rules import Rule
from eagle_jax.decoding.sampling_state import SamplingState
from eagle_jax.decoding.state import LENGTH, DecodeState, Unread
from eagle_jax.drafters.base import Drafter, Undrafted
from eagle_jax.models.llama import Llama
from eagle_jax.parallel.mesh import DATA
from eagle_jax.parallel.partition import parameter_specs, rules_for
from eagle_jax.sampling.params import SamplingMode


def specs(plan: Plan, weights: Weights) -> tuple[Weights, DecodeState]:
    """How weights and state are split over the mesh."""
    target, drafter = plan.modules(weights)
    state = jax.eval_shape(functools.partial(_empty_state, plan), weights)
    own = plan.drafter_module(weights)
    draft = None if weights.draft is None else jax.tree.map(lambda _: PartitionSpec(), weights.draft)
    if own is not None:
        draft = _flat_specs(own, drafter.shards)
    return Weights(_flat_specs(target, target.shards), draft), state_specs(
        state, target.shards, drafter.specs(state.draft)
    )


def _flat_specs(module: nnx.Module, shards: int) -> tuple[PartitionSpec, ...]:
    return tuple(jax.tree.leaves(parameter_specs(module, rules_for(shards))))


def state_shapes(plan: Plan, weights: Weights) -> DecodeState:
    """The arrays of a state, as shapes with the places where programs take them."""
    shapes = jax.eval_shape(init_state, plan, weights)
    return shapes if plan.mesh is None else placed(shapes, specs(plan, weights)[1], plan.mesh)


@functools.partial(jax.jit, static_argnames="plan")
def init_state(plan: Plan, weights: Weights) -> DecodeState:
    """A state without requests."""
    body = functools.partial(_empty_state, plan)
    if plan.mesh is None:
        return body(weights)
    weights_in, state_out = specs(plan, weights)
    return spread(body, plan.mesh, (weights_in,), state_out)(weights)


def _empty_state(plan: Plan, weights: Weights) -> DecodeState:
    """That of one device."""
    target, drafter = plan.modules(weights)
    slots, capacity = plan.group_slots, plan.capacity
    zeros = jnp.zeros((slots,), jnp.int32)
    return DecodeState(
        tokens=jnp.zeros((slots, capacity), jnp.int32),
        lengths=zeros,
        prompt_lengths=zeros,
        limits=zeros,
        stop_ids=jnp.full((slots, plan.max_stop_ids), -1, jnp.int32),
        finish=zeros + LENGTH,
        target_cache=target.empty_cache(slots, capacity),
        draft=drafter.init(slots, capacity),
        generations=zeros,
        rounds=zeros,
        unread=Unread.none(slots, plan.report_tokens),
        accepted_at_depth=jnp.zeros((slots, drafter.max_depth), jnp.int32),
        accept_limits=zeros if plan.shape_invariant else None,
        adaptive=AdaptiveState.empty(plan.tree, slots) if isinstance(plan.tree, AdaptiveSpeculation) else None,
        sampling=SamplingState.empty(slots, plan.report_tokens, target.vocabulary),
    )


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
def prefill(plan: Plan, weights: Weights, state: DecodeState, chunk: PromptChunk) -> tuple[DecodeState, Report]:
    """`prefill_chunk` as a program; the state is consumed. What the last chunk of a prompt emits is in its report.

    With several groups of devices, the arrays of `chunk` have an axis in front with one entry a group.
    """

    def body(weights: Weights, state: DecodeState, chunk: PromptChunk) -> tuple[DecodeState, Report]:
        target, drafter = plan.modules(weights)
        return reported(
            plan, prefill_chunk(target, drafter, state, own_group(chunk, plan.mesh), plan.processed_logprobs)
        )

    if plan.mesh is None:
        return body(weights, state, chunk)
    weights_in, state_in = specs(plan, weights)
    run = spread(body, plan.mesh, (weights_in, state_in, PartitionSpec()), (state_in, PartitionSpec(DATA)))
    return run(weights, state, chunk)


def reported(plan: Plan, state: DecodeState) -> tuple[DecodeState, Report]:
    """The report of what was emitted since the last one, and the state that has told it."""
    report = Report.of(state, log_probs=plan.mode is SamplingMode.FULL)
    unread = dataclasses.replace(state.unread, counts=jnp.zeros_like(state.unread.counts))
    return dataclasses.replace(state, unread=unread), report


def decode_adaptively(
    speculation: AdaptiveSpeculation,
    target: Llama,
    drafters: Sequence[Drafter],
    deepest: Drafter,
    rule: Rule,
    go_on: Callable[[DecodeState, jax.Array], jax.Array],
    carry: tuple[DecodeState, jax.Array],
) -> tuple[DecodeState, jax.Array]:
    """Rounds of whichever candidate is best, as long as `go_on(state, rounds)`; one is left only when another is better.

    Args:
      speculation: the candidates.
      target: the target.
      drafters: one for each candidate; they share a memory.
      deepest: the one with the deepest trees, which works through what is due.
      rule: see `decode_round`.
      go_on: whether there is another round.
      carry: the state, and the rounds that were run.
    """

    # Branches are loops that may run not at all: XLA updates the caches in place through loops, but copies them for conditionals.
    # Tokens that may be due when a round of each candidate begins; a plain round adds one.
    rooms = [
        speculation.due_rows - 1 if candidate is None else drafter.backlog_room
        for candidate, drafter in zip(speculation.candidates, drafters, strict=True)
    ]

    def most_due(state: DecodeState) -> jax.Array:
        return jnp.max(jnp.where(state.running, deepest.backlog(state.draft, state.view), 0))

    def crowded(state: DecodeState) -> jax.Array:
        assert state.adaptive is not None
        return most_due(state) > jnp.asarray(rooms, jnp.int32)[state.adaptive.candidate]

    def catch_up(state: DecodeState) -> DecodeState:
        return dataclasses.replace(state, draft=deepest.catch_up(state.draft, state.view))

    def stay(index: int, carry: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
        def wanted(carry: tuple[DecodeState, jax.Array]) -> jax.Array:
            state, rounds = carry
            assert state.adaptive is not None
            return go_on(state, rounds) & (state.adaptive.candidate == index) & (most_due(state) <= rooms[index])

        def body(carry: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
            state, rounds = carry
            assert state.adaptive is not None
            new, _ = decode_round(target, drafters[index], state, rule, index)
            counts = (new.accepted_at_depth - state.accepted_at_depth).sum(axis=1)
            recorded = state.adaptive.record(speculation, index, counts, state.running)
            if speculation.candidates[index] is None:
                # Nothing was learned, so the choice is the same again, unless a slot has ended or it is time to try drafting.
                again = jnp.any(new.running != state.running) | recorded.probing
                chosen = dataclasses.replace(recorded, candidate=jnp.where(again, UNDECIDED, index).astype(jnp.int32))
            else:
                chosen = recorded.choose(speculation, new.running)
            return dataclasses.replace(new, adaptive=chosen), rounds + 1

        return jax.lax.while_loop(wanted, body, carry)

    def pass_through(carry: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
        state, rounds = carry
        assert state.adaptive is not None
        state = dataclasses.replace(state, adaptive=state.adaptive.choose(speculation, state.running))
        with jax.named_scope("catch_up"):
            carry = jax.lax.while_loop(crowded, catch_up, state), rounds
        for index in range(len(speculation.candidates)):
            with jax.named_scope(f"candidate_{index}"):
                carry = stay(index, carry)
        return carry

    return jax.lax.while_loop(lambda carry: go_on(*carry), pass_through, carry)


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
def decode(
    plan: Plan,
    weights: Weights,
    state: DecodeState,
    active: jax.Array,
    max_rounds: jax.Array,
    max_ended: jax.Array,
) -> tuple[DecodeState, Report]:
    """Rounds on the device, without a transfer, until every slot has ended or has no room for another round in the report.

    Args:
      plan: the configuration; with several groups of devices each decodes its own slots, and runs its own number of rounds.
      weights: parameters.
      state: consumed; `DecodeState.of_mode` of it is enough, and comes back.
      active: slots whose requests are still wanted, bool `[B]`; the others are frozen.
      max_rounds: return after so many rounds at the latest, int32 scalar.
      max_ended: return as soon as so many slots have ended that ran at the start, int32 scalar (so that they can be refilled).

    Returns:
      The new state and what the host reads of it.
    """
    whole, body = state, functools.partial(_decode, plan)
    run: Callable[..., tuple[DecodeState, Report]] = body
    state = state.of_mode(plan.mode, plan.processed_logprobs)
    if plan.mesh is not None:
        weights_in, state_in = specs(plan, weights)
        state_in = state_in.of_mode(plan.mode, plan.processed_logprobs)
        replicated, report_out = PartitionSpec(), PartitionSpec(DATA)
        steering = (replicated, replicated, replicated)
        run = spread(body, plan.mesh, (weights_in, state_in, *steering), (state_in, report_out))
    new, report = run(weights, state, active, max_rounds, max_ended)
    return new.with_rest_of(whole), report


def _decode(
    plan: Plan,
    weights: Weights,
    state: DecodeState,
    active: jax.Array,
    max_rounds: jax.Array,
    max_ended: jax.Array,
) -> tuple[DecodeState, Report]:
    """`decode` on one device."""
    target, drafter = plan.modules(weights)
    if plan.groups > 1:
        active = own_group(jnp.reshape(active, (plan.groups, plan.group_slots)), plan.mesh)
    state = dataclasses.replace(state, finish=jnp.where(active | ~state.running, state.finish, LENGTH))
    running_before = jnp.sum(state.running)

    def go_on(state: DecodeState, rounds: jax.Array) -> jax.Array:
        running = jnp.sum(state.running)
        unread = jnp.max(jnp.where(state.running, state.unread.counts, 0))
        room = unread + plan.max_depth + 1 <= plan.report_tokens
        return (running > 0) & room & (rounds < max_rounds) & (running_before - running < max_ended)

    start = (state, jnp.zeros((), jnp.int32))
    if isinstance(plan.tree, AdaptiveSpeculation):
        drafters = [
            Undrafted(drafter) if candidate is None else plan.drafter_of(candidate, target, weights)
            for candidate in plan.tree.candidates
        ]
        state, _ = decode_adaptively(plan.tree, target, drafters, drafter, plan.rule, go_on, start)
    else:

        def body(carry: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
            state, rounds = carry
            return decode_round(target, drafter, state, plan.rule)[0], rounds + 1

        state, _ = jax.lax.while_loop(lambda carry: go_on(*carry), body, start)
    return reported(plan, state)
