"""Static trees: their shape, their nodes against one-path-at-a-time drafting, and what they accept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import golden
from support.drive import make_engine, make_plan, make_request, prefill_slots, serve

from eagle_jax.drafters.eagle import EagleDrafter
from eagle_jax.drafters.tree import NAMED_TREES, ROOT_PARENT, StaticTree

TREE = NAMED_TREES["mc_sim_7b_63"]
PROMPTS = [trace.prompt for trace in golden.traces() if trace.data["target"] == "target_A"][:2]


def test_the_named_tree_has_the_published_shape() -> None:
    assert (TREE.total_tokens, TREE.max_depth, TREE.top_k) == (26, 5, 4)
    assert np.bincount(TREE.depths).tolist() == [1, 4, 8, 8, 3, 2]


def test_paths_are_ordered_level_by_level_with_parents_before_children() -> None:
    tree = StaticTree.from_paths([[1, 0], [0], [1]])
    assert tree.paths == ((0,), (1,), (1, 0))
    assert tree.parents.tolist() == [ROOT_PARENT, 0, 0, 2]
    assert tree.depths.tolist() == [0, 1, 1, 2]
    assert tree.ranks.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "at least one node"),
        ([[]], "at least one node"),
        ([[0], [1, 0]], r"path \(1, 0\) has no parent: \(1,\) is missing"),
        ([[0], [0]], "must differ"),
        ([[0], [-1]], "integers of at least 0"),
        ([[0], [0.5]], "integers of at least 0"),
    ],
)
def test_paths_that_are_no_tree_raise(paths: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StaticTree.from_paths(paths)


def test_every_node_is_what_its_path_alone_would_draft() -> None:
    plan, weights = make_plan(
        golden.target("target_A").model, golden.draft("head_A_e3", "target_A").head, TREE,
        slots=2, max_length=64, prefill_chunk=16,
    )  # fmt: skip
    state = prefill_slots(plan, weights, PROMPTS, [64, 64])

    @jax.jit
    def propose(weights, state):
        drafter = plan.modules(weights)[1]
        assert isinstance(drafter, EagleDrafter)
        view = dataclasses.replace(state, sampling=None).view
        tree, draft = drafter.propose(state.draft, view)
        return tree, draft, drafter._extend(state.draft, view)[1]

    @jax.jit
    def one_path(weights, state, draft, last, tokens, levels):  # tokens [B, levels]: the path below the root
        drafter = plan.modules(weights)[1]
        tail, out, logits = drafter.empty_tail(2, tokens.shape[1]), last, [drafter.logits(last)]
        for level in range(tokens.shape[1]):
            seen = jnp.broadcast_to(levels <= level, (2, 1, tokens.shape[1]))
            out, tail = drafter.step(
                state.view, draft.cache, tokens[:, level : level + 1], out, level, tail, level, seen, levels
            )
            logits.append(drafter.logits(out))
        return jnp.concatenate(logits, axis=1), drafter.head.target_ids(
            jnp.arange(drafter.head.config.draft_vocab_size)
        )

    tree, draft, last = propose(weights, state)
    tokens, scores = np.asarray(tree.tokens), np.asarray(tree.scores)
    index = {(): 0} | {path: i + 1 for i, path in enumerate(TREE.paths)}
    depth = TREE.max_depth
    for path in TREE.paths:
        nodes = [index[path[:i]] for i in range(1, len(path) + 1)]
        padded = np.zeros((2, depth), np.int32)
        padded[:, : len(path)] = tokens[:, nodes]
        logits, ids = one_path(weights, state, draft, last, jnp.asarray(padded), jnp.arange(depth))
        log_probs = np.asarray(jax.nn.log_softmax(logits))
        for slot in range(2):
            total = 0.0
            for level, (node, rank) in enumerate(zip(nodes, path, strict=True)):
                best = np.argsort(-log_probs[slot, level], kind="stable")[rank]
                assert tokens[slot, node] == ids[best], (path, level)
                total += log_probs[slot, level, best]
            np.testing.assert_allclose(scores[slot, nodes[-1]], total, atol=1e-4)


def test_outputs_are_those_of_plain_decoding() -> None:
    target, head = golden.target("target_A").model, golden.draft("head_A_e1", "target_A").head
    free = [trace for trace in golden.traces() if trace.data["eos_token_id"] is None]
    traces = [trace for trace in free if trace.data["target"] == "target_A"][:2]
    engine = make_engine(target, head, tree=TREE, slots=2, max_length=64, prefill_chunk=16)
    results = serve(engine, [make_request(prompt=trace.prompt, max_new_tokens=30) for trace in traces])
    for trace, result in zip(traces, results, strict=True):
        assert result.token_ids == trace.data["naive_output_ids"][len(trace.prompt) :][:30]
    assert len({length for result in results for length in result.accepted_lengths}) > 2
