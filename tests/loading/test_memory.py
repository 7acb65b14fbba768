"""The arithmetic of memory, against the arrays themselves; and what importing the package costs."""

import subprocess
import sys

import jax
import pytest
from checkpoint_files import LLAMA, head_tensors, parameters, random_target, save_head

from eagle_jax.loading import cache_bytes_per_row, load_draft, parameter_count, weight_bytes
from eagle_jax.models import LlamaConfig


@pytest.mark.parametrize("tied", [True, False])
def test_target(tied):
    target = random_target(tie_word_embeddings=tied)
    arrays = parameters(target.model).values()
    assert weight_bytes(target.config, "float32") == sum(a.nbytes for a in arrays)
    assert weight_bytes(target.config, "bfloat16") == sum(a.nbytes for a in arrays) // 2
    assert parameter_count(target.config) == sum(a.size for a in arrays)
    cache = target.model.empty_cache(3, 5)
    assert cache_bytes_per_row(target.config, "float32") * 15 == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


def test_draft(tmp_path):
    draft = load_draft(save_head(tmp_path, head_tensors(layers=2)), random_target())
    arrays = parameters(draft.head)
    assert weight_bytes(draft.config, "float32") == sum(a.nbytes for a in arrays.values())
    assert parameter_count(draft.config) == sum(a.size for path, a in arrays.items() if path != "vocabulary")
    cache = draft.head.empty_cache(1, 4)
    assert cache_bytes_per_row(draft.config, "float32") * 4 == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


def test_an_8b_llama_by_hand():
    config = LlamaConfig.from_dict(
        LLAMA
        | {"model_type": "llama"}
        | {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        }
    )
    assert parameter_count(config) == 8_030_261_248
    assert cache_bytes_per_row(config, "bfloat16") == 131072


def test_importing_the_package_imports_no_optional_one_and_starts_no_backend():
    code = """
import sys
import eagle_jax.loading
from jax._src import xla_bridge
assert not xla_bridge._backends
loaded = {"torch", "transformers", "gguf", "huggingface_hub"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)
