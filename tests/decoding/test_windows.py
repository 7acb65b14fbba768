"""Targets with sliding windows: what trees and chains say behind a cache is what transformers generates."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from support.drive import make_plan, prefill_slots, run_to_end
from support.float64_models import Float64Llama
from support.near_ties import NearTies
from support.oracle import Script, with_oracle

from eagle_jax.drafters.tree import ancestor_mask
from eagle_jax.loading import load_target
from eagle_jax.models import CacheContext, Llama
from eagle_jax.models.context import sliding_window

WINDOW, DEPTH, NEW, MAX_LENGTH, VOCABULARY = 3, 4, 40, 72, 6
BEYOND = DEPTH + 2  # tokens known past the budget, so that the drafts of the last round are right as well
PROMPTS = (1, 2, 9, 17, 23)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Qwen3": {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
}


def models(folder: Path, family: str) -> tuple[Any, Llama]:
    """A random model of transformers and ours, loaded from its files."""
    torch.manual_seed(6)
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "embed" in name:
                parameter.normal_(0.0, 1.0)
            elif parameter.ndim == 2:
                parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(1.0, 0.3)
    theirs.save_pretrained(folder)
    return theirs, load_target(folder, dtype="float32").model


def generate(model: Any, prompt: list[int], count: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=count, do_sample=False
        )
    return out[0, len(prompt) :].tolist()


def test_a_window_starts_at_a_row_of_the_cache() -> None:
    """Kernels turn the first row into a block of the cache, so a window that is not full yet starts at row 0, not before it."""
    positions = jnp.array([[0, 1, 2, 3, 4]])
    start, mask = sliding_window(3, positions, positions, None)
    np.testing.assert_array_equal(start, [[0, 0, 0, 1, 2]])
    np.testing.assert_array_equal(mask[0], np.tril(np.ones((5, 5), bool)) & ~np.tril(np.ones((5, 5), bool), -3))


@pytest.mark.parametrize("family", ["Qwen3", pytest.param("Mistral", marks=pytest.mark.slow)])
def test_every_node_sees_the_window_of_its_own_path(tmp_path: Path, family: str) -> None:
    """One forward of a tree behind committed rows, against transformers over the path of each node."""
    theirs, target = models(tmp_path, family)
    rng = np.random.default_rng(1)
    parents = np.array([-1, 0, 0, 1, 3, 4, 2, 6, 5])  # two branches, both longer than the window
    depths = np.array([0, 1, 1, 2, 3, 4, 2, 3, 5])
    prefix, nodes = rng.integers(0, VOCABULARY, 11).tolist(), rng.integers(0, VOCABULARY, len(parents)).tolist()

    def forward(tokens: Any, positions: Any, cache: Any, length: Any, mask: Any) -> Any:
        out = target(tokens[None], CacheContext(positions[None], cache, length[None], tail_mask=mask))
        return target.logits(out.hidden)[0], cache.write(out.rows, length[None])

    step = jax.jit(forward)
    cache, count = target.empty_cache(1, 32), jnp.int32(len(prefix))
    _, cache = step(jnp.asarray(prefix), jnp.arange(len(prefix)), cache, jnp.int32(0), None)
    mask = ancestor_mask(jnp.asarray(parents)[None], int(depths.max()))
    ours, _ = step(jnp.asarray(nodes), len(prefix) + jnp.asarray(depths), cache, count, mask)
    for node in range(len(nodes)):
        path, above = [], node
        while above >= 0:
            path.append(nodes[above])
            above = int(parents[above])
        with torch.no_grad():
            wanted = theirs(torch.tensor([prefix + path[::-1]])).logits[0, -1].numpy()
        np.testing.assert_allclose(ours[node], wanted, atol=1e-4 * np.abs(wanted).max(), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("children", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_trees_say_what_transformers_generates(tmp_path: Path, family: str, children: int) -> None:
    """Rounds accept 0 to DEPTH right drafts, as a script says: paths, prompts and chunks are longer than the window."""
    theirs, target = models(tmp_path, family)
    assert WINDOW in target.config.sliding_windows
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, n).tolist() for n in PROMPTS]
    texts = [prompt + generate(theirs, prompt, NEW + BEYOND) for prompt in prompts]
    assert len({token for text, size in zip(texts, PROMPTS, strict=True) for token in text[size + 8 :]}) > 3

    table = np.zeros((len(texts), MAX_LENGTH), np.int32)
    for row, text in zip(table, texts, strict=True):
        row[: len(text)] = text
    spoiled = rng.integers(1, DEPTH + 2, (len(texts), MAX_LENGTH + 1)).astype(np.int32)
    ranks = rng.integers(0, children, (len(texts), MAX_LENGTH + 1, DEPTH)).astype(np.int32)
    base, weights = make_plan(target, None, None, slots=len(texts), max_length=MAX_LENGTH, prefill_chunk=8)
    script = Script(jnp.asarray(table), jnp.asarray(spoiled), jnp.asarray(ranks))
    plan, weights = with_oracle(base, weights, script, DEPTH, children)
    state = prefill_slots(plan, weights, prompts, [len(prompt) + NEW for prompt in prompts])
    _, reports = run_to_end(plan, weights, state)

    reference = Float64Llama(target)
    ties, lengths = NearTies(lambda tokens: reference(tokens)[0][-1]), set()
    for slot, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        ties.compare(reports[slot].token_ids, text[len(prompt) : len(prompt) + NEW], prompt)
        accepted = reports[slot].round_lengths
        assert accepted[:-1] == spoiled[slot, : len(accepted) - 1].tolist()
        lengths |= set(accepted)
    ties.check()
    assert lengths == set(range(1, DEPTH + 2))
