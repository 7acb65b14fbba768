"""Recorded runs of the PyTorch reference, reproduced round by round.

The traces of tests/golden are a selection. To run over another folder of the same layout:

    EAGLE_JAX_GOLDEN=/path/to/folder pytest tests/decoding/test_golden.py
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import golden
from support.drive import Round, RoundDriver, make_plan, prefill_slots
from support.golden import Trace

from eagle_jax.decoding.plan import Plan, Weights
from eagle_jax.decoding.state import RUNNING, STOPPED, DecodeState
from eagle_jax.drafters.eagle import EagleDrafter
from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.models import CacheContext

SLOTS = 3
MAX_LENGTH = 120
SAFE_GAP = 2e-5
"""Below this distance between two scores of the draft, another correct program may choose otherwise."""

Group = tuple[str, str, TreeConfig]
GROUPS = {
    f"{head}_t{tree.total_tokens}d{tree.depth}k{tree.top_k}": (target, head, tree)
    for target, head, tree in dict.fromkeys(trace.group for trace in golden.traces())
}


@functools.cache
def driver(group: Group) -> tuple[RoundDriver, Weights]:
    target_name, head_name, tree = group
    plan, weights = make_plan(
        golden.target(target_name).model, golden.draft(head_name, target_name).head, tree,
        slots=SLOTS, max_length=MAX_LENGTH, prefill_chunk=16,
    )  # fmt: skip
    return RoundDriver(plan), weights


@dataclasses.dataclass
class Replay:
    """What one run of up to SLOTS traces compared."""

    rounds: int = 0
    trees: int = 0
    unsafe_trees: int = 0
    log_probs: int = 0
    lengths: set[int] = dataclasses.field(default_factory=set)


def check_round(trace: Trace, index: int, slot: int, result: Round, calls: list[np.ndarray], replay: Replay) -> bool:
    """Compares one round of one slot; False if the trees were allowed to differ and did."""
    recorded = trace.rounds[index]
    tree, acceptance = result.tree, result.acceptance
    where = f"{trace.name}, round {index}"
    gap = min(recorded["min_beam_gap"], recorded["final_selection_gap"])
    same = tree.tokens[slot].tolist() == recorded["draft_tokens"] and tree.parents[slot].tolist() == recorded["parents"]
    if gap > SAFE_GAP:
        assert tree.tokens[slot].tolist() == recorded["draft_tokens"], where
        assert tree.parents[slot].tolist() == recorded["parents"], where
        assert tree.depths[slot].tolist() == recorded["tree_position_ids"], where
        for call, got in enumerate(calls):
            wanted = trace.arrays.get(f"r{index}_h{call}_logprobs")
            if wanted is not None:
                np.testing.assert_allclose(got[slot], wanted, atol=1e-4, err_msg=f"{where}, head call {call}")
                replay.log_probs += 1
        if (mask := trace.arrays.get(f"r{index}_tree_mask")) is not None:
            np.testing.assert_array_equal(result.output.ancestors[slot], mask, where)
        # Each node's score is its parent's plus its own log-probability, which is never positive.
        assert (
            np.diff(np.stack([tree.scores[slot][tree.parents[slot][1:]], tree.scores[slot][1:]]), axis=0) <= 0
        ).all()
        replay.trees += 1
    elif not same:
        replay.unsafe_trees += 1
        return False
    count = recorded["accept_length"]
    assert acceptance.counts[slot] == count, where
    assert acceptance.path[slot, : count + 1].tolist() == recorded["accepted_nodes"], where
    assert acceptance.tokens[slot, : count + 1].tolist() == [*recorded["accepted_tokens"][1:], recorded["next_root"]], (
        where
    )
    replay.rounds += 1
    replay.lengths.add(count + 1)
    return True


def replay_traces(group: Group, batch: list[Trace]) -> Replay:
    """Runs up to SLOTS traces side by side and compares every round."""
    run, weights = driver(group)
    limits, stops = [], []
    for trace in batch:
        room = trace.data["max_new_tokens"]
        # Runs that end by a budget are compared up to there; the others exactly as far as they were recorded.
        wanted = len(trace.output) if not trace.name.startswith("maxnew") else max(room, 1)
        limits.append(min(len(trace.prompt) + wanted, MAX_LENGTH))
        stops.append([] if trace.data["eos_token_id"] is None else [trace.data["eos_token_id"]])
    state = prefill_slots(run.plan, weights, [t.prompt for t in batch], limits, stops)
    replay, following = Replay(), [True] * len(batch)
    while (np.asarray(state.finish) == RUNNING).any():
        before = jax.device_get((state.lengths, state.rounds, state.finish))
        state, result, calls = run(weights, state)
        assert len(calls) == 1 + run.plan.tree.depth
        for slot, trace in enumerate(batch):
            length, index, finish = (int(x[slot]) for x in before)
            if finish == RUNNING and following[slot]:
                assert length == trace.rounds[index]["input_len"]
                following[slot] = check_round(trace, index, slot, result, calls, replay)
    tokens, lengths, finish = jax.device_get((state.tokens, state.lengths, state.finish))
    for slot, trace in enumerate(batch):
        output = tokens[slot, len(trace.prompt) : lengths[slot] + 1].tolist()
        wanted, eos = trace.output[: limits[slot] - len(trace.prompt)], trace.data["eos_token_id"]
        if eos in wanted:
            wanted = wanted[: wanted.index(eos) + 1]
            assert finish[slot] == STOPPED
        assert output == wanted, trace.name  # lossless, so also where a tree was allowed to differ
        assert (
            eos is not None
            or "naive_output_ids" not in trace.data
            or all(a == b for a, b in zip(output, trace.data["naive_output_ids"][len(trace.prompt) :], strict=False))
        )
    return replay


@pytest.mark.parametrize("group", GROUPS)
def test_every_round_of_the_reference(group: str) -> None:
    members = [trace for trace in golden.traces() if trace.group == GROUPS[group]]
    total = Replay()
    for first in range(0, len(members), SLOTS):
        part = replay_traces(GROUPS[group], members[first : first + SLOTS])
        total.rounds += part.rounds
        total.trees += part.trees
        total.unsafe_trees += part.unsafe_trees
        total.log_probs += part.log_probs
        total.lengths |= part.lengths
    print(f"{group}: {len(members)} traces, {total}")
    assert total.trees > 10
    assert total.log_probs > 0, "no trace of the group has log-probabilities"
    assert len(total.lengths) > 1, "accepted lengths must vary"
    assert total.unsafe_trees <= total.trees // 20


@functools.partial(jax.jit, static_argnames="plan")
def from_scratch(plan: Plan, weights: Weights, state: DecodeState) -> tuple[jax.Array, ...]:
    """Draft logits behind each slot's text, and all cache rows, computed without anything that earlier rounds left."""
    target, drafter = plan.modules(weights)
    assert isinstance(drafter, EagleDrafter)
    head, batch, size = drafter.head, plan.slots, plan.max_length
    tokens, none = state.tokens[:, :size], jnp.zeros((batch,), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(size), (batch, size))
    out = target(tokens, CacheContext(positions, target.empty_cache(batch, 1), none), aux_layers=drafter.aux_layers)
    context = CacheContext(positions, head.empty_cache(batch, 1), none)
    hidden, draft_rows = head(drafter.embed(state.tokens[:, 1 : size + 1]), head.fuse(out.aux), context)
    last = jnp.take_along_axis(hidden, (state.lengths - 1)[:, None, None], axis=1)
    return drafter.logits(last), out.rows.keys, out.rows.values, draft_rows.keys, draft_rows.values


@pytest.mark.parametrize("group", [g for g in GROUPS if g.endswith(("A_e3_t26d3k4", "A_e3_t6d4k1", "A_e1_t26d3k4"))])
def test_a_round_leaves_what_a_prefill_of_the_text_would(group: str) -> None:
    """The next draft, and every committed row of both caches: accepted rows are true, rejected ones left no trace."""
    run, weights = driver(GROUPS[group])
    members = [trace for trace in golden.traces() if trace.group == GROUPS[group]][:SLOTS]
    limits = [min(len(t.prompt) + 40, MAX_LENGTH) for t in members]
    state = prefill_slots(run.plan, weights, [t.prompt for t in members], limits)
    seen = set()
    earlier = np.asarray(state.lengths)
    for _ in range(12):
        before = jax.device_get((state.finish, state.lengths))
        fresh = jax.device_get(from_scratch(run.plan, weights, state))
        state, result, calls = run(weights, state)
        committed = (state.target_cache, result.memory.cache)
        for slot in range(len(members)):
            finish, length = (x[slot] for x in before)
            if finish != RUNNING:
                continue
            seen.add(int(length - earlier[slot]))
            logits = np.asarray(fresh[0][slot])
            wanted = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            np.testing.assert_allclose(calls[0][slot], wanted, atol=1e-5 * np.abs(logits).max())
            for cache, keys, values in ((committed[0], *fresh[1:3]), (committed[1], *fresh[3:5])):
                for kept, true in zip((*cache.keys, *cache.values), (*keys, *values), strict=True):
                    true_rows = np.asarray(true)[slot, :, :length]
                    scale = np.abs(true_rows).max()
                    np.testing.assert_allclose(np.asarray(kept)[slot, :, :length], true_rows, atol=1e-5 * scale)
        earlier = before[1]
    assert max(seen) > 1, "rounds that accept something must precede a draft"
    if golden.FOLDER == golden.COMMITTED and len(members) == SLOTS:
        assert 1 in seen, "rounds that accept nothing must precede a draft too"


def test_the_folder_is_complete() -> None:
    names = {trace.name for trace in golden.traces()}
    assert {
        "greedy_A_e1_t6d4k1_p0",
        "greedy_A_e3_t6d4k1_p0",
        "greedy_A_e3_t26d3k4_p3",
        "greedy_B_e3_t26d3k4_p0",
        "greedy_Q_e3_t26d3k4_p0",
        "eosmid_A_e3",
    } <= names
