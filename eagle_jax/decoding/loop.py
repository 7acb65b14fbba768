"""The compiled programs of a configuration: make a state, prefill a chunk, decode rounds until something is done."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from eagle_jax.decoding.commit import commit
from eagle_jax.decoding.draft import Drafter, PlainDrafter
from eagle_jax.decoding.eagle_drafter import EagleDrafter
from eagle_jax.decoding.ladder import UNDECIDED, Ladder, LadderState
from eagle_jax.decoding.placement import own_group, placed, spread, state_specs, weight_specs
from eagle_jax.decoding.prefill import PromptChunk, prefill_chunk
from eagle_jax.decoding.rejection import accept_by
from eagle_jax.decoding.report import Report, ReportLayout, report_tokens
from eagle_jax.decoding.rules import SEEDED, Drafts, Rule
from eagle_jax.decoding.sampling_state import SamplingState
from eagle_jax.decoding.state import LENGTH, DecodeState, Unread, cache_capacity
from eagle_jax.decoding.tree import StaticTree, TreeConfig
from eagle_jax.decoding.verify import verify
from eagle_jax.models.llama import Llama
from eagle_jax.parallel.collectives import from_first_shard
from eagle_jax.parallel.mesh import DATA, data_groups
from eagle_jax.sampling.params import SamplingMode


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters of target and draft head, as `split` gives them. Arguments of every program, never constants in it."""

    target: Any
    head: Any


def split(module: nnx.Module) -> tuple[nnx.GraphDef, Any]:
    """A module's structure, and its parameters as dictionaries of arrays.

    `nnx.split` gives a state of variables, which takes four times as long to take apart; that happens before every dispatch.
    """
    graph, state = nnx.split(module)
    return graph, nnx.to_pure_dict(state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything static about a decoding configuration. Equal plans share their compiled programs."""

    target_def: nnx.GraphDef
    """Structure and configuration of the target module."""
    head_def: nnx.GraphDef | None
    """Of the draft head; None decodes plainly."""
    tree: TreeConfig | StaticTree | Ladder | None
    """Shape of the draft trees, or several to choose from; None exactly when there is no head."""
    slots: int
    """Sequences decoded side by side: B."""
    max_length: int
    """Tokens of the longest sequence, prompt and output."""
    prefill_chunk: int
    """Prompt tokens run at once: C."""
    max_stop_ids: int = 8
    """Stop ids a slot can have: E."""
    mode: SamplingMode = SamplingMode.GREEDY
    """What requests of these rounds can ask for. Plans that differ in nothing else have the same state."""
    rule: Rule = SEEDED
    """How drafts are made and accepted in slots that sample; means nothing in greedy rounds."""
    processed_logprobs: bool = False
    """Whether log-probabilities are those of the processed distribution."""
    shape_invariant: bool = False
    """Whether a token's logits have the same bits however many drafts were accepted before it (chains only)."""
    mesh: Mesh | None = None
    """The devices (`eagle_jax.parallel.make_mesh`); None is one."""

    @property
    def capacity(self) -> int:
        """Rows of the caches: S."""
        path = 1 if self.tree is None else self.tree.max_depth + 1
        if isinstance(self.tree, Ladder):
            path = self.tree.due_rows
        return cache_capacity(self.max_length, self.prefill_chunk, path, idle_prefills=self.groups > 1)

    @property
    def groups(self) -> int:
        """Groups of devices that the slots are split over."""
        return data_groups(self.mesh)

    @property
    def group_slots(self) -> int:
        """Slots of one group: slot s belongs to group `s // group_slots`."""
        return self.slots // self.groups

    @property
    def max_depth(self) -> int:
        """Most drafted tokens that a round can accept: D."""
        return 0 if self.tree is None else self.tree.max_depth

    @property
    def report_tokens(self) -> int:
        """Tokens of a slot that a report holds at most: W."""
        return report_tokens(self.max_depth)

    @property
    def layout(self) -> ReportLayout:
        """What reports look like."""
        drafted = (
            self.tree.drafted
            if isinstance(self.tree, Ladder)
            else (0 if self.tree is None else self.tree.total_tokens - 1,)
        )
        return ReportLayout(depth=self.max_depth, tokens=self.report_tokens, drafted=drafted)

    def specs(self, weights: Weights) -> tuple[Weights, DecodeState]:
        """How weights and state are split over the mesh."""
        target, drafter = self.modules(weights)
        draft_shards = drafter.head.shards if isinstance(drafter, EagleDrafter) else 1
        state = jax.eval_shape(functools.partial(_empty_state, self), weights)
        split = Weights(weight_specs(weights.target, target.shards), weight_specs(weights.head, draft_shards))
        return split, state_specs(state, target.shards, draft_shards)

    def state_shapes(self, weights: Weights) -> DecodeState:
        """The arrays of a state, as shapes with the places where programs take them."""
        shapes = jax.eval_shape(init_state, self, weights)
        return shapes if self.mesh is None else placed(shapes, self.specs(weights)[1], self.mesh)

    def modules(self, weights: Weights) -> tuple[Llama, Drafter]:
        """The target and the drafter around given weights; of several trees the drafter grows the deepest."""
        target = nnx.merge(self.target_def, weights.target)
        if self.shape_invariant and target.shards > 1:
            target.sum_in_order()
        if self.head_def is None or self.tree is None:
            return target, PlainDrafter()
        tree, drafts = self.tree, self.rule.drafts
        if isinstance(tree, Ladder):
            head = nnx.merge(self.head_def, weights.head)
            return target, EagleDrafter(head, target, tree.deepest, drafts=drafts, due_rows=tree.due_rows)
        if drafts is Drafts.SAMPLED and isinstance(
            tree, TreeConfig
        ):  # a chain: the distributions are kept level by level
            tree = StaticTree.from_paths([[0] * depth for depth in range(1, tree.total_tokens)])
        return target, EagleDrafter(nnx.merge(self.head_def, weights.head), target, tree, drafts=drafts)


@functools.partial(jax.jit, static_argnames="plan")
def init_state(plan: Plan, weights: Weights) -> DecodeState:
    """A state without requests."""
    body = functools.partial(_empty_state, plan)
    if plan.mesh is None:
        return body(weights)
    weights_in, state_out = plan.specs(weights)
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
        draft=drafter.empty(slots, capacity),
        generations=zeros,
        rounds=zeros,
        unread=Unread.none(slots, plan.report_tokens),
        accepted_at_depth=jnp.zeros((slots, drafter.max_depth), jnp.int32),
        accept_limits=zeros if plan.shape_invariant else None,
        ladder=LadderState.empty(plan.tree, slots) if isinstance(plan.tree, Ladder) else None,
        sampling=SamplingState.empty(slots, plan.report_tokens, target.vocabulary),
    )


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
def prefill(plan: Plan, weights: Weights, state: DecodeState, chunk: PromptChunk) -> DecodeState:
    """`prefill_chunk` as a program; the state is consumed.

    With several groups of devices, the arrays of `chunk` have an axis in front with one entry a group.
    """

    def body(weights: Weights, state: DecodeState, chunk: PromptChunk) -> DecodeState:
        target, drafter = plan.modules(weights)
        return prefill_chunk(target, drafter, state, own_group(chunk, plan.mesh), plan.processed_logprobs)

    if plan.mesh is None:
        return body(weights, state, chunk)
    weights_in, state_in = plan.specs(weights)
    return spread(body, plan.mesh, (weights_in, state_in, PartitionSpec()), state_in)(weights, state, chunk)


def decode_round(
    target: Llama, drafter: Drafter, state: DecodeState, rule: Rule = SEEDED, shape: int = 0
) -> DecodeState:
    """One round for every running slot: draft, verify, accept, commit.

    In shape-invariant programs attention sums in an order that belongs to positions, and a slot can be kept from accepting: with
    a limit of 0 the program decodes plainly. `shape` is the drafter's place among several candidates.
    """
    with jax.named_scope("draft"):
        tree, draft = drafter.propose(state)
        if drafter.num_nodes > 1:
            tokens, parents, depths = from_first_shard((tree.tokens, tree.parents, tree.depths), target.shards)
            tree = dataclasses.replace(tree, tokens=tokens, parents=parents, depths=depths)
    with jax.named_scope("verify"):
        output = verify(
            target,
            state,
            tree,
            drafter.max_depth,
            drafter.capture_layers,
            draws=rule.exact_match,
            attention=None if state.accept_limits is None else "xla_positioned",
        )
    with jax.named_scope("accept"):
        acceptance = accept_by(rule, tree, output, state, drafter.max_depth)
        if not rule.exact_match:
            acceptance = from_first_shard(acceptance, target.shards)
        if state.accept_limits is not None:
            acceptance = acceptance.limited(state.accept_limits)
    with jax.named_scope("commit"):
        return commit(state, draft, output, acceptance, shape)


def climb(
    ladder: Ladder,
    target: Llama,
    drafter: EagleDrafter,
    rule: Rule,
    go_on: Callable[[DecodeState, jax.Array], jax.Array],
    carry: tuple[DecodeState, jax.Array],
) -> tuple[DecodeState, jax.Array]:
    """Rounds of whichever rung is best, as long as `go_on(state, rounds)`; a rung is left only when another one is better.

    Args:
      ladder: the rungs.
      target: the target.
      drafter: an EAGLE head with room for `Ladder.due_rows` rows.
      rule: see `decode_round`.
      go_on: whether there is another round.
      carry: the state, and the rounds that were run.
    """

    # Branches are loops that may run not at all: XLA updates the caches in place through loops, but copies them for conditionals.
    # Rows that may be due when a round of each rung begins; a plain round adds one.
    rooms = [ladder.due_rows - 1 if rung is None else rung.max_depth + 1 for rung in ladder.rungs]

    def most_due(state: DecodeState) -> jax.Array:
        return jnp.max(jnp.where(state.running, state.lengths - state.draft.lengths, 0))

    def crowded(state: DecodeState) -> jax.Array:
        assert state.ladder is not None
        return most_due(state) > jnp.asarray(rooms, jnp.int32)[state.ladder.rung]

    def stay(index: int, carry: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
        rung = ladder.rungs[index]
        here: Drafter = PlainDrafter(capture_layers=drafter.capture_layers)
        if rung is not None:
            here = dataclasses.replace(drafter, tree=rung)

        def wanted(carry: tuple[DecodeState, jax.Array]) -> jax.Array:
            state, rounds = carry
            assert state.ladder is not None
            return go_on(state, rounds) & (state.ladder.rung == index) & (most_due(state) <= rooms[index])

        def body(carry: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
            state, rounds = carry
            assert state.ladder is not None
            new = decode_round(target, here, state, rule, index)
            counts = (new.accepted_at_depth - state.accepted_at_depth).sum(axis=1)
            recorded = state.ladder.record(ladder, index, counts, state.running)
            if rung is None:
                # Nothing was learned, so the choice is the same again, unless a slot has ended or it is time to try drafting.
                again = jnp.any(new.running != state.running) | recorded.probing
                chosen = dataclasses.replace(recorded, rung=jnp.where(again, UNDECIDED, index).astype(jnp.int32))
            else:
                chosen = recorded.choose(ladder, new.running)
            return dataclasses.replace(new, ladder=chosen), rounds + 1

        return jax.lax.while_loop(wanted, body, carry)

    def pass_through(carry: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
        state, rounds = carry
        assert state.ladder is not None
        state = dataclasses.replace(state, ladder=state.ladder.choose(ladder, state.running))
        with jax.named_scope("settle"):
            carry = jax.lax.while_loop(crowded, drafter.settle, state), rounds
        for index in range(len(ladder.rungs)):
            with jax.named_scope(f"rung_{index}"):
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
    until_finished: jax.Array,
) -> tuple[DecodeState, Report]:
    """Rounds on the device, without a transfer, until every slot has ended or has no room for another round in the report.

    Args:
      plan: the configuration; with several groups of devices each decodes its own slots, and runs its own number of rounds.
      weights: parameters.
      state: consumed.
      active: slots whose requests are still wanted, bool `[B]`; the others are frozen.
      max_rounds: return after so many rounds at the latest, int32 scalar; 0 only reports what prefills emitted.
      until_finished: return as soon as a slot has ended that ran at the start, bool scalar (so that it can be refilled).

    Returns:
      The new state and what the host reads of it.
    """
    body = functools.partial(_decode, plan)
    if plan.mesh is None:
        return body(weights, state, active, max_rounds, until_finished)
    weights_in, state_in = plan.specs(weights)
    whole, report_out = PartitionSpec(), PartitionSpec(DATA)
    run = spread(body, plan.mesh, (weights_in, state_in, whole, whole, whole), (state_in, report_out))
    return run(weights, state, active, max_rounds, until_finished)


def _decode(
    plan: Plan,
    weights: Weights,
    state: DecodeState,
    active: jax.Array,
    max_rounds: jax.Array,
    until_finished: jax.Array,
) -> tuple[DecodeState, Report]:
    """`decode` on one device."""
    target, drafter = plan.modules(weights)
    if plan.groups > 1:
        active = own_group(jnp.reshape(active, (plan.groups, plan.group_slots)), plan.mesh)
    state = dataclasses.replace(state, finish=jnp.where(active | ~state.running, state.finish, LENGTH))
    running_before = jnp.sum(state.running)
    kept = state.sampling
    assert kept is not None
    state = dataclasses.replace(state, sampling=kept.of_mode(plan.mode, plan.processed_logprobs))

    def go_on(state: DecodeState, rounds: jax.Array) -> jax.Array:
        running = jnp.sum(state.running)
        unread = jnp.max(jnp.where(state.running, state.unread.counts, 0))
        room = unread + plan.max_depth + 1 <= plan.report_tokens
        return (running > 0) & room & (rounds < max_rounds) & ~(until_finished & (running < running_before))

    def body(carry: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
        state, rounds = carry
        return decode_round(target, drafter, state, plan.rule), rounds + 1

    start = (state, jnp.zeros((), jnp.int32))
    if isinstance(plan.tree, Ladder):
        assert isinstance(drafter, EagleDrafter)
        state, _ = climb(plan.tree, target, drafter, plan.rule, go_on, start)
    else:
        state, _ = jax.lax.while_loop(lambda carry: go_on(*carry), body, start)
    state = dataclasses.replace(state, sampling=kept.after(state.sampling))
    report = Report.of(state, log_probs=plan.mode is SamplingMode.FULL)
    unread = dataclasses.replace(state.unread, counts=jnp.zeros_like(state.unread.counts))
    return dataclasses.replace(state, unread=unread), report
