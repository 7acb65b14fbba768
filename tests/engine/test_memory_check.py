"""What does not fit into memory is refused before it is compiled, with the length that would fit."""

import re

import jax
import numpy as np
import pytest
from support.drive import make_engine
from support.pairs import tiny_pair

from eagle_jax import LLM, InsufficientMemoryError, TreeConfig, generate
from eagle_jax.decoding.loop import init_state
from eagle_jax.engine import memory
from eagle_jax.engine.config import EngineConfig, context_length
from eagle_jax.engine.memory import Footprint, available_bytes
from eagle_jax.entrypoints import decoder
from eagle_jax.models import LlamaConfig, RopeConfig
from pallas_kernels.tree_attention.blocked import block_of

TREE = TreeConfig(total_tokens=8, depth=2, top_k=3)


@pytest.fixture(scope="module")
def models():
    return tiny_pair(vocab_size=10, max_position_embeddings=8192)


def footprint(models, slots=2, **changes):
    target, draft = models
    settings = {
        "target": target.config,
        "draft": draft.config,
        "tree": TREE,
        "target_dtype": np.dtype("float32"),
        "draft_dtype": np.dtype("float32"),
        "slots": slots,
        "prefill_chunk": 64,
        "attention_block": block_of("cpu"),
    }
    return Footprint(**(settings | changes))


def limit(monkeypatch, size):
    monkeypatch.setattr(memory, "available_bytes", lambda device, sharing: size)


def test_cache_is_what_the_state_takes(models):
    target, draft = models
    engine = make_engine(target.model, draft.head, tree=TREE, slots=2, max_length=4096, prefill_chunk=64)
    state = jax.eval_shape(init_state, engine.programs.plan, engine.programs.weights)
    actual = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert footprint(models).cache_bytes(4096) == pytest.approx(actual, rel=0.01)


def test_longest_length_is_the_last_that_fits(models):
    needs = footprint(models)
    available = needs.total(3000)
    longest = needs.largest_max_length(available, 8192)
    assert needs.total(longest) <= available < needs.total(longest + 1)
    assert longest >= 3000
    assert needs.largest_max_length(10**18, 8192) == 8192
    assert needs.largest_max_length(10, 8192) == 0


def test_the_slot_that_is_prefilled_counts(models):
    one, many = footprint(models, slots=1), footprint(models, slots=2)
    grows = [needs.temporary_bytes(8192) - needs.temporary_bytes(4096) for needs in (one, many)]
    slot = one.cache_bytes(8192) - one.cache_bytes(4096)
    assert grows[1] - grows[0] == pytest.approx(slot, rel=0.05)


def test_call_that_does_not_fit_names_the_length_that_does(models, monkeypatch):
    target, _ = models
    needs = footprint(models, slots=1, draft=None, tree=None, draft_dtype=None)
    limit(monkeypatch, needs.total(3000))
    compiled = []
    monkeypatch.setattr(decoder, "EngineCore", lambda *args, **options: compiled.append(options))
    with pytest.raises(MemoryError, match="the largest max_model_len that fits with 1 slots is") as error:
        generate(target, [[1] * 5000], max_new_tokens=1)
    assert compiled == []
    longest = int(re.search(r"slots is (\d+)", str(error.value))[1])
    assert longest == needs.largest_max_length(needs.total(3000), 8192)
    with pytest.raises(InsufficientMemoryError, match="fits with 8 slots is"):
        generate(target, [[1] * 5000] * 8, max_new_tokens=1)
    limit(monkeypatch, 10)
    with pytest.raises(InsufficientMemoryError, match="no max_model_len fits with 1 slots"):
        generate(target, [[1]], max_new_tokens=1)


def test_limits_given_to_llm_are_checked_when_it_is_made(models, monkeypatch):
    target, _ = models
    needs = footprint(models, slots=4, draft=None, tree=None, draft_dtype=None)
    limit(monkeypatch, needs.total(2048))
    LLM(target)
    LLM(target, max_model_len=2048, max_num_seqs=4)
    with pytest.raises(InsufficientMemoryError, match="the largest max_model_len that fits with 4 slots is"):
        LLM(target, max_model_len=8192, max_num_seqs=4)


def test_available_memory_of_devices():
    class Device:
        platform = "gpu"

        def __init__(self, stats):
            self.stats = stats

        def memory_stats(self):
            return self.stats

    assert available_bytes(Device({"bytes_limit": 100, "bytes_in_use": 30})) == 70
    assert available_bytes(Device({"bytes_limit": 100})) == 100
    assert available_bytes(Device(None)) is None
    assert available_bytes(Device({})) is None
    host = available_bytes(jax.devices("cpu")[0])
    assert host is None or host > 10**6


def test_container_limit(tmp_path):
    assert memory._available_in_container(tmp_path) == []
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._available_in_container(tmp_path) == []
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\nactive_file 50\ninactive_file 150\n")
    assert memory._available_in_container(tmp_path) == [500]


def test_calls_have_few_sizes():
    def sizes(max_model_len=1000, max_num_seqs=6, **call):
        config = EngineConfig(max_model_len=max_model_len, max_num_seqs=max_num_seqs, prefill_chunk=8)
        one = config.for_call(**{"prompts": 1, "tokens": 1, "stop_ids": 0, "groups": 1, **call})
        return one.max_model_len, one.max_num_seqs, one.max_stop_ids

    assert [sizes(tokens=n)[0] for n in (1, 256, 257, 512, 513, 1000)] == [256, 256, 512, 512, 1000, 1000]
    assert [sizes(100, tokens=n)[0] for n in (1, 100)] == [100, 100]
    assert [sizes(prompts=n)[1] for n in (1, 2, 3, 4, 5, 6, 100)] == [1, 2, 4, 4, 6, 6, 6]
    assert [sizes(prompts=n, groups=2)[1] for n in (1, 3, 100)] == [2, 4, 6]
    assert [sizes(stop_ids=n)[2] for n in (0, 8, 9, 17)] == [8, 8, 16, 32]


def test_context_follows_rotary_scaling():
    def context(**rope):
        settings = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), 8)
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
        return context_length(LlamaConfig(**settings, **heads, max_position_embeddings=100, rope=RopeConfig(**rope)))

    assert context() == 100
    assert context(rope_type="llama3", factor=8.0, original_max_position_embeddings=50) == 100
    assert context(rope_type="linear", factor=2.0) == 200
    assert context(rope_type="dynamic", factor=4.0, original_max_position_embeddings=100) == 400
    assert context(rope_type="yarn", factor=4.0, original_max_position_embeddings=100) == 400
    assert context(rope_type="yarn", factor=2.0, original_max_position_embeddings=50) == 100
