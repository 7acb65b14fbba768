"""Small GGUF files, written as llama.cpp's converter and quantiser write them."""

import gguf
import numpy as np

KINDS = {
    name: gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
}
"""Kinds that the gguf package can write itself."""

SCALES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ2_XXS": (0,), "IQ2_XS": (0,),
    "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
"""Where the half-precision scales lie in a block of the kinds that only llama.cpp writes."""


def random_blocks(kind, shape, scale, rng):
    """Packed random values of a kind in SCALES, about as large as `scale`; rows of `shape[-1]`."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    count = shape[0] * shape[1] // block
    data = rng.integers(0, 256, (count, size), dtype=np.uint8)

    def with_scale(value):
        for offset in SCALES[kind]:
            data[:, offset : offset + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])

    with_scale(scale / np.abs(with_scale(1.0)).mean())
    return data.reshape(shape[0], -1)


def permute(weight, heads):
    """The row order that llama.cpp's converter gives q and k: channels of the two halves of a head alternate."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(path, tensors, keys, kind="F32", architecture="llama", norms="F32"):
    """Writes a GGUF file as llama.cpp's converter does: matrices in one kind, vectors in another.

    A tensor may also be given as (kind, packed bytes).
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[1], raw_dtype=gguf.GGMLQuantizationType[value[0]])
            continue
        wanted = KINDS[kind if value.ndim > 1 else norms]
        if wanted in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            writer.add_tensor(name, value.astype(np.float16 if wanted == gguf.GGMLQuantizationType.F16 else np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_keys(config, architecture="llama", **changes):
    """The keys of a transformers configuration; names in `changes` are written as they are, None drops a key."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    if architecture == "llama":
        keys |= {"rope.dimension_count": head_dim, "vocab_size": config.vocab_size}
    if head_dim != config.hidden_size // config.num_attention_heads:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    keys = {f"{architecture}.{key}": value for key, value in keys.items()} | changes
    return {key: value for key, value in keys.items() if value is not None}


def gguf_tensors(model, architecture="llama"):
    """The tensors of a transformers model under the names of the gguf package; for "llama" q and k in llama.cpp's row order."""
    config, tensors = model.config, {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, value in model.state_dict().items():
        value = value.numpy()
        if architecture == "llama" and "q_proj" in name:
            value = permute(value, config.num_attention_heads)
        elif architecture == "llama" and "k_proj" in name:
            value = permute(value, config.num_key_value_heads)
        if not (name == "lm_head.weight" and config.tie_word_embeddings):
            tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = value
    return tensors
