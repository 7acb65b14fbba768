"""The EAGLE-3 head against its float64 definition, at every draft depth and in every variant."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support.draft_chain import cached_chain
from support.float64_models import Float64Eagle3, log_softmax
from support.tiny import draft_config, llama_config, random_head

from eagle_jax.models import CacheContext, DraftConfig
from eagle_jax.models.eagle_config import default_capture_layers

VOCABULARY, WIDTH, KNOWN, DEPTH = 23, 32, 12, 6
TARGET = llama_config(vocab_size=VOCABULARY)

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "all of EAGLE-3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "two layers": {"num_hidden_layers": 2, "norm_output": True},
    "own narrower embedding": {"own_embedding": True, "hidden_size": 24, "head_dim": 12},
    "reduced vocabulary": {"draft_vocab_size": 9},
    "head_dim": {"head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 4, "qkv_bias": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_depth_equals_the_definition(variant: str) -> None:
    config = draft_config(TARGET, **VARIANTS[variant])
    head = random_head(config, seed=len(variant))
    rng = np.random.default_rng(3)
    table = rng.standard_normal((VOCABULARY, WIDTH))
    tokens = rng.integers(0, VOCABULARY, KNOWN + 1)
    features = 2 * rng.standard_normal((KNOWN, config.feature_size))

    wanted = Float64Eagle3(head, table).chain(tokens[:KNOWN].tolist(), features, int(tokens[KNOWN]), DEPTH)
    got = cached_chain(head, table, table, tokens.tolist(), features, DEPTH)
    assert wanted[0].std() > 0.5, "a flat head proves nothing"
    for depth in range(DEPTH):
        assert wanted[depth].shape == (config.draft_vocab_size,)
        top = np.sort(wanted[depth])[-2:]
        assert top[1] - top[0] > 1e-3, "choose a seed without near-ties"
        np.testing.assert_allclose(got[depth], wanted[depth], atol=5e-5, err_msg=f"depth {depth + 1}")
    # Every flag changes something here, so an ignored one would have been seen.
    if flags := {k: False for k, v in VARIANTS[variant].items() if v is True and k.startswith("norm")}:
        off = Float64Eagle3(head, table)
        object.__setattr__(off, "config", DraftConfig(**{**vars(config), **flags}))
        other = off.chain(tokens[:KNOWN].tolist(), features, int(tokens[KNOWN]), DEPTH)
        assert max(np.abs(a - b).max() for a, b in zip(other, wanted, strict=True)) > 1e-2


def test_logits_are_those_of_the_draft_vocabulary() -> None:
    config = draft_config(TARGET, draft_vocab_size=9)
    head = random_head(config, seed=1)
    ids = np.asarray(head.target_ids(jnp.arange(9)))
    assert ids.dtype == np.int32
    assert len(set(ids.tolist())) == 9
    assert not np.array_equal(ids, np.arange(9))
    hidden = jnp.float32(np.random.default_rng(0).standard_normal((2, 3, config.hidden_size)))
    logits = np.asarray(head.logits(hidden))
    assert logits.shape == (2, 3, 9)
    reference = Float64Eagle3(head, np.zeros((VOCABULARY, WIDTH)))
    np.testing.assert_allclose(
        log_softmax(logits.astype(np.float64))[1], reference.log_probs(np.asarray(hidden[1], np.float64)), atol=1e-5
    )


def test_bfloat16_heads_stay_in_bfloat16() -> None:
    head = random_head(draft_config(TARGET), seed=0, dtype=jnp.bfloat16)
    features = jnp.ones((1, 2, head.config.feature_size), jnp.float32)
    fused = head.fuse(features)
    assert fused.dtype == jnp.bfloat16
    cache = head.empty_cache(1, 4)
    out, rows = head(fused, fused, CacheContext(jnp.arange(2)[None], cache, jnp.zeros((1,), jnp.int32)))
    assert out.dtype == rows.keys[0].dtype == jnp.bfloat16
    assert head.logits(out).dtype == jnp.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_attention_heads 3 .* 2"),
        ({"draft_vocab_size": 24}, "draft_vocab_size 24 exceeds vocab_size 23"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"hidden_size": 24}, "hidden_size 24 differs from the target's 32"),
        ({"capture_layers": (1, 1, 2)}, "distinct and ascending"),
        ({"capture_layers": (2, 1, 0)}, "distinct and ascending"),
    ],
    ids=str,
)
def test_configurations_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draft_config(TARGET, **changes)


def test_default_capture_layers() -> None:
    assert default_capture_layers(32) == (2, 16, 29)
    assert default_capture_layers(8) == (2, 4, 5)
    assert default_capture_layers(7) == (2, 3, 4)
    for shallow in (1, 2, 5, 6):
        with pytest.raises(ValueError, match=f"a target of {shallow} layers"):
            default_capture_layers(shallow)
