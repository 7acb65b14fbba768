"""`LLM(model=...)` of a draft head in the speculators format: target, method and number of tokens come from the checkpoint."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from support.pairs import PROMPTS

from eagle_jax import LLM, CheckpointError, SamplingParams, TreeConfig, load_draft

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
PARAMS = SamplingParams(temperature=0.0, max_tokens=12)


def speculators_head(folder: Path, verifier: str | None, **changes) -> Path:
    """The golden EAGLE-3 head of target_A under the names and in the layout of speculators."""
    folder.mkdir(parents=True)
    tensors = load_file(GOLDEN / "head_A_e3" / "model.safetensors")
    save_file({n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}, folder / "model.safetensors")
    flat = json.loads((GOLDEN / "head_A_e3" / "config.json").read_text())
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": flat.pop("draft_vocab_size"),
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 2, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": flat,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def answers(llm: LLM) -> tuple[list, list]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outputs], [o.metrics.accepted_lengths for o in outputs]


def test_the_checkpoint_alone_is_target_and_head(tmp_path):
    head = speculators_head(tmp_path / "head", str(GOLDEN / "target_A"))
    llm = LLM(model=str(head), dtype="float32", max_num_seqs=4)
    assert llm.target.path == GOLDEN / "target_A"
    assert (llm.draft.path, llm.draft.config.method) == (head, "eagle3")
    assert llm.decoder.config.tree == TreeConfig.chain(2)
    direct = load_draft(GOLDEN / "head_A_e3", llm.target)
    assert llm.draft.config == direct.config
    for mine, theirs in zip(leaves(llm.draft.head), leaves(direct.head), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def leaves(module: nnx.Module) -> list:
    return jax.tree.leaves(nnx.state(module))


@pytest.mark.slow
def test_the_answers_are_those_of_the_same_models_named_one_by_one(tmp_path):
    head = speculators_head(tmp_path / "head", str(GOLDEN / "target_A"))
    llm = LLM(model=str(head), dtype="float32", max_num_seqs=4)
    named = {"method": "eagle3", "model": str(GOLDEN / "head_A_e3"), "num_speculative_tokens": 2}
    expected = answers(LLM(llm.target, max_num_seqs=4, speculative_config=named))
    assert answers(llm) == expected
    assert max(length for row in expected[1] for length in row) == 3


def test_keys_of_the_caller_win(tmp_path):
    head = speculators_head(tmp_path / "head", str(GOLDEN / "target_A"))
    tree = {"total_tokens": 8, "depth": 3, "top_k": 2}
    llm = LLM(head, speculative_config={"tree": tree, "rope_theta": 20000.0, "model": str(head)})
    assert llm.decoder.config.tree == TreeConfig(**tree)
    assert llm.draft.config.rope.theta == 20000.0


def test_a_relative_target_is_found_beside_the_head(tmp_path):
    shutil.copytree(GOLDEN / "target_A", tmp_path / "head" / "target")
    shutil.move(tmp_path / "head" / "target", tmp_path / "target")
    (tmp_path / "head").rmdir()
    llm = LLM(speculators_head(tmp_path / "head", "../target"))
    assert llm.target.path.resolve() == tmp_path / "target"


@pytest.mark.parametrize(
    ("changes", "speculation", "error", "message"),
    [
        ({"speculators_config": {}}, None, CheckpointError, "does not name its target"),
        (
            {"speculators_model_type": "dflash"},
            None,
            CheckpointError,
            "'dflash' is not supported; supported are 'eagle3'",
        ),
        ({"speculators_model_type": None}, None, CheckpointError, "lacks speculators_model_type"),
        ({}, {"model": "another/head"}, ValueError, "names another head, another/head"),
        ({}, {"method": "eagle"}, CheckpointError, "method 'eagle' contradicts the tensors, .* of an 'eagle3' head"),
        ({}, {"depth": 3}, ValueError, "unknown key 'depth'"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, changes, speculation, error, message):
    head = speculators_head(tmp_path / "head", str(GOLDEN / "target_A"), **changes)
    with pytest.raises(error, match=message):
        LLM(head, speculative_config=speculation)
