"""The training forward computes what drafting computes: the same rows, tokens, positions and logits at every depth."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import golden, tiny
from support.draft_chain import QUICK
from support.tiny import draft_config, llama_config, random_llama

from eagle_jax.drafters.eagle import EagleDrafter
from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.models import CacheContext, DraftConfig, DraftHead, Eagle3Head, EagleHead, KVCache, Llama
from eagle_jax.training.batch import PackedBatch
from eagle_jax.training.contexts import PackedContext, run_draft
from eagle_jax.training.head import HeadTemplate, split_head
from eagle_jax.training.step import make_masks

STEPS = 3
TARGET = llama_config(vocab_size=29)
HEADS = {
    "eagle3": {},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True, "norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "two layers": {"num_hidden_layers": 2},
    "window": {"num_hidden_layers": 2, "sliding_windows": (3, None)},
    "qwen": {"qk_norm": True, "qkv_bias": True},
    "eagle": {"method": "eagle"},
    "eagle with norms": {
        "method": "eagle", "embedding_norm": True, "hidden_norm": True, "first_input_norm": True, "head_norm": True,
    },
}  # fmt: skip


def head_config(name: str) -> DraftConfig:
    settings = dict(HEADS[name])
    if settings.get("method") == "eagle":
        settings |= {"capture_layers": (2,), "own_lm_head": False, "fc_bias": True}
    else:
        settings["draft_vocab_size"] = 17
    return draft_config(TARGET, **settings)


def packed(documents: list[np.ndarray], padding: int = 0) -> PackedBatch:
    """One row."""
    tokens = np.concatenate([*documents, np.zeros(padding, np.int32)])
    segments = np.concatenate([np.full(len(d), i) for i, d in enumerate(documents, 1)] + [np.zeros(padding)])
    positions = np.concatenate([*(np.arange(len(d)) for d in documents), np.zeros(padding)])
    rows = [x[None].astype(np.int32) for x in (tokens, segments, positions)]
    return PackedBatch(*map(jnp.asarray, rows), jnp.asarray(rows[1] > 0))


def trained_logits(target: Llama, head: DraftHead, batch: PackedBatch, steps: int) -> tuple[jax.Array, jax.Array]:
    """The features, and the logits `[K, B, T, Vd]` of each step."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(weights: Any, batch: PackedBatch) -> tuple[jax.Array, jax.Array]:
        target, head = nnx.merge(graph, weights)
        features = target(batch.tokens, PackedContext(batch), aux_layers=head.config.capture_layers).aux
        drafter = EagleDrafter(head, target, tree=TreeConfig.chain(steps))
        return features, jnp.stack([drafter.logits(rows) for rows in run_draft(head, target, features, batch, steps)])

    graph, weights = nnx.split((target, head))
    return run(weights, batch)


def drafted_logits(
    target: Llama, head: DraftHead, text: np.ndarray, anchors: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The same by the code of decoding: features, and logits `[K, anchors, Vd]`; what is drafted are the text's tokens."""
    length, count = len(text), len(anchors)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(weights: Any) -> tuple[jax.Array, jax.Array]:
        target, head = nnx.merge(graph, weights)
        drafter = EagleDrafter(head, target, tree=TreeConfig.chain(STEPS))
        rows_of_text, nothing = jnp.arange(length)[None], jnp.zeros((1,), jnp.int32)
        whole = CacheContext(rows_of_text, target.empty_cache(1, 1), nothing)
        features = target(text[None], whole, aux_layers=head.config.capture_layers).aux
        context = CacheContext(rows_of_text, head.empty_cache(1, 1), nothing)
        out, rows = head(drafter.embed(np.append(text[1:], 0)[None]), head.fuse(features), context)
        # Rows behind an anchor lie beyond its length, where decoding has rubbish too.
        cache = KVCache(*(tuple(jnp.repeat(x, count, axis=0) for x in part) for part in (rows.keys, rows.values)))
        state = types.SimpleNamespace(lengths=jnp.asarray(anchors + 1, jnp.int32))
        hidden = out[0, anchors][:, None]
        logits = [drafter.logits(hidden)]
        tail = drafter.empty_tail(count, STEPS - 1)
        for level in range(STEPS - 1):
            mask = jnp.broadcast_to(jnp.arange(STEPS - 1) <= level, (count, 1, STEPS - 1))
            drafted = jnp.asarray(text[anchors + 2 + level])[:, None]
            hidden, tail = drafter.step(state, cache, drafted, hidden, level, tail, level, mask, jnp.arange(STEPS - 1))
            logits.append(drafter.logits(hidden))
        return features, jnp.stack(logits)[:, :, 0]

    graph, weights = nnx.split((target, head))
    features, logits = run(weights)
    return np.asarray(features), np.asarray(logits)


QUICKLY = ("eagle3.1", "window", "eagle")
"""In the default run: the window head has the published layers too, and two of them."""


@pytest.mark.parametrize("name", [n if n in QUICKLY else pytest.param(n, marks=pytest.mark.slow) for n in HEADS])
def test_step_k_of_training_is_depth_k_of_drafting(name):
    config = head_config(name)
    target = random_llama(TARGET, 1)
    head = tiny._random(EagleHead if config.method == "eagle" else Eagle3Head, config, 2, jnp.float32, 1.5)
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 29, size).astype(np.int32) for size in (5, 13, 4)]
    batch = packed(documents, padding=2)
    template = HeadTemplate(config)
    rebuilt = template.build(*split_head(head))
    features, logits = trained_logits(target, rebuilt, batch, STEPS)
    text, start = documents[1], len(documents[0])
    anchors = np.arange(len(text) - STEPS)
    alone, expected = drafted_logits(target, head, text, anchors)
    np.testing.assert_allclose(np.asarray(features)[0, start : start + len(text)], alone[0], atol=1e-4, rtol=0)
    for k in range(STEPS):
        got = np.asarray(logits)[k, 0, start + anchors]
        np.testing.assert_allclose(got, expected[k], atol=1e-4, rtol=0, err_msg=f"step {k}")
    # The comparison would notice a row, a token or a position that is off by one.
    assert np.abs(np.diff(expected, axis=1)).max() > 0.1


@pytest.mark.parametrize("name", ["greedy_A_e3", "greedy_A_e1"])
def test_golden_heads_pair_feature_t_and_token_t_plus_1_to_predict_token_t_plus_2(name):
    """The reference's own drafts: the children of each root are among the likeliest tokens of the training row behind it."""
    trace = next(t for t in golden.traces() if t.name.startswith(name) and len(t.rounds) > 3)
    target = golden.target(trace.data["target"])
    draft = golden.draft(trace.data["head"], trace.data["target"])
    text = np.array(trace.prompt + trace.output, np.int32)
    batch = packed([text])
    _, step_logits = trained_logits(target.model, draft.head, batch, 1)
    logits = np.asarray(step_logits)[0, 0]
    right = 0
    for record in trace.rounds:
        root = record["input_len"]  # index of the pending token
        row = root - 1
        assert text[root] == record["draft_tokens"][0]
        best = np.asarray(draft.head.target_ids(jnp.argsort(-logits[row])[: trace.data["top_k"]]))
        print(
            f"row {row}: feature of token {row}, embeds token {row + 1} ({text[root]}), drafts token {row + 2}: {best}"
        )
        children = [
            t for t, parent in list(zip(record["draft_tokens"], record["parents"], strict=True))[1:] if parent == 0
        ]
        assert set(children) <= set(best.tolist())
        assert best[0] in children
        right += int(best[0] == text[root + 1]) if root + 1 < len(text) else 0
    assert right  # some of these drafts are accepted, so the texts are not compared with noise


def test_labels_and_masks_of_a_printed_sequence():
    """A prompt of 3 tokens and an answer of 4, then another document: which rows of each step count, and what they predict."""
    batch = packed([np.arange(10, 17, dtype=np.int32), np.arange(30, 34, dtype=np.int32)], padding=1)
    assistant = np.zeros((1, 12), bool)
    assistant[0, 3:7] = assistant[0, 9:11] = True
    batch = PackedBatch(batch.tokens, batch.segments, batch.positions, jnp.asarray(assistant))
    masks = make_masks(batch, 3)
    lines = []
    for k in range(3):
        for s in np.flatnonzero(np.asarray(masks.supervised)[k, 0]):
            t = s - 1 - k
            tokens = np.asarray(batch.tokens)[0]
            drafted = "drafted" if np.asarray(masks.drafts)[k, 0, s] else "trained only"
            lines.append(
                f"step {k} row {t}: feature of {tokens[t]}, embeds {tokens[t + 1 + k]}, predicts {tokens[s + 1]}, {drafted}"
            )
    print("\n".join(lines))
    assert lines == [
        # The first token of an answer comes from the prefill, so no draft is made for it, but the row can learn it.
        "step 0 row 1: feature of 11, embeds 12, predicts 13, trained only",
        "step 0 row 2: feature of 12, embeds 13, predicts 14, drafted",
        "step 0 row 3: feature of 13, embeds 14, predicts 15, drafted",
        "step 0 row 4: feature of 14, embeds 15, predicts 16, drafted",
        "step 0 row 7: feature of 30, embeds 31, predicts 32, trained only",
        "step 0 row 8: feature of 31, embeds 32, predicts 33, drafted",
        "step 1 row 0: feature of 10, embeds 12, predicts 13, trained only",
        "step 1 row 1: feature of 11, embeds 13, predicts 14, trained only",
        "step 1 row 2: feature of 12, embeds 14, predicts 15, drafted",
        "step 1 row 3: feature of 13, embeds 15, predicts 16, drafted",
        "step 1 row 7: feature of 30, embeds 32, predicts 33, trained only",
        "step 2 row 0: feature of 10, embeds 13, predicts 14, trained only",
        "step 2 row 1: feature of 11, embeds 14, predicts 15, trained only",
        "step 2 row 2: feature of 12, embeds 15, predicts 16, drafted",
    ]
