"""Heads of every generation and with every option, drafting as decoding does, against float64 PyTorch at every depth."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.draft_chain import cached_chain
from support.tiny import draft_config, llama_config, random_head, random_llama
from support.torch_heads import TorchHead, file_tensors, reading

from eagle_jax.drafters.eagle import EagleDrafter
from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.models import make_head

VOCABULARY, KNOWN, DEPTH = 23, 12, 6
TARGET = llama_config(vocab_size=VOCABULARY)
EAGLE = {"method": "eagle", "capture_layers": (2,), "own_lm_head": False}
LAST = {"capture_layers": (2,), "use_fc": False}

VARIANTS: dict[str, dict[str, Any]] = {
    "EAGLE-1": EAGLE | {"fc_bias": True},
    "EAGLE-1 with the norms of HASS, biases and two layers": EAGLE
    | {"embedding_norm": True, "first_input_norm": True, "head_norm": True, "num_hidden_layers": 2}
    | {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "EAGLE-3 of the last state, windows in one of two layers, normed heads": LAST
    | {"num_hidden_layers": 2, "sliding_windows": (None, 4), "qk_norm": True, "own_lm_head": False},
}
MORE: dict[str, dict[str, Any]] = {
    "EAGLE-1 fed back normed, with a normed feature": EAGLE | {"final_norm": True, "hidden_norm": True},
    "EAGLE-1 with everything of its own": EAGLE
    | {"own_lm_head": True, "own_embedding": True, "draft_vocab_size": 9, "sliding_windows": (5,)},
    "EAGLE-3 with a window of one row": {"sliding_windows": (1,)},
    "EAGLE-3 with a window longer than the text": {"sliding_windows": (100,), "norm_output": True},
    "EAGLE-3 with biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "norm_before_residual": True},
    "EAGLE-3 of two states": {"capture_layers": (0, 2), "fc_norm": True},
    "EAGLE-3 of one state through fc, wider than the target": {
        "capture_layers": (1,),
        "hidden_size": 48,
        "own_embedding": True,
    },
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MORE]


@pytest.mark.parametrize("variant", [*VARIANTS, *SLOW])
def test_every_depth_equals_the_definition(variant: str) -> None:
    config = draft_config(TARGET, **(VARIANTS | MORE)[variant])
    # EAGLE-1 does not norm what its output head reads; small weights keep logits, and their last digits, small.
    head = random_head(config, seed=len(variant), gain=1.5 if config.method == "eagle3" else 0.8)
    rng = np.random.default_rng(4)
    table, lm_head = rng.standard_normal((2, VOCABULARY, TARGET.hidden_size))
    lm_head *= 0.2
    tokens = rng.integers(0, VOCABULARY, KNOWN + 1).tolist()
    features = rng.standard_normal((KNOWN, config.feature_size))
    tensors = file_tensors(head)
    wanted, _ = TorchHead(tensors, reading(config), table, lm_head).chain(tokens, features, DEPTH)
    got = cached_chain(head, table, lm_head, tokens, features, DEPTH)
    assert wanted[0].std() > 0.3, "a flat head proves nothing"
    for depth in range(DEPTH):
        top = np.sort(wanted[depth])[-2:]
        assert top[1] - top[0] > 1e-3, "choose a seed without near-ties"
        np.testing.assert_allclose(got[depth], wanted[depth], atol=1e-4, err_msg=f"depth {depth + 1}")
    # Whatever is optional changes the definition, so that a module which left it out would have been seen.
    always = ("midlayer.hidden_norm", "midlayer.input_layernorm", "layers.1.input_layernorm")
    optional = [n for n in tensors if n.endswith("bias") or ("norm" in n and "post_attention" not in n)]
    for name in optional:
        if name.startswith(always) or (name == "norm.weight" and config.method == "eagle3"):
            continue
        group = name[:7] if name.startswith("fc_norm") else name  # one norm for each state, or none
        left = {n: t for n, t in tensors.items() if not n.startswith(group)}
        other, _ = TorchHead(left, reading(config), table, lm_head).chain(tokens, features, 2)
        assert max(np.abs(a - b).max() for a, b in zip(other, wanted[:2], strict=True)) > 1e-3, name
    for flags in ({"windows": ()}, {"norm_output": False}, {"norm_before_residual": False}):
        changed = dataclasses.replace(reading(config), **flags)
        if changed != reading(config) and config.sliding_windows != (100,):
            other, _ = TorchHead(tensors, changed, table, lm_head).chain(tokens, features, 2)
            assert max(np.abs(a - b).max() for a, b in zip(other, wanted[:2], strict=True)) > 1e-3, flags


@pytest.mark.parametrize(
    "changes", [EAGLE | {"head_norm": True}, LAST | {"own_lm_head": False}], ids=["eagle", "eagle3"]
)
def test_the_drafter_reads_the_targets_output_head_as_the_head_would_its_own(changes: dict[str, Any]) -> None:
    target = random_llama(TARGET, seed=1)
    head = random_head(draft_config(TARGET, **changes), seed=2)
    hidden = np.random.default_rng(0).standard_normal((1, 2, TARGET.hidden_size)).astype(np.float32)
    drafter = EagleDrafter(head, target, tree=TreeConfig.chain(2))
    norm, lm_head = (np.asarray(x[...], np.float64) for x in (head.norm.weight, target.lm_head.weight))
    normed = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-6) * norm
    np.testing.assert_allclose(drafter.logits(jnp.asarray(hidden)), normed @ lm_head.T, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"own_lm_head": False, "draft_vocab_size": 9}, "drafts 9 tokens needs its own lm_head.weight"),
        (LAST | {"capture_layers": (1, 2)}, "without fc reads one hidden state of its own width 32"),
        (EAGLE | {"final_norm": True, "head_norm": True}, "final_norm and head_norm exclude each other"),
        ({"sliding_windows": (4, 4)}, "must have one entry for each of 1 layers"),
    ],
    ids=str,
)
def test_configurations_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draft_config(TARGET, **changes)


def test_an_eagle1_head_reads_one_state() -> None:
    with pytest.raises(ValueError, match="reads one hidden state of its own width 32, got 64"):
        make_head(draft_config(TARGET, **(EAGLE | {"capture_layers": (1, 2)})), dtype=jnp.float32, rngs=nnx.Rngs(0))
