"""Heads with unusual options in whole rounds: the text stays, and what is accepted is what the definition would draft."""

from pathlib import Path
from typing import Any

import pytest
from support.float64_models import Float64Llama
from support.tiny import draft_config, llama_config, random_head, random_llama
from support.torch_heads import TorchHead, file_tensors, reading

from eagle_jax import Draft, Target, generate, speculative_generate

VOCABULARY = 7
TARGET = llama_config(vocab_size=VOCABULARY, max_position_embeddings=256)
PROMPTS = [[1, 2, 3], [1, 0], [4] * 9, [6, 5]]
EAGLE = {"method": "eagle", "capture_layers": (2,), "own_lm_head": False}

VARIANTS: dict[str, dict[str, Any]] = {
    "EAGLE-1 with the norms of HASS": EAGLE | {"embedding_norm": True, "first_input_norm": True, "head_norm": True},
    "EAGLE-3 of the last state with the target's output head": {
        "capture_layers": (2,),
        "use_fc": False,
        "own_lm_head": False,
    },
    "EAGLE-3 with windows, normed heads and two layers": {
        "num_hidden_layers": 2,
        "sliding_windows": (3, None),
        "qk_norm": True,
        "norm_output": True,
    },
}
SEEDS = dict(zip(VARIANTS, (16, 6, 10), strict=True))
"""Of heads that are often right by chance."""


def pair(changes: dict[str, Any], seed: int) -> tuple[Target, Draft]:
    model = random_llama(TARGET, seed=4)
    config = draft_config(TARGET, **changes)
    folder = Path("tiny")
    target = Target(model=model, config=TARGET, tokenizer=None, name="target", path=folder, generation_config={})
    return target, Draft(head=random_head(config, seed=seed), config=config, name="head", path=folder, notes=())


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_rounds_accept_what_the_head_drafts_and_keep_the_text(variant: str) -> None:
    target, draft = pair(VARIANTS[variant], SEEDS[variant])
    plain = generate(target, PROMPTS, max_new_tokens=40, ignore_eos=True)
    for shape in ({"num_speculative_tokens": 3}, {"tree": {"total_tokens": 12, "depth": 3, "top_k": 3}}):
        result = speculative_generate(target, draft, PROMPTS, max_new_tokens=40, ignore_eos=True, **shape)
        assert result.token_ids == plain.token_ids
        lengths = {length for row in result.metrics for length in row.accepted_lengths}
        assert len(lengths) >= 3, f"accepted lengths {lengths} alone prove little"
    # A chain's accepted lengths follow from the head's own drafts behind every prefix: replay them.
    chain = speculative_generate(target, draft, PROMPTS, max_new_tokens=40, ignore_eos=True, num_speculative_tokens=3)
    for prompt, output, row in zip(PROMPTS, chain.token_ids, chain.metrics, strict=True):
        assert row.accepted_lengths[:6] == replay(target, draft, [*prompt, *output], len(prompt), rounds=6)


def replay(target: Target, draft: Draft, text: list[int], start: int, rounds: int) -> list[int]:
    """Accepted lengths of the first rounds of chains of 3 over a text, from the head run afresh behind every prefix."""
    reference = Float64Llama(target.model)
    features = reference.features(text, draft.config.capture_layers)
    embedding, lm_head = reference.weights["embed.weight"], reference.weights["lm_head.weight"]
    head = TorchHead(file_tensors(draft.head), reading(draft.config), embedding, lm_head)
    out, known = [], start
    while len(out) < rounds:
        _, drafted = head.chain(text[: known + 1], features[:known], 3)
        accepted = 0
        while accepted < 3 and drafted[accepted] == text[known + 1 + accepted]:
            accepted += 1
        out.append(accepted + 1)
        known += accepted + 1
    return out
