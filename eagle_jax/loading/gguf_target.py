"""A target in GGUF, seen as the Hugging Face checkpoint it was converted from: names, row order and configuration.

For the architecture "llama", which Mistral is written as too, llama.cpp rotates neighbouring channels where Hugging Face rotates
the two halves of a head, so converters reorder the rows of q and k; the reader here puts them back. Qwen's rows stay in order.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from eagle_jax.loading.errors import CheckpointError
from eagle_jax.loading.gguf import GGUFSource
from eagle_jax.loading.sources import Slices, TensorSource, bounds
from eagle_jax.models.config import LlamaConfig
from eagle_jax.models.families import gguf_family
from eagle_jax.models.rope import RopeConfig

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Keys under the architecture's name that are read below; another one changes the model in a way that is not computed.
_KEYS = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "attention.sliding_window", "attention.sliding_window_pattern", "rope.dimension_count", "rope.freq_base",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scale_linear",
})  # fmt: skip

ROPE_FACTORS = "rope_freqs.weight"


class GGUFTargetSource(TensorSource):
    """The tensors of a GGUF target under their Hugging Face names and in Hugging Face's row order."""

    def __init__(self, source: GGUFSource, config: LlamaConfig):
        # The factors went into the configuration; as a tensor they are not a weight.
        tensors = {hugging_face_name(n): info for n, info in source.tensors.items() if n != ROPE_FACTORS}
        super().__init__("gguf", source.files, source.metadata, tensors)
        self._source, self._config = source, config
        self._reordered = source.metadata["general.architecture"] == "llama"

    def stored_name(self, name: str) -> str:
        """The name in the file."""
        return self.tensors[name].stored_name if name in self.tensors else gguf_name(name)

    def read(self, name: str, slices: Slices = ()) -> np.ndarray:
        """Reads a slice of a tensor."""
        stored = self.tensors[name].stored_name
        if not (self._reordered and re.search(r"\.self_attn\.[qk]_proj\.", name)):
            return self._source.read(stored, slices)
        (first, stop), *_ = bounds(name, self.shape(name), slices)
        dim = self._config.head_dim
        rows = np.arange(first, stop)
        head, channel = rows // dim, rows % dim
        stored_rows = head * dim + channel % (dim // 2) * 2 + channel // (dim // 2)
        low = first // dim * dim
        high = min(-(-stop // dim) * dim, self.shape(name)[0])
        return self._source.read(stored, (slice(low, high), *slices[1:]))[stored_rows - low]


def hugging_face_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor of a target; other names are returned unchanged."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _NAMES:
        return name
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{_NAMES[match[2]]}.{match[3]}"


def gguf_name(name: str) -> str:
    """GGUF name of a Hugging Face tensor of a target; other names are returned unchanged."""
    match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
    stems = {theirs: ours for ours, theirs in _NAMES.items()}
    if match is None or match[2] not in stems:
        return name
    layer = "" if match[1] is None else f"blk.{match[1]}."
    return f"{layer}{stems[match[2]]}.{match[3]}"


def gguf_config(source: GGUFSource, ignore_keys: Iterable[str] = ()) -> LlamaConfig:
    """Reads the configuration of a GGUF target from its metadata and tensors.

    Args:
      source: the file.
      ignore_keys: keys such as "llama.note" that are known not to matter.

    Raises:
      CheckpointError: another architecture, a missing or unknown key, or rotary factors that are not those of Llama 3.
    """
    metadata, file = source.metadata, source.files[0].name
    try:
        family = gguf_family(metadata.get("general.architecture"))
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
    if metadata.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{file} is one of {metadata['split.count']} parts; merge them with llama-gguf-split --merge"
        )
    prefix = family.gguf_architecture + "."
    keys = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    ignored = {k.removeprefix(prefix) for k in ignore_keys}
    if unknown := [prefix + k for k in sorted(set(keys) - _KEYS - ignored)]:
        raise CheckpointError(
            f"{file} has keys that this library does not know: {unknown}. If they do not change the forward pass, pass "
            f"ignore_config_keys={unknown}"
        )

    def integer(key: str, default: int | None = None) -> int:
        value = keys.get(key, default)
        if isinstance(value, list):  # one number a layer
            if len(set(value)) != 1:
                raise CheckpointError(
                    f"{file} has a different {prefix}{key} in each layer, which is not supported: {value}"
                )
            value = value[0]
        if value is None:
            raise CheckpointError(f"{file} lacks {prefix}{key}")
        return int(value)

    names = source.names()
    if "token_embd.weight" not in names:
        raise CheckpointError(f"{file} lacks the tensor token_embd.weight")
    vocab, hidden = source.shape("token_embd.weight")
    heads = integer("attention.head_count")
    head_dim = integer("attention.key_length", integer("embedding_length") // heads)
    context, layers = integer("context_length"), integer("block_count")
    implied = {"embedding_length": hidden, "vocab_size": vocab}
    implied |= {"rope.dimension_count": head_dim, "attention.value_length": head_dim}
    for key, value in implied.items():
        if integer(key, value) != value:
            raise CheckpointError(
                f"{file} has {prefix}{key} {integer(key)}, where its other keys and tensors make it {value}"
            )
    if "attention.layer_norm_rms_epsilon" not in keys:
        raise CheckpointError(f"{file} lacks {prefix}attention.layer_norm_rms_epsilon")
    factors = source.read(ROPE_FACTORS) if ROPE_FACTORS in names else None
    try:
        return LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=integer("feed_forward_length"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            model_type=family.model_type,
            # The file holds float32; seven digits give back the number that was written, e.g. 1e-5.
            rms_norm_eps=float(f"{keys['attention.layer_norm_rms_epsilon']:.7g}"),
            max_position_embeddings=context,
            rope=_rope(keys, factors, head_dim, context, file),
            qkv_bias="blk.0.attn_q.bias" in names if family.qkv_bias is None else family.qkv_bias,
            out_bias="blk.0.attn_output.bias" in names if family.out_bias is None else family.out_bias,
            mlp_bias="mlp_bias" in family.own_keys and "blk.0.ffn_gate.bias" in names,
            qk_norm=family.qk_norm,
            sliding_windows=_sliding_windows(keys, layers, file),
            tie_word_embeddings="output.weight" not in names,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=_eos_ids(metadata),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a text: end of sequence, of a turn, and of a message (the three of Llama 3's generation_config.json)."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _sliding_windows(keys: Mapping[str, Any], layers: int, file: str) -> tuple[int | None, ...]:
    """The window of each layer: of all of them, or of those that the pattern, a list with true for each such layer, names."""
    size = keys.get("attention.sliding_window", 0)
    pattern = keys.get("attention.sliding_window_pattern", [True] * layers)
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise CheckpointError(
            f"{file} has attention.sliding_window_pattern {pattern!r}; one true or false for each of {layers} layers is read"
        )
    return tuple(int(size) if windowed else None for windowed in pattern) if size and any(pattern) else ()


def _rope(keys: Mapping[str, Any], factors: np.ndarray | None, head_dim: int, context: int, file: str) -> RopeConfig:
    settings: dict[str, Any] = {"rope_type": "default", "rope_theta": float(keys.get("rope.freq_base", 10000.0))}
    kind = keys.get("rope.scaling.type")
    if kind is None and keys.get("rope.scale_linear", 1.0) != 1.0:
        kind = "linear"
    if kind not in (None, "none"):
        factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear"))
        settings |= {"rope_type": kind} | ({} if factor is None else {"factor": float(factor)})
        if kind == "yarn":
            settings["original_max_position_embeddings"] = keys.get("rope.scaling.original_context_length")
            settings["beta_fast"] = keys.get("rope.scaling.yarn_beta_fast")
            settings["beta_slow"] = keys.get("rope.scaling.yarn_beta_slow")
            if factor is not None and "rope.scaling.attn_factor" in keys:
                # llama.cpp multiplies it onto the paper's factor, where Hugging Face's attention_factor replaces that.
                settings["attention_factor"] = keys["rope.scaling.attn_factor"] * (1 + 0.1 * math.log(factor))
    if factors is None or np.all(factors == 1):
        return RopeConfig.from_config({"rope_parameters": settings, "max_position_embeddings": context})
    if settings["rope_type"] != "default":
        raise CheckpointError(f"{file} has both {ROPE_FACTORS} and rope.scaling.type {kind!r}; only one can be applied")
    return _llama3_rope(settings["rope_theta"], factors, head_dim, context, file)


def _llama3_rope(theta: float, factors: np.ndarray, head_dim: int, context: int, file: str) -> RopeConfig:
    """The llama3 settings whose factors those are: converters store the factors of each channel, not what made them."""
    factor = round(float(factors.max()), 4)
    base = RopeConfig(theta=theta).inverse_frequencies(head_dim).astype(np.float64)
    trained = [2**n for n in range(int(math.log2(context)) + 1)]
    for original in sorted(trained, key=lambda n: n != 8192):
        rope = RopeConfig(
            rope_type="llama3",
            theta=theta,
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=original,
        )
        made = base / rope.inverse_frequencies(head_dim)
        if factors.shape == made.shape and np.allclose(made, factors, rtol=1e-4):
            return rope
    raise CheckpointError(
        f"{file} has {ROPE_FACTORS} of shape {factors.shape} that are not the llama3 factors of any original context up to "
        f"{context} (low_freq_factor 1, high_freq_factor 4); such rotary scaling (longrope) is not supported"
    )
