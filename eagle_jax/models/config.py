"""Configuration of a target model, read from the config.json of a Llama checkpoint."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from eagle_jax.models.rope import RopeConfig

# Keys that say nothing about the forward pass of a dense Llama decoder. Anything that is neither here nor read is an error.
IRRELEVANT_KEYS = frozenset({
    "architectures", "attention_dropout", "auto_map", "begin_suppress_tokens", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "embd_pdrop", "exponential_decay_length_penalty",
    "finetuning_task", "id2label", "initializer_range", "is_decoder", "is_llama_config", "label2id", "pad_token_id", "prefix",
    "pretraining_tp", "problem_type", "resid_pdrop", "return_dict", "sep_token_id", "task_specific_params",
    "tokenizer_class", "transformers_version", "use_bfloat16", "use_cache", "unsloth_version", "unsloth_fixed",
    "output_attentions", "output_hidden_states", "torchscript", "pruned_heads", "add_cross_attention",
    "tie_encoder_decoder", "is_encoder_decoder", "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "suppress_tokens", "tf_legacy_loss", "transformers.js_config", "rope_interleaved", "max_sequence_length", "mlp_dropout",
})  # fmt: skip

_RELEVANT = frozenset({
    "attention_bias", "bos_token_id", "dtype", "eos_token_id", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
    "max_position_embeddings", "mlp_bias", "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "partial_rotary_factor", "quantization_config", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "tie_word_embeddings", "torch_dtype", "vocab_size",
})  # fmt: skip

MODEL_TYPES = ("llama",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Everything the forward pass of a Llama target depends on, and the ids at which its texts end."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str | None = None
    """dtype the checkpoint says it was saved in, e.g. "bfloat16"; None if it does not say."""

    @staticmethod
    def from_dict(
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        ignore_keys: Iterable[str] = (),
    ) -> "LlamaConfig":
        """Reads the parsed config.json of a Llama checkpoint, in the layout of transformers 4 or 5.

        Args:
          config: the parsed config.json.
          generation_config: the parsed generation_config.json; its `eos_token_id` wins over config.json's, as in transformers.
          ignore_keys: keys of config.json that are known not to matter.

        Raises:
          ValueError: a missing, unknown or unsupported key, or numbers that do not fit together.
        """
        model_type = config.get("model_type", "llama")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"model_type {model_type!r} is not supported; supported are {', '.join(MODEL_TYPES)}")
        if (quantization := config.get("quantization_config")) is not None:
            method = (
                quantization.get("quant_method", quantization) if isinstance(quantization, Mapping) else quantization
            )
            raise ValueError(f"the checkpoint is quantised ({method}); load an unquantised or a GGUF checkpoint")
        unknown = {k for k in config if not k.startswith("_")} - _RELEVANT - IRRELEVANT_KEYS - set(ignore_keys)
        if unknown:
            raise ValueError(
                f"config.json has keys that this library does not know: {sorted(unknown)}. If they do not change the "
                f"forward pass, pass ignore_config_keys={sorted(unknown)}"
            )
        required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [k for k in required if config.get(k) is None]:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ValueError(f"hidden_act {activation!r} is not supported; Llama uses 'silu'")
        heads = int(config["num_attention_heads"])
        kv_heads = int(heads if config.get("num_key_value_heads") is None else config["num_key_value_heads"])
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
        head_dim = config.get("head_dim")
        if head_dim is None:
            if config["hidden_size"] % heads:
                raise ValueError(f"hidden_size {config['hidden_size']} is no multiple of num_attention_heads {heads}")
            head_dim = config["hidden_size"] // heads
        if head_dim % 2:
            raise ValueError(f"head_dim {head_dim} is odd; rotary embeddings pair its channels")
        return LlamaConfig(
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_hidden_layers=int(config["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=int(head_dim),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
            rope=RopeConfig.from_config(config),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_eos_ids(config, generation_config or {}),
            checkpoint_dtype=config.get("dtype") or config.get("torch_dtype"),
        )


def _eos_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids: an int, a list, or none; generation_config.json wins where it names any."""
    value = generation_config.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise ValueError(f"eos_token_id {value!r} must be an id or a list of ids")
    return ids
