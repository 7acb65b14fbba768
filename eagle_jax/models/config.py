"""Configuration of a target model, read from the config.json of a checkpoint of any family."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from eagle_jax.models.families import OWN_KEYS, Family, find_family
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.specs import LayerSpec, layer_specs

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
    "use_mrope",
})  # fmt: skip

# Switches of other models that exporters write down when they are off. Switched on, they make another model.
_MUST_BE_OFF = (
    "add_cross_attention",
    "is_encoder_decoder",
    "pruned_heads",
    "rope_interleaved",
    "tie_encoder_decoder",
    "use_mrope",
)

_RELEVANT = OWN_KEYS | {
    "bos_token_id", "compression_config", "dtype", "eos_token_id", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
    "max_position_embeddings", "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "partial_rotary_factor", "quantization_config", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "tie_word_embeddings", "torch_dtype", "vocab_size",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Everything the forward pass of a target of any family depends on, and the ids at which its texts end."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    model_type: str = "llama"
    """The family (`eagle_jax.models.families`); the forward pass reads only what is spelled out below."""
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    qkv_bias: bool = False
    out_bias: bool = False
    """The attention's output projection has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Each head's queries and keys go through an RMSNorm before they are rotated (Qwen3)."""
    sliding_windows: tuple[int | None, ...] = ()
    """Attention window of each layer, in tokens with the own one, None for full attention; empty when no layer has one."""
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str | None = None
    """dtype the checkpoint says it was saved in, e.g. "bfloat16"; None if it does not say."""

    def __post_init__(self) -> None:
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embeddings pair its channels")
        if self.sliding_windows and len(self.sliding_windows) != self.num_hidden_layers:
            raise ValueError(
                f"sliding_windows {self.sliding_windows} must have one entry for each of {self.num_hidden_layers} layers"
            )
        if any(size is not None and size < 1 for size in self.sliding_windows):
            raise ValueError(f"sliding_windows {self.sliding_windows} must be at least 1: a token sees itself")

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Every layer, as data."""
        return layer_specs(self)

    @staticmethod
    def from_dict(
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        ignore_keys: Iterable[str] = (),
    ) -> "LlamaConfig":
        """Reads the parsed config.json of a checkpoint, in the layout of transformers 4 or 5.

        Args:
          config: the parsed config.json.
          generation_config: the parsed generation_config.json; its `eos_token_id` wins over config.json's, as in transformers.
          ignore_keys: keys of config.json that are known not to matter; "rope_scaling.attn_factor" is one setting in a block.

        Raises:
          ValueError: a missing, unknown or unsupported key, or numbers that do not fit together.
        """
        ignored = set(ignore_keys)
        config = _without_settings(config, ignored)
        family = find_family(config)
        _check_keys(config, family, ignored)
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ValueError(f"hidden_act {activation!r} is not supported; all families here use 'silu'")

        def value(key: str, default: Any = None) -> Any:
            return config.get(key, family.defaults.get(key, default))

        heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
        kv_heads, head_dim = value("num_key_value_heads"), value("head_dim")
        if head_dim is None:
            if config["hidden_size"] % heads:
                raise ValueError(f"hidden_size {config['hidden_size']} is no multiple of num_attention_heads {heads}")
            head_dim = config["hidden_size"] // heads
        attention_bias = bool(config.get("attention_bias", False))
        return LlamaConfig(
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=int(heads if kv_heads is None else kv_heads),
            head_dim=int(head_dim),
            model_type=family.model_type,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=int(value("max_position_embeddings", 2048)),
            rope=RopeConfig.from_config(config),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            out_bias=attention_bias if family.out_bias is None else family.out_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            sliding_windows=_sliding_windows(config, family, layers),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_eos_ids(config, generation_config or {}),
            checkpoint_dtype=config.get("dtype") or config.get("torch_dtype"),
        )


def _without_settings(config: Mapping[str, Any], ignored: set[str]) -> Mapping[str, Any]:
    """config.json without the settings in blocks that are to be ignored ("rope_scaling.attn_factor")."""
    for block, _, setting in (key.partition(".") for key in ignored):
        if setting and isinstance(config.get(block), Mapping):
            config = {**config, block: {k: v for k, v in config[block].items() if k != setting}}
    return config


def _check_keys(config: Mapping[str, Any], family: Family, ignored: set[str]) -> None:
    """Makes sure that every key of config.json has an effect, or is known to have none."""
    for key in ("quantization_config", "compression_config"):
        if (settings := config.get(key)) is not None:
            method = settings.get("quant_method", settings) if isinstance(settings, Mapping) else settings
            raise ValueError(
                f"the checkpoint is quantised ({method}), as its {key} says; load an unquantised or a GGUF checkpoint"
            )
    hint = "If they do not change the forward pass, pass ignore_config_keys="
    unknown = sorted({k for k in config if not k.startswith("_")} - _RELEVANT - IRRELEVANT_KEYS - ignored)
    if unknown:
        raise ValueError(f"config.json has keys that this library does not know: {unknown}. {hint}{unknown}")
    if on := sorted(key for key in _MUST_BE_OFF if config.get(key) and key not in ignored):
        raise ValueError(f"config.json has {', '.join(f'{k} {config[k]!r}' for k in on)}, which is not supported")
    # What another family reads and this one does not must say nothing.
    foreign = sorted(
        key
        for key in OWN_KEYS - family.own_keys - ignored
        if config.get(key) and not (key == "layer_types" and _attends_fully(config, family))
    )
    if foreign:
        raise ValueError(
            f"config.json has {', '.join(f'{k} {config[k]!r}' for k in foreign)}, which a model of type {family.model_type!r} "
            f"does not read. {hint}{foreign}"
        )
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if missing := [k for k in required if config.get(k) is None]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")


def _attends_fully(config: Mapping[str, Any], family: Family) -> bool:
    """Whether layer_types says of a family that does not read it what is true of it: that no layer has a window."""
    window = config.get("sliding_window", family.defaults.get("sliding_window"))
    return window is None and set(config["layer_types"]) == {"full_attention"}


def _sliding_windows(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, ...]:
    """The window of each layer, as transformers derives it; empty if there is none."""
    if "sliding_window" not in family.own_keys:
        return ()

    def value(key: str, default: Any) -> Any:
        read = config.get(key) if key in family.own_keys else None
        return family.defaults.get(key, default) if read is None else read

    # A window of null is no window; an absent one is the family's.
    size = config.get("sliding_window", family.defaults["sliding_window"])
    if not value("use_sliding_window", True):
        size = None
    first = value("max_window_layers", 0)
    types = value(
        "layer_types", ["full_attention" if size is None or i < first else "sliding_attention" for i in range(layers)]
    )
    if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"layer_types {types} must name full_attention or sliding_attention for each of {layers} layers"
        )
    if "sliding_attention" not in types:
        return ()
    if not isinstance(size, int) or isinstance(size, bool):
        raise ValueError(
            f"layer_types names sliding_attention, which needs an integer sliding_window and use_sliding_window; sliding_window "
            f"is {config.get('sliding_window')!r}, use_sliding_window {config.get('use_sliding_window', False)!r}"
        )
    return tuple(size if kind == "sliding_attention" else None for kind in types)


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
