"""One head under every name and in every container, and what each key of a config.json does."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from checkpoint_files import assert_same_parameters, edit_config
from published_heads import IDS, ROWS, fused, numbered, prefixed, speculators_v1, target_of, write, written
from safetensors.torch import save_file
from support.torch_heads import TorchHead
from test_published_heads import compare

from eagle_jax import load_draft
from eagle_jax.loading import CheckpointError, inspect_checkpoint
from eagle_jax.loading.draft_capture import named_layers

BY_NAME = {row.repository: row for row in ROWS}
OFFICIAL = BY_NAME["yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"]
QWEN2 = BY_NAME["yuhuili/EAGLE-Qwen2-7B-Instruct"]
RED_HAT = BY_NAME["RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3"]
NVIDIA = BY_NAME["nvidia/gpt-oss-120b-Eagle3"]


# Names and containers


def prefix(text):
    return lambda tensors: {text + name: tensor for name, tensor in tensors.items()}


def store(folder, tensors, container):
    """Writes weights and removes those that were there."""
    for file in [*folder.glob("*.bin"), *folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    tensors = {n: t.contiguous() for n, t in tensors.items()}
    if container == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif container == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    else:
        names = sorted(tensors)
        files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, held in files.items():
            save_file({n: tensors[n] for n in held}, folder / file)
        index = {"metadata": {}, "weight_map": {n: file for file, held in files.items() for n in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


NAMINGS = {
    "as published": dict,
    "layers.0.": numbered,
    "model.": prefix("model."),
    "module.": prefix("module."),
    "module.model.layers.0.": lambda tensors: prefix("module.model.")(numbered(tensors)),
    "engine": prefixed,
    "fused": fused,
    "fused, layers.0.": lambda tensors: numbered(fused(tensors)),
}


@pytest.mark.parametrize(
    "row", [OFFICIAL, BY_NAME["speculators, EAGLE-3.1 of Qwen3 layers"], QWEN2], ids=lambda r: r.repository
)
def test_every_naming_in_every_container_gives_the_same_parameters(tmp_path, row):
    target, head = written(row, tmp_path / "head")
    expected = load_draft(head.folder, target).head
    namings = dict(NAMINGS)
    if row is QWEN2:
        namings["first form of speculators"] = speculators_v1
    for i, (name, rename) in enumerate(namings.items()):
        container = ("safetensors", "bin", "shards")[i % 3]
        store(head.folder, rename(dict(head.tensors)), container)
        found = load_draft(head.folder, target).head
        assert_same_parameters(found, expected), (name, container)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_stored_dtype_does_not_matter_where_it_holds_the_values(tmp_path, dtype):
    target, head = written(OFFICIAL, tmp_path / "head")
    coarse = {n: t.bfloat16().half() if t.is_floating_point() else t for n, t in head.tensors.items()}
    store(head.folder, coarse, "safetensors")
    expected = load_draft(head.folder, target).head
    kind = getattr(torch, dtype)
    store(head.folder, {n: t.to(kind) if t.is_floating_point() else t for n, t in coarse.items()}, "bin")
    assert_same_parameters(load_draft(head.folder, target).head, expected)


# Which kind a head is


def test_the_tensors_say_what_a_head_is_and_others_must_not_contradict_them(tmp_path):
    target, head = written(OFFICIAL, tmp_path / "head")
    with pytest.raises(
        CheckpointError, match=r"method 'eagle' contradicts the tensors, .* 'eagle3' head: midlayer.hidden_norm"
    ):
        load_draft(head.folder, target, method="eagle")
    edit_config(head.folder, architectures=["EagleLlamaForCausalLM"])
    with pytest.raises(
        CheckpointError, match=r"architectures \['EagleLlama.* contradicts the tensors, .* an 'eagle3' head"
    ):
        load_draft(head.folder, target)
    with pytest.raises(ValueError, match="method must be one of 'eagle', 'eagle3', or None, not 'medusa'"):
        load_draft(head.folder, target, method="medusa")
    target, head = written(QWEN2, tmp_path / "other")
    with pytest.raises(
        CheckpointError, match=r"method 'eagle3' contradicts the tensors, .* an 'eagle' head: fc.weight"
    ):
        load_draft(head.folder, target, method="eagle3")
    edit_config(head.folder, architectures=["LlamaForCausalLMEagle3"])
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLMEagle3.* contradicts the tensors"):
        load_draft(head.folder, target)


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        (OFFICIAL, {"architectures": ["PeagleLlamaForCausalLM"]}, "P-EAGLE heads, which draft in parallel"),
        (OFFICIAL, {"bias": True}, "asks for bias, which EAGLE-1/2 heads have"),
        (QWEN2, {"norm_output": True}, "asks for norm_output, which EAGLE-3 heads have"),
        (QWEN2, {IDS: [1, 2, 3]}, f"asks for {IDS}, which EAGLE-3 heads have"),
        (QWEN2, {"qkv_bias": False}, "qkv_bias False, but the head has the tensor"),
        (QWEN2, {"add_para_norm": True}, "add_para_norm True, but the head lacks the tensor embed_layernorm.weight"),
        (QWEN2, {"num_key_value_heads": 1}, "num_key_value_heads is 1 in config.json, but 7"),
    ],
)
def test_what_belongs_to_another_kind_raises(tmp_path, row, changes, message):
    target, head = written(row, tmp_path / "head")
    edit_config(head.folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_draft(head.folder, target)


# Keys of the speculators format


def edit(folder, changes):
    """Changes keys by their dotted path; ... removes one."""
    config = json.loads((folder / "config.json").read_text())
    for path, value in changes.items():
        *parents, last = path.split("/")
        place = config
        for part in parents:
            place = place[int(part) if part.isdigit() else part]
        if value is ...:
            place.pop(last, None)
        else:
            place[last] = value
    (folder / "config.json").write_text(json.dumps(config))


LAYER, PROPOSAL = "transformer_layer_config", "speculators_config/proposal_methods/0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "peagle"}, "'peagle' is not supported; supported are 'eagle3', 'eagle'"),
        ({"speculators_model_type": "dflash"}, "'dflash' is not supported"),
        ({"speculators_model_type": ...}, "lacks speculators_model_type"),
        (
            {"speculators_model_type": "eagle", "speculators_config/algorithm": "eagle"},
            "'eagle' contradicts the tensors",
        ),
        ({"speculators_config/algorithm": "eagle"}, "speculators_model_type is 'eagle3', .*algorithm is 'eagle'"),
        ({"speculators_config/default_proposal_method": "sample"}, "is 'sample', but proposal_methods has 'greedy'"),
        ({f"{PROPOSAL}/verifier_accept_k": 2}, "verifier_accept_k 2, which would change the target's text"),
        ({f"{PROPOSAL}/accept_tolerance": 0.1}, "accept_tolerance 0.1, which would change"),
        ({f"{PROPOSAL}/speculative_tokens": 0}, "speculative_tokens must be an integer of at least 1, not 0"),
        ({LAYER: ...}, "transformer_layer_config must be an object"),
        ({f"{LAYER}/model_type": "gemma3"}, "model_type 'gemma3'; heads of 'llama' and 'qwen3' layers are supported"),
        ({f"{LAYER}/model_type": "qwen3"}, "model_type 'qwen3', but the head lacks layers.0.self_attn.q_norm.weight"),
        ({f"{LAYER}/num_hidden_layers": 2}, "num_hidden_layers is 2, but the head has tensors of 1 layers"),
        ({f"{LAYER}/hidden_size": 32}, "hidden_size is 32 in config.json, but 64"),
        ({f"{LAYER}/vocab_size": 161}, "target of vocabulary 161"),
        ({f"{LAYER}/attention_bias": True}, "attention_bias True, but the head lacks"),
        ({f"{LAYER}/mlp_bias": True}, "mlp_bias True, but the head lacks"),
        ({f"{LAYER}/hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({f"{LAYER}/sliding_window": 8}, "sliding_window 8 .* does not say in which layers"),
        ({f"{LAYER}/layer_types": ["chunked_attention"]}, "layer_types of the head has chunked_attention"),
        ({f"{LAYER}/draft_vocab_size": 50}, "draft_vocab_size is 40, transformer_layer_config.draft_vocab_size is 50"),
        ({"draft_vocab_size": 41}, "draft_vocab_size 41 of config.json is wrong: lm_head.weight has 40 rows"),
        ({"target_hidden_size": 80}, "target of hidden size 80"),
        ({"norm_before_fc": True}, "norm_before_fc True, but the head lacks the tensor input_norm.weight"),
        ({"fc_norm": True}, "fc_norm True, but the head lacks the tensor fc_norm.0.weight"),
        ({"fusion_bias": True}, "asks for fusion_bias, which EAGLE-1/2 heads have"),
        ({"layernorms": True}, "asks for layernorms"),
        ({"transformer_layer_architecture": "Mamba"}, "transformer_layer_architecture 'Mamba'"),
        ({IDS: [2, 16]}, "2 hidden states of this target"),
        ({IDS: [2, 16, 40]}, r"must lie in 0..32"),
        ({"mask_token_id": 5}, "does not know: mask_token_id"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
    ids=str,
)
def test_a_speculators_key_that_cannot_be_honoured_raises(tmp_path, changes, message):
    target, head = written(RED_HAT, tmp_path / "head")
    edit(head.folder, changes)
    with pytest.raises(CheckpointError, match=message):
        load_draft(head.folder, target)


@pytest.mark.parametrize(
    ("changes", "reading"),
    [
        ({"norm_before_residual": False}, {"norm_before_residual": False}),
        ({"norm_before_residual": ..., "norm_output": True}, {"norm_output": True}),
        ({f"{LAYER}/rope_theta": ..., f"{LAYER}/rms_norm_eps": 0.01}, {"theta": 10000.0, "eps": 0.01}),
        (
            {f"{LAYER}/layer_types": ["sliding_attention"], f"{LAYER}/sliding_window": 3},
            {"windows": (3,)},
        ),
    ],
    ids=str,
)
def test_a_speculators_key_changes_the_logits_as_its_definition(tmp_path, changes, reading):
    target, head = written(RED_HAT, tmp_path / "head")
    edit(head.folder, changes)
    changed = dataclasses.replace(head, reading=dataclasses.replace(head.reading, **reading))
    compare(target, load_draft(head.folder, target), changed)
    # The definition itself must tell the two apart, or the comparison says nothing.
    ends = [np.asarray(module.weight[...], np.float64) for module in (target.model.embed, target.model.lm_head)]
    features = np.random.default_rng(1).standard_normal((7, 3 * head.target_hidden))
    first, second = (
        TorchHead(h.tensors, h.reading, *ends).chain(list(range(8)), features, 2)[0] for h in (head, changed)
    )
    assert max(np.abs(a - b).max() for a, b in zip(first, second, strict=True)) > 1e-2


def test_silence_about_norm_before_residual_is_a_guess_that_can_be_overruled(tmp_path, caplog):
    target, head = written(RED_HAT, tmp_path / "head")
    edit(head.folder, {"norm_before_residual": ...})
    draft = load_draft(head.folder, target)
    assert draft.config.norm_before_residual
    assert [r.levelname for r in caplog.records if "norm_before_residual" in r.message] == ["WARNING"]
    draft = load_draft(head.folder, target, config_overrides={"norm_before_residual": False})
    assert not draft.config.norm_before_residual
    assert not any("norm_before_residual" in note for note in draft.notes)
    assert draft.num_speculative_tokens == 3


# Capture layers


@pytest.mark.parametrize(
    ("ids", "convention", "layers", "guessed"),
    [
        ([1, 17, 33], None, (2, 18, 34), True),
        ([1, 17, 33], "output", (2, 18, 34), False),
        ([1, 17, 33], "input", (1, 17, 33), False),
        ([2, 18, 33], None, (2, 18, 33), False),
        ([2, 18, 33], "output", (3, 19, 34), False),
        ([4, 20, 36], None, (4, 20, 36), True),
        ([0, 20, 34], "output", (1, 21, 35), False),
    ],
)
def test_layer_numbers_in_both_conventions(tmp_path, caplog, ids, convention, layers, guessed):
    head = write(NVIDIA, tmp_path / "head")
    edit(head.folder, {f"eagle_config/{IDS}": ids})
    draft = load_draft(head.folder, target_of(NVIDIA, 45, 251), layer_id_convention=convention)
    assert draft.config.capture_layers == layers
    assert any(IDS in note for note in draft.notes) == guessed
    assert [r.levelname for r in caplog.records if IDS in r.message] == ["WARNING"] * guessed


def test_other_keys_of_layer_numbers(tmp_path):
    head = write(NVIDIA, tmp_path / "head")
    target = target_of(NVIDIA, 45, 251)
    edit(head.folder, {f"eagle_config/{IDS}": ..., "target_layer_ids": [1, 17, 33]})
    assert load_draft(head.folder, target).config.capture_layers == (2, 18, 34)
    edit(head.folder, {"target_layer_ids": ..., "eagle_config/layer_ids": [1, 17, 33]})
    assert load_draft(head.folder, target).config.capture_layers == (1, 17, 33)
    edit(head.folder, {"target_layer_ids": [1, 17, 33]})
    with pytest.raises(CheckpointError, match="contradicts itself about capture layers"):
        load_draft(head.folder, target)
    edit(head.folder, {"target_layer_ids": [0, 16, 32]})
    assert load_draft(head.folder, target).config.capture_layers == (1, 17, 33)


@pytest.mark.parametrize(
    ("changes", "convention", "message"),
    [
        ({f"eagle_config/{IDS}": [1, 17, 35]}, "output", r"must lie in 0..34, as outputs of the 36 layers"),
        ({f"eagle_config/{IDS}": [1, 17, 37]}, "input", r"must lie in 0..36, as inputs of the 36 layers"),
        ({"num_eagle_features": 1}, "input", "announces 1 auxiliary hidden states"),
        ({"eagle_config/use_aux_hidden_state": False}, None, "one state alone, and names others"),
        ({"eagle_config/use_last_layernorm": False}, "input", "use_last_layernorm False, but the head has"),
        ({"eagle_config/use_mtp_layernorm": True}, "input", "use_mtp_layernorm of the head is not supported"),
        ({"eagle_config/next_layer_regular": False}, "input", "next_layer_regular false"),
        ({"eagle_config/parallel_draft_step": 4}, "input", "draft in parallel"),
    ],
    ids=str,
)
def test_modelopt_keys_that_cannot_be_honoured_raise(tmp_path, changes, convention, message):
    head = write(NVIDIA, tmp_path / "head")
    edit(head.folder, changes)
    with pytest.raises(CheckpointError, match=message):
        load_draft(head.folder, target_of(NVIDIA, 45, 251), layer_id_convention=convention)


def test_a_convention_must_be_one_that_applies(tmp_path):
    target, head = written(QWEN2, tmp_path / "head")
    with pytest.raises(ValueError, match="layer_id_convention must be one of 'input', 'output', or None, not 'vllm'"):
        load_draft(head.folder, target, layer_id_convention="vllm")
    with pytest.raises(CheckpointError, match="means nothing to an EAGLE-1/2 head"):
        load_draft(head.folder, target, layer_id_convention="input")


# Sharing


def test_an_output_head_is_shared_when_absent_or_equal(tmp_path):
    row = BY_NAME["yuhuili/EAGLE3-Vicuna1.3-13B"]
    target, head = written(row, tmp_path / "head")
    own = np.array(target.model.lm_head.weight[...])
    equal = dict(head.tensors) | {"lm_head.weight": torch.from_numpy(own)}
    store(head.folder, equal, "safetensors")
    shared = load_draft(head.folder, target)
    assert shared.head.lm_head is None
    assert "lm_head.weight: the target's, which the head's equals" in shared.notes
    store(head.folder, {n: t for n, t in equal.items() if n != "lm_head.weight"}, "safetensors")
    absent = load_draft(head.folder, target)
    assert_same_parameters(absent.head, shared.head)
    assert "lm_head.weight: the target's, the head has none" in absent.notes
    # With the target's head, the head still norms its output.
    compare(
        target, absent, dataclasses.replace(head, tensors={n: t for n, t in equal.items() if n != "lm_head.weight"})
    )


# Reports


def test_a_report_tells_format_target_layers_norms_and_sharing(tmp_path):
    row = BY_NAME["speculators, EAGLE-3.1 of Qwen3 layers"]
    report = inspect_checkpoint(write(row, tmp_path / "head").folder)
    assert (report.kind, report.format, report.target, report.num_speculative_tokens) == (
        "eagle3",
        "speculators",
        "owner/target",
        3,
    )
    assert report.capture_layers == (2, 18, 33)
    assert report.capture_layers_from == f"{IDS} [2, 18, 33], inputs"
    assert [norm.partition(" ")[0] for norm in report.norms] == [
        "norm_before_fc",
        "norm_before_residual",
        "norm_output",
    ]
    assert report.sharing["lm_head.weight"] == "the head's own"
    text = report.to_text()
    for expected in (
        "speculators",
        "made for      owner/target",
        "norm_output (the normed output is fed back)",
        "inputs",
    ):
        assert expected in text
    report = inspect_checkpoint(write(QWEN2, tmp_path / "other", np.zeros((190, 56), np.float32)).folder)
    assert (report.format, report.target, report.norms) == ("eagle", None, ())
    assert "the last hidden state" in report.capture_layers_from


# Heads of layers that are not Llama's


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        # DeepSeek: latent attention
        (lambda t: rename_parts(t, {"k_proj": "kv_a_proj", "v_proj": "kv_b_proj"}), "lacks midlayer.self_attn.k_proj.weight"),
        # MiniCPM: two norms before fc
        (lambda t: t | {"input_norm1.weight": torch.ones(64), "input_norm2.weight": torch.ones(64)}, "input_norm1.weight"),
        # Llama 4: experts
        (lambda t: rename_parts(t, {"mlp.gate_proj": "feed_forward.router"}), "missing: midlayer.mlp.gate_proj.weight"),
        # Quantised: scales beside the weights
        (lambda t: t | {"midlayer.mlp.up_proj.weight_scale": torch.ones(1)}, r"unexpected: midlayer.mlp.up_proj.weight_scale"),
        (lambda t: t | {"midlayer.self_attn.k_scale": torch.ones(1)}, r"unexpected: midlayer.self_attn.k_scale"),
    ],
)  # fmt: skip
def test_heads_of_other_layers_are_refused_by_their_tensors(tmp_path, tensors, message):
    target, head = written(OFFICIAL, tmp_path / "head")
    store(head.folder, tensors(dict(head.tensors)), "safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_draft(head.folder, target)


def rename_parts(tensors, parts):
    out = {}
    for name, tensor in tensors.items():
        for old, new in parts.items():
            name = name.replace(old, new)
        out[name] = tensor
    return out


def test_layer_numbers_of_the_default_are_known_without_the_target(tmp_path):
    for ids, layers, guessed in (([2, 15, 27], (2, 15, 27), False), ([1, 14, 26], (2, 15, 27), True)):
        head = write(NVIDIA, tmp_path / str(ids))
        edit(head.folder, {f"eagle_config/{IDS}": ids})
        report = inspect_checkpoint(head.folder)
        assert (report.capture_layers, report.capture_layers_guessed) == (layers, guessed)


@pytest.mark.parametrize("depth", [None, 30])
def test_layers_between_those_of_the_default_leave_no_doubt(depth):
    for ids, certain in (([2, 8, 15, 21, 27], True), ([2, 8, 14, 21, 27], False), ([3, 8, 15, 21, 27], False)):
        capture = named_layers(ids, IDS, None, depth)
        assert capture.layers == tuple(ids)
        assert (capture.guess is None) == certain
    assert named_layers([2, 8, 15, 21, 27], IDS, None, 32).guess is not None
