"""Whole rounds of every structure and rule, against all continuations enumerated: a campaign (`-m slow`).

By default the same is shown in parts: what is drawn at a position (`test_seeded`), what a round of each rule emits
(`test_rejection`).
"""

import os

import pytest
from support.enumeration import Sampler, joint, next_logits, p_value

from eagle_jax.decoding.rules import make_rule
from eagle_jax.drafters.tree import StaticTree, TreeConfig

SAMPLES = int(os.environ.get("EAGLE_JAX_SAMPLES") or 50_000)
"""Seeds for each cell."""
REQUESTS = [
    {"temperature": t} | cut for t in (0.7, 1.0, 1.5) for cut in ({}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.15})
] + [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 4, "top_p": 0.7, "min_p": 0.1}]
CONTROLLED = [
    {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.5},
    {"temperature": 0.7, "logit_bias": {0: 2.0, 2: -3.0}, "top_p": 0.9},
    {"frequency_penalty": 1.0},
]
CHAIN, DYNAMIC = TreeConfig.chain(3), TreeConfig(total_tokens=7, depth=1, top_k=2)
STATIC = StaticTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
CASES = {
    "plain": (None, {}),
    "seeded chain": (CHAIN, {}),
    "seeded dynamic": (DYNAMIC, {}),
    "seeded static": (STATIC, {}),
    "seeded chain, greedy drafts": (CHAIN, {"draft_sample_method": "greedy"}),
    "standard greedy chain": (CHAIN, {"rejection_sample_method": "standard"}),
    "standard greedy dynamic": (DYNAMIC, {"rejection_sample_method": "standard"}),
    "standard greedy static": (STATIC, {"rejection_sample_method": "standard"}),
    "standard sampled chain": (CHAIN, {"rejection_sample_method": "standard", "draft_sample_method": "probabilistic"}),
    "block": (CHAIN, {"rejection_sample_method": "block"}),
    "recursive": (STATIC, {"rejection_sample_method": "recursive"}),
    "traversal": (STATIC, {"rejection_sample_method": "traversal"}),
}
CELLS = 2 * len(CASES) * (len(REQUESTS) + len(CONTROLLED))


@pytest.mark.slow
@pytest.mark.parametrize("missing", [False, True], ids=["whole vocabulary", "likeliest missing"])
@pytest.mark.parametrize("requests", [REQUESTS, CONTROLLED], ids=["cuts", "controls"])
@pytest.mark.parametrize("case", CASES)
def test_three_tokens(case: str, requests: list[dict], missing: bool) -> None:
    tree, methods = CASES[case]
    if tree is None and missing:
        pytest.skip("plain decoding has no head")
    likeliest = int(next_logits()[()].argmax())
    sampler = Sampler(tree, make_rule(**methods), requests, missing=likeliest if missing else None)
    counts = sampler.counts(SAMPLES)
    values = [p_value(counts[i], joint(request)) for i, request in enumerate(requests)]
    print(
        f"{case}: {sampler.accepted / sampler.drafted_rounds:.3f} accepted a round; p "
        + " ".join(f"{p:.2g}" for p in values)
    )
    assert min(values) > 1e-3 / CELLS
    # Drafts that never are the likeliest token are accepted in a round out of eighty.
    assert tree is None or sampler.accepted > 0.01 * sampler.drafted_rounds
