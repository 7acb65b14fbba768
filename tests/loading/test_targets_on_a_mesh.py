"""Targets of nine heads on three devices, from safetensors and from quantised GGUF."""

from pathlib import Path

import pytest
from checkpoint_files import hugging_face_llama
from gguf_files import gguf_keys, gguf_tensors, write_gguf

from eagle_jax import LLM, SamplingParams, load_target
from eagle_jax.parallel import make_mesh


@pytest.mark.slow
def test_three_devices_for_nine_heads(tmp_path: Path) -> None:
    """The geometry of SmolLM2 (9 and 3 heads), tied, as safetensors and quantised GGUF: tp 3 works, tp 2 raises."""
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 32, "hidden_size": 288}
    sizes |= {"intermediate_size": 768, "num_hidden_layers": 2, "vocab_size": 97, "tie_word_embeddings": True}
    model = hugging_face_llama(**sizes)
    model.save_pretrained(tmp_path / "folder")
    file = tmp_path / "model.gguf"
    write_gguf(file, gguf_tensors(model), gguf_keys(model.config), kind="Q8_0")
    for path in (tmp_path / "folder", file):
        with pytest.raises(ValueError, match="num_attention_heads 9, which tensor_parallel_size 2 does not divide"):
            LLM(path, tensor_parallel_size=2, skip_tokenizer_init=True)
        whole = load_target(path, dtype="float32")
        target = load_target(path, dtype="float32", mesh=make_mesh(3))
        down = target.model.layers[0].mlp.down.weight[...]
        assert {shard.data.shape for shard in down.addressable_shards} == {(288, 256)}
        prompt, params = [[5, 9, 60, 3]], SamplingParams(max_tokens=30, ignore_eos=True)
        texts = [LLM(t, skip_tokenizer_init=True).generate(prompt, params, use_tqdm=False) for t in (whole, target)]
        assert texts[0][0].outputs[0].token_ids == texts[1][0].outputs[0].token_ids
