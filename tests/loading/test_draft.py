"""EAGLE-3 heads: every naming gives the same parameters; geometry, variants and vocabulary are read and checked."""

import re

import numpy as np
import pytest
import torch
from checkpoint_files import (
    DRAFT_VOCAB,
    assert_same_parameters,
    head_config,
    head_tensors,
    parameters,
    random_target,
    save_head,
)

from eagle_jax.loading import CheckpointError, load_draft

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target():
    return random_target()


@pytest.fixture(scope="module")
def plain(target, tmp_path_factory):
    return load_draft(save_head(tmp_path_factory.mktemp("head")), target)


def load(tmp_path, target, tensors=None, config=None, **options):
    return load_draft(save_head(tmp_path / "head", tensors, config), target, **options)


def test_a_community_head(plain, target):
    tensors, config, found = head_tensors(), plain.config, parameters(plain.head)
    assert config.capture_layers == (2, 3, 4)
    assert any("default for a target of 7 layers" in note for note in plain.notes)
    assert (config.draft_vocab_size, config.vocab_size) == (DRAFT_VOCAB, 97)
    assert not any((config.own_embedding, config.norm_before_residual, config.norm_output, config.qkv_bias))
    qkv = torch.cat([tensors[f"midlayer.self_attn.{p}_proj.weight"] for p in "qkv"])
    np.testing.assert_array_equal(found["layers.0.attention.qkv.weight"], qkv.numpy())
    np.testing.assert_array_equal(found["layers.0.hidden_norm.weight"], tensors["midlayer.hidden_norm.weight"].numpy())
    np.testing.assert_array_equal(
        found["layers.0.input_norm.weight"], tensors["midlayer.input_layernorm.weight"].numpy()
    )
    np.testing.assert_array_equal(found["vocabulary"], tensors["t2d"].nonzero()[:, 0].numpy())
    assert found["vocabulary"].dtype == np.int32
    assert plain.head.dtype == target.model.dtype


def with_prefix(prefix):
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def numbered(tensors):
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def prefixed_but_for_head_and_map(tensors):
    apart = ("lm_head.weight", "d2t", "t2d")
    return {name if name in apart else "model." + name: tensor for name, tensor in numbered(tensors).items()}


def fused(tensors):
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    qkv = torch.cat([tensors.pop(f"{attention}{p}_proj.weight") for p in "qkv"])
    gate_up = torch.cat([tensors.pop(f"{mlp}{p}_proj.weight") for p in ("gate", "up")])
    return tensors | {f"{attention}qkv_proj.weight": qkv, f"{mlp}gate_up_proj.weight": gate_up}


def long_map_name(tensors):
    tensors["draft_id_to_target_id"] = tensors.pop("d2t").to(torch.int32)
    return tensors


@pytest.mark.parametrize(
    "rename",
    [
        with_prefix("model."),
        with_prefix("module."),
        with_prefix("module.model."),
        numbered,
        prefixed_but_for_head_and_map,
        fused,
        lambda tensors: numbered(fused(tensors)),
        long_map_name,
    ],
    ids=[
        "model.",
        "module.",
        "module.model.",
        "layers.0.",
        "mixed prefixes",
        "fused",
        "fused layers.0.",
        "draft_id_to_target_id",
    ],
)
def test_every_naming_gives_the_same_parameters(tmp_path, target, plain, rename):
    assert_same_parameters(load(tmp_path, target, rename(head_tensors())).head, plain.head)


def test_the_target_must_be_loaded(tmp_path):
    with pytest.raises(TypeError, match="target must be what load_target returns, not 'path'"):
        load_draft(save_head(tmp_path), "path")


def test_two_names_of_one_tensor_are_refused(tmp_path, target):
    tensors = head_tensors()
    tensors["layers.0.hidden_norm.weight"] = tensors["midlayer.hidden_norm.weight"].clone()
    with pytest.raises(CheckpointError, match=r"twice, as (midlayer|layers.0).hidden_norm.weight and as"):
        load(tmp_path, target, tensors)
    tensors = head_tensors()
    tensors["midlayer.mlp.gate_up_proj.weight"] = torch.zeros(128, 32)
    with pytest.raises(CheckpointError, match=r"a projection twice, as midlayer.mlp.gate_up_proj.weight"):
        load(tmp_path, target, tensors)


def test_dtypes(tmp_path, target):
    folder = save_head(tmp_path / "head")
    assert load_draft(folder, target, dtype="bfloat16").head.dtype.name == "bfloat16"
    with pytest.raises(ValueError, match="dtype must be"):
        load_draft(folder, target, dtype="int4")


@pytest.mark.parametrize(
    "drop", ["num_key_value_heads", "hidden_size", "intermediate_size", "draft_vocab_size", "model_type"]
)
def test_geometry_comes_from_the_tensors(tmp_path, target, plain, drop):
    config = {k: v for k, v in head_config().items() if k != drop}
    assert load(tmp_path, target, config=config).config == plain.config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_key_value_heads": 4},
            r"num_key_value_heads is 4 in config.json, but 2 .* \(16, 64\) of midlayer.self_attn.k_proj",
        ),
        ({"hidden_size": 64}, r"hidden_size is 64 in config.json, but 32 by the shape \(32, 96\) of fc.weight"),
        ({"intermediate_size": 128}, "intermediate_size is 128 in config.json, but 64"),
        ({"head_dim": 16}, "head_dim is 16 in config.json, but 8"),
        ({"num_attention_heads": 5}, "o_proj.weight takes 32 channels, no multiple of num_attention_heads 5"),
        ({"num_attention_heads": None}, "lacks num_attention_heads"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias True, but the head lacks the tensor midlayer.self_attn.q_proj.bias"),
        ({"use_aux_hidden_state": False}, "last hidden state alone, of width 32, but fc.weight takes 96"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "last hidden state alone"),
        ({"sliding_window": 512}, "sliding_window 512 .* does not say in which layers"),
        ({"layer_types": ["sliding_attention"]}, "needs a sliding_window of at least 1"),
        ({"skip_prenorm": True}, "does not know: skip_prenorm"),
        ({"eagle_config": {"layers": [1]}}, "does not know: eagle_config.layers"),
        ({"speculators_model_type": "eagle3"}, "does not know: .*hidden_size"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported for a draft head"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope' is not supported"),
    ],
)
def test_contradictions_and_unsupported_settings_raise(tmp_path, target, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, target, config=head_config(**changes))


def test_a_wrong_layer_count_in_the_config_is_not_read(tmp_path, target, plain):
    assert load(tmp_path, target, config=head_config(num_hidden_layers=40)).config == plain.config


def test_a_wrong_draft_vocabulary_in_the_config_is_noted(tmp_path, target):
    draft = load(tmp_path, target, config=head_config(draft_vocab_size=97))
    assert draft.config.draft_vocab_size == DRAFT_VOCAB
    assert any("draft_vocab_size 97 of config.json is wrong" in note for note in draft.notes)


def test_head_width_is_free(tmp_path, target):
    config = load(tmp_path, target, head_tensors(head_dim=24), head_config(head_dim=24)).config
    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (24, 4, 2)


def test_two_layers(tmp_path, target):
    draft = load(tmp_path, target, head_tensors(layers=2))
    assert draft.config.num_hidden_layers == 2
    assert parameters(draft.head)["layers.1.attention.qkv.weight"].shape == (64, 32)
    tensors = {n.replace("layers.1.", "layers.2."): t for n, t in head_tensors(layers=2).items()}
    with pytest.raises(CheckpointError, match=r"layers \[0, 2\], which are not numbered"):
        load(tmp_path, target, tensors)


def test_qkv_bias(tmp_path, target):
    tensors = head_tensors()
    for part, rows in (("q", 32), ("k", 16), ("v", 16)):
        tensors[f"midlayer.self_attn.{part}_proj.bias"] = torch.randn(rows)
    draft = load(tmp_path, target, tensors, head_config(qkv_bias=True))
    expected = torch.cat([tensors[f"midlayer.self_attn.{p}_proj.bias"] for p in "qkv"]).numpy()
    np.testing.assert_array_equal(parameters(draft.head)["layers.0.attention.qkv.bias"], expected)
    with pytest.raises(CheckpointError, match="attention_bias False, but the head has the tensor"):
        load(tmp_path, target, tensors, head_config(attention_bias=False))
    del tensors["midlayer.self_attn.k_proj.bias"]
    with pytest.raises(CheckpointError, match=r"missing: midlayer.self_attn.k_proj.bias of shape \(16,\)"):
        load(tmp_path, target, tensors)


# Rotary base


@pytest.mark.parametrize(
    ("config", "override", "theta"),
    [
        ({}, None, 10000.0),
        ({"rope_theta": 5e5}, None, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, None, 2e4),
        ({"rope_theta": 1e6}, 1e4, 1e4),
    ],
)
def test_the_rotary_base_is_the_heads_own(tmp_path, config, override, theta):
    target = random_target(rope_theta=123456.0)
    assert load(tmp_path, target, config=head_config(**config), rope_theta=override).config.rope.theta == theta


def test_a_senseless_rotary_base_is_refused(tmp_path, target):
    with pytest.raises(ValueError, match="rope_theta must be greater than 1, not 0"):
        load(tmp_path, target, rope_theta=0)


# Capture layers


@pytest.mark.parametrize(
    "config",
    [
        {IDS: [1, 3, 4]},
        {"eagle_config": {IDS: [1, 3, 4], "use_aux_hidden_state": True}},
        {IDS: [1, 3, 4], "eagle_config": {IDS: [1, 3, 4]}},
    ],
)
def test_capture_layers_are_read(tmp_path, target, config):
    draft = load(tmp_path, target, config=head_config(**config))
    assert draft.config.capture_layers == (1, 3, 4)
    assert draft.notes == (
        f"{IDS} [1, 3, 4] are taken as inputs of these layers, vLLM's convention. To be certain, say which with "
        "layer_id_convention='input' or 'output'",
    )


def test_other_numbers_of_capture_layers(tmp_path, target):
    draft = load(tmp_path, target, head_tensors(states=5), head_config(**{IDS: [0, 1, 2, 3, 7]}))
    assert draft.config.capture_layers == (0, 1, 2, 3, 7)


@pytest.mark.parametrize(
    ("config", "states", "message"),
    [
        ({IDS: [1, 2]}, 3, "fc.weight takes 96 features, but 2 hidden states of this target are 2 x 32 = 64"),
        ({IDS: [1, 3, 8]}, 3, r"\[1, 3, 8\] must lie in 0..7"),
        ({IDS: [-1, 2, 3]}, 3, r"must lie in 0..7"),
        ({IDS: [3, 2, 1]}, 3, "ascending"),
        ({IDS: "1,2,3"}, 3, "must be a list of layer numbers"),
        ({IDS: [1, 2, 3], "eagle_config": {IDS: [1, 2, 4]}}, 3, "contradicts itself"),
        ({IDS: [1, 2, 3], "num_aux_hidden_states": 4}, 3, "announces 4 auxiliary hidden states"),
        ({"num_aux_hidden_states": 5}, 5, "reads 5 hidden states of the target; its config.json must name them"),
        ({}, 2, r"fc.weight takes 64 features, but 3 hidden states of this target are 3 x 32 = 96"),
    ],
)
def test_capture_layers_that_do_not_fit_raise(tmp_path, target, config, states, message):
    tensors = head_tensors(states=states)
    tensors["fc.weight"] = torch.zeros(32, states * 32)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, target, tensors, head_config(**config))


def test_a_shallow_target_needs_named_layers(tmp_path):
    with pytest.raises(CheckpointError, match=rf"not distinct for a target of 6 layers.*{IDS}"):
        load(tmp_path, random_target(num_hidden_layers=6))


# Variants


def test_flags_are_read_from_both_places(tmp_path, target):
    for place in (lambda flags: flags, lambda flags: {"eagle_config": flags}):
        config = load(
            tmp_path, target, config=head_config(**place({"norm_before_residual": True, "norm_output": True}))
        ).config
        assert config.norm_before_residual
        assert config.norm_output


@pytest.mark.parametrize("flag", [{}, {"norm_before_fc": True}, {"eagle_config": {"norm_before_fc": True}}])
def test_a_norm_before_fc(tmp_path, target, flag):
    norm = 1 + torch.randn(96)
    draft = load(tmp_path, target, head_tensors() | {"input_norm.weight": norm}, head_config(**flag))
    assert draft.config.norm_before_fc
    np.testing.assert_array_equal(parameters(draft.head)["feature_norm.weight"], norm.numpy())


@pytest.mark.parametrize("flag", [{}, {"fc_norm": True}])
def test_norms_of_each_hidden_state(tmp_path, target, flag):
    norms = {f"fc_norm.{i}.weight": 1 + torch.randn(32) for i in range(3)}
    draft = load(tmp_path, target, head_tensors() | norms, head_config(**flag))
    for i in range(3):
        np.testing.assert_array_equal(
            parameters(draft.head)[f"fc_norms.{i}.weight"], norms[f"fc_norm.{i}.weight"].numpy()
        )


@pytest.mark.parametrize(
    ("flags", "tensors", "message"),
    [
        ({"norm_before_fc": True}, {}, "norm_before_fc True, but the head lacks the tensor input_norm.weight"),
        (
            {"norm_before_fc": False},
            {"input_norm.weight": 96},
            "norm_before_fc False, but the head has the tensor input_norm.weight",
        ),
        ({"fc_norm": True}, {}, "fc_norm True, but the head lacks the tensor fc_norm.0.weight"),
        ({"fc_norm": False}, {"fc_norm.0.weight": 32}, "fc_norm False, but the head has the tensor fc_norm.0.weight"),
        ({}, {"fc_norm.0.weight": 32}, r"missing: fc_norm.1.weight of shape \(32,\)"),
        ({}, {"input_norm.weight": 32}, r"input_norm.weight has shape \(32,\); the configuration makes it \(96,\)"),
        (
            {"norm_output": True, "eagle_config": {"norm_output": False}},
            {},
            "norm_output is True, eagle_config.norm_output is False",
        ),
    ],
)
def test_flags_and_tensors_that_contradict_each_other_raise(tmp_path, target, flags, tensors, message):
    extra = {name: torch.ones(size) for name, size in tensors.items()}
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, target, head_tensors() | extra, head_config(**flags))


# Embedding


def test_an_own_embedding_is_kept_and_an_equal_one_shared(tmp_path, target, plain):
    own = torch.randn(97, 32)
    draft = load(tmp_path, target, head_tensors() | {"embed_tokens.weight": own})
    assert draft.config.own_embedding
    np.testing.assert_array_equal(parameters(draft.head)["embed.weight"], own.numpy())
    assert any("embed_tokens.weight: the head's own" in note for note in draft.notes)
    same = torch.tensor(parameters(target.model)["embed.weight"])
    draft = load(tmp_path, target, head_tensors() | {"embed_tokens.weight": same})
    assert draft.config == plain.config
    assert draft.head.embed is None
    assert any("the target's, which the head's equals" in note for note in draft.notes)
    same[96, 31] += 1e-3
    assert load(tmp_path, target, head_tensors() | {"embed_tokens.weight": same}).config.own_embedding


def test_a_narrower_head_needs_its_own_embedding(tmp_path):
    target = random_target(hidden_size=48)
    tensors, config = head_tensors(target_hidden=48), head_config(target_hidden_size=48)
    with pytest.raises(CheckpointError, match="hidden_size 32 differs from the target's 48"):
        load(tmp_path, target, tensors, config)
    draft = load(tmp_path, target, tensors | {"embed_tokens.weight": torch.randn(97, 32)}, config)
    assert (draft.config.hidden_size, draft.config.target_hidden_size) == (32, 48)
    assert parameters(draft.head)["fc.weight"].shape == (32, 144)


# Wrong checkpoints


@pytest.mark.parametrize(
    ("overrides", "config", "message"),
    [
        (
            {"hidden_size": 48},
            {},
            r"fc.weight takes 96 features, .* 3 x 48 = 144 \(a target of hidden size 32 would fit\)",
        ),
        (
            {"hidden_size": 48},
            {"target_hidden_size": 32},
            "target of hidden size 32 .* this target's hidden_size is 48",
        ),
        ({"vocab_size": 101}, {}, "target of vocabulary 97 .* this target's vocab_size is 101"),
        (
            {"vocab_size": 101},
            {"vocab_size": None},
            r"t2d has shape \(97,\); for this target's vocab_size it must be \(101,\)",
        ),
        ({"vocab_size": 30}, {"vocab_size": None}, "draft_vocab_size 40 exceeds vocab_size 30"),
    ],
)
def test_a_head_of_another_target_raises_with_both_numbers(tmp_path, overrides, config, message):
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, random_target(**overrides), config=head_config(**config))


def test_something_else_is_no_head(tmp_path, target):
    with pytest.raises(CheckpointError, match="no EAGLE head"):
        load(tmp_path, target, {"x": torch.zeros(2)})


GATE = "midlayer.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("edit", "messages"),
    [
        (lambda t: t.pop(GATE), [rf"missing: {GATE} of shape \(64, 32\)"]),
        (lambda t: t.pop("midlayer.hidden_norm.weight"), [r"missing: midlayer.hidden_norm.weight of shape \(32,\)"]),
        (lambda t: t.pop("norm.weight"), [r"missing: norm.weight of shape \(32,\)"]),
        (lambda t: t.pop("lm_head.weight"), [r"lacks (model\.)?lm_head.weight"]),
        (lambda t: t.update({"fc.bias": torch.zeros(32)}), [r"unexpected: fc.bias of shape \(32,\)"]),
        (
            lambda t: t.update({"midlayer.mlp.gate.weight": t.pop(GATE)}),
            [rf"missing: {GATE} of shape \(64, 32\)", r"unexpected: midlayer.mlp.gate.weight of shape \(64, 32\)"],
        ),
        (lambda t: t.update({GATE: t[GATE].T}), [rf"{GATE} has shape \(32, 64\), its transpose; .* \(64, 32\)"]),
        (lambda t: t.update({GATE: t[GATE].int()}), [rf"{GATE} is stored as int32"]),
        (lambda t: t.update({"fc.weight": torch.zeros(32)}), [r"fc.weight has shape \(32,\)|no EAGLE head"]),
    ],
)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_tensors_that_do_not_fit_are_named_as_in_the_file(tmp_path, target, edit, messages, prefix):
    tensors = head_tensors()
    edit(tensors)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, target, with_prefix(prefix)(tensors))
    for message in messages:
        caught.match(re.sub(r"(missing: |unexpected: |^)(midlayer|norm|fc)", rf"\1{prefix}\2", message))


# Vocabulary map


def test_the_map_may_be_out_of_order_and_negative(tmp_path, target):
    tensors = head_tensors()
    ids = torch.randperm(97, generator=torch.Generator().manual_seed(3))[:DRAFT_VOCAB]
    tensors["d2t"] = (ids - torch.arange(DRAFT_VOCAB)).to(torch.int32)
    tensors["t2d"] = torch.zeros(97, dtype=torch.bool).index_fill(0, ids, True)
    np.testing.assert_array_equal(parameters(load(tmp_path, target, tensors).head)["vocabulary"], ids.numpy())


def test_the_map_works_without_the_mask(tmp_path, target, plain):
    tensors = head_tensors()
    del tensors["t2d"]
    assert_same_parameters(load(tmp_path, target, tensors).head, plain.head)


@pytest.mark.parametrize("zeros", [True, False])
def test_a_full_vocabulary_needs_no_map(tmp_path, target, zeros):
    tensors = head_tensors(draft_vocab=97)
    assert "d2t" not in tensors
    if zeros:
        tensors |= {"d2t": torch.zeros(97, dtype=torch.int64), "t2d": torch.ones(97, dtype=torch.bool)}
    draft = load(tmp_path, target, tensors, head_config(draft_vocab_size=97))
    assert draft.head.vocabulary is None


def offsets(change):
    def edit(tensors):
        change(tensors["d2t"])

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("d2t"), "drafts 40 of the target's 97 tokens, but has no d2t"),
        (lambda t: t.update(d2t=t["d2t"][:-1]), r"d2t has shape \(39,\); the output head's 40 rows make it \(40,\)"),
        (lambda t: t.update(d2t=t["d2t"].float()), "d2t is stored as float32; it must hold integers"),
        (offsets(lambda d: d.__setitem__(39, 58)), r"d2t\[39\] = 58 maps draft id 39 to target id 97, outside 0..96"),
        (offsets(lambda d: d.__setitem__(3, -4)), r"d2t\[3\] = -4 maps draft id 3 to target id -1, outside 0..96"),
        (offsets(lambda d: d.__setitem__(1, d[0] - 1)), "maps several draft ids to one target id"),
        (lambda t: t.update(d2t=t["d2t"] + torch.arange(40)), "target id = i"),
        (lambda t: t["t2d"].logical_not_(), "t2d marks 57 target ids, d2t maps to 40; they must be the same ids"),
        (lambda t: t.update(t2d=t["t2d"][:-1]), r"t2d has shape \(96,\)"),
    ],
)
def test_maps_that_are_wrong_raise(tmp_path, target, edit, message):
    tensors = head_tensors()
    edit(tensors)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, target, tensors)


def test_a_map_over_the_whole_vocabulary_must_be_zero(tmp_path, target):
    tensors = head_tensors(draft_vocab=97) | {"d2t": torch.arange(96, -1, -1) - torch.arange(97)}
    with pytest.raises(CheckpointError, match="d2t must be all zeros"):
        load(tmp_path, target, tensors, head_config(draft_vocab_size=97))
