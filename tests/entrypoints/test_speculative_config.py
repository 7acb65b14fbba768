"""`speculative_config` is read whole, and every wrong key gets advice."""

import dataclasses
from pathlib import Path

import pytest

from eagle_jax import SpeculativeConfig, TreeConfig
from eagle_jax.drafters.tree import NAMED_TREES, StaticTree
from eagle_jax.speculative_config import default_tree

CHAIN = {"method": "eagle3", "model": "owner/head", "num_speculative_tokens": 5}


def test_chain():
    config = SpeculativeConfig.from_dict(CHAIN)
    assert config == SpeculativeConfig(method="eagle3", model="owner/head", tree=TreeConfig.chain(5))
    assert SpeculativeConfig.from_dict(config) is config


def test_tree_and_the_other_keys():
    config = SpeculativeConfig.from_dict(
        {
            "model": Path("head"),
            "tree": {"total_tokens": 60, "depth": 7, "top_k": 10},
            "revision": "main",
            "draft_tensor_parallel_size": 1,
            "rope_theta": 5e5,
            "quantization": None,
        }
    )
    assert config.tree == TreeConfig(total_tokens=60, depth=7, top_k=10)
    assert (config.method, config.revision, config.rope_theta) == (None, "main", 5e5)
    assert SpeculativeConfig.from_dict({"model": "a", "tree": config.tree}).tree is config.tree
    overrides = {"norm_before_residual": False}
    config = SpeculativeConfig.from_dict(
        {"model": "a", "layer_id_convention": "output", "config_overrides": overrides, "num_speculative_tokens": None}
    )
    assert (config.layer_id_convention, config.config_overrides, config.tree) == ("output", overrides, None)


@pytest.mark.parametrize(
    ("method", "vocabulary", "asked", "tree"),
    [
        ("eagle", 32000, None, (60, 5, 10)),
        ("eagle3", 32000, None, (60, 7, 10)),
        ("eagle3", 9, None, (60, 7, 9)),
        ("eagle3", 2, None, (31, 7, 2)),  # no more nodes can be reached: 1 + 2 + 7 * 4
        ("eagle3", 32000, 3, (4, 2, 1)),
    ],
)
def test_default_trees(tiny, method, vocabulary, asked, tree):
    draft = tiny[1]
    config = dataclasses.replace(draft.config, method=method, draft_vocab_size=vocabulary, vocab_size=32000)
    draft = dataclasses.replace(draft, config=config, num_speculative_tokens=asked)
    assert default_tree(draft) == TreeConfig(total_tokens=tree[0], depth=tree[1], top_k=tree[2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_id_convention": "vllm"}, "layer_id_convention must be 'input' or 'output', got 'vllm'"),
        ({"config_overrides": ["rope_theta"]}, "config_overrides must be a dictionary"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1, got 0"),
        ({"num_speculative_tokens": "5"}, "num_speculative_tokens must be an integer, got '5'"),
        ({"tree": {"total_tokens": 6, "depth": 2, "top_k": 2}}, "has both num_speculative_tokens .* and tree"),
        ({"model": None}, "lacks model"),
        ({"model": ""}, "model must be a path or a repository, got ''"),
        ({"method": "ngram"}, "method 'ngram' is not supported; supported are 'eagle', 'eagle3'"),
        (
            {"tensor_parallel_size": 1},
            "'tensor_parallel_size', which does not belong there: use draft_tensor_parallel_size",
        ),
        ({"draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size must be 1 or tensor_parallel_size, got 0"),
        ({"temperature": 0.0}, "'temperature', which does not belong there: .* set it in SamplingParams"),
        ({"top_p": 0.9}, "set it in SamplingParams"),
        ({"dtype": "float32"}, "shares this with the target; set it as a keyword of LLM"),
        ({"tokenizer": "x"}, "set it as a keyword of LLM"),
        ({"gpu_memory_utilization": 0.9}, "set it as a keyword of LLM"),
        ({"max_model_len": 100}, "set max_model_len of LLM"),
        ({"quantization": "fp8"}, "give an unquantised head"),
        (
            {"num_spec_tokens": 5},
            "unknown key 'num_spec_tokens'; known keys are config_overrides, draft_sample_method, draft_tensor",
        ),
        ({"rope_theta": -1}, "rope_theta must be a number greater than 1, got -1"),
    ],
)
def test_wrong_keys_and_values(changes, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.from_dict(CHAIN | changes)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"total_tokens": 6, "depth": 2}, "tree lacks top_k"),
        ({"total_tokens": 6, "depth": 2, "topk": 2}, r"tree has unknown keys \['topk'\]"),
        ({"total_tokens": 60, "depth": 1, "top_k": 2}, "exceeds the 7 nodes"),
        ("no_such_tree", "tree 'no_such_tree' is not known; known are 'auto', 'mc_sim_7b_63'"),
        ([[0], [1, 0]], r"tree path \(1, 0\) has no parent"),
        ([60, 7, 10], "tree must be a mapping with total_tokens, depth, top_k, a list of paths, or a name"),
    ],
)
def test_wrong_trees(tree, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.from_dict({"model": "a", "tree": tree})


def test_static_trees_are_given_by_paths_or_by_name():
    paths = [[0], [1], [0, 0]]
    tree = StaticTree.from_paths(paths)
    for given in (tree, paths):
        assert SpeculativeConfig.from_dict({"model": "a", "tree": given}).tree == tree
    assert SpeculativeConfig.from_dict({"model": "a", "tree": "mc_sim_7b_63"}).tree is NAMED_TREES["mc_sim_7b_63"]


def test_only_a_mapping_is_read():
    with pytest.raises(TypeError, match="speculative_config must be a dictionary, got 'eagle3'"):
        SpeculativeConfig.from_dict("eagle3")
