"""`speculative_config` is read whole, and every wrong key gets advice."""

from pathlib import Path

import pytest

from eagle_jax import SpeculativeConfig, TreeConfig
from eagle_jax.decoding.tree import NAMED_TREES, StaticTree

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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_speculative_tokens": None}, "lacks num_speculative_tokens.*or tree instead"),
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
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size must be 1 so far, got 2"),
        ({"temperature": 0.0}, "'temperature', which does not belong there: .* set it in SamplingParams"),
        ({"top_p": 0.9}, "set it in SamplingParams"),
        ({"dtype": "float32"}, "shares this with the target; set it as a keyword of LLM"),
        ({"tokenizer": "x"}, "set it as a keyword of LLM"),
        ({"gpu_memory_utilization": 0.9}, "set it as a keyword of LLM"),
        ({"max_model_len": 100}, "set max_model_len of LLM"),
        ({"quantization": "fp8"}, "give an unquantised head"),
        ({"num_spec_tokens": 5}, "unknown key 'num_spec_tokens'; known keys are draft_tensor_parallel_size, method"),
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
        ("no_such_tree", "tree 'no_such_tree' is not known; known are 'mc_sim_7b_63'"),
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
