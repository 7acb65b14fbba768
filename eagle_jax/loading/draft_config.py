"""The configuration of an EAGLE-3 head: geometry from its tensors, checked against config.json; variants from both."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from eagle_jax.loading.draft_names import RenamedSource
from eagle_jax.loading.errors import CheckpointError
from eagle_jax.models.config import IRRELEVANT_KEYS
from eagle_jax.models.eagle_config import DraftConfig, default_capture_layers
from eagle_jax.models.rope import RopeConfig

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

# Read below. The last row is about the target or about training: public heads carry these, and they change nothing here.
_RELEVANT = frozenset({
    "attention_bias", "bias", "draft_vocab_size", "eagle_config", "fc_norm", "head_dim", "hidden_act", "hidden_size",
    "intermediate_size", "layer_types", "mlp_bias", "norm_before_fc", "norm_before_residual", "norm_output",
    "num_attention_heads", "num_aux_hidden_states", "num_aux_layers", "num_key_value_heads", "partial_rotary_factor",
    "qkv_bias", "quantization_config", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window",
    "target_hidden_size", "use_aux_hidden_state", "use_sliding_window", "vocab_size", LAYER_IDS,
    "bos_token_id", "dtype", "eos_token_id", "max_position_embeddings", "max_window_layers", "model_type", "num_hidden_layers",
    "tie_word_embeddings", "torch_dtype",
})  # fmt: skip
_NESTED = frozenset({
    LAYER_IDS, "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "num_aux_hidden_states", "num_aux_layers",
    "use_aux_hidden_state",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetShape:
    """What a head must know of its target.

    `num_hidden_layers` is None where the target is not at hand: a head may be looked at then, but layers that its config.json
    does not name become the placeholders 0, 1, 2.
    """

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int | None


def draft_kind(source: RenamedSource) -> str:
    """What the tensors make of a checkpoint: "eagle3", "eagle" or "unknown"."""
    names = source.names()
    if "fc.weight" not in names or len(source.shape("fc.weight")) != 2:
        return "unknown"
    if "layers.0.hidden_norm.weight" in names or "d2t" in names:
        return "eagle3"
    rows, columns = source.shape("fc.weight")
    return "eagle" if columns == 2 * rows else "eagle3"


def guess_target(config: Mapping[str, Any]) -> TargetShape:
    """The target that a head's own config.json describes, for looking at a head without its target."""
    hidden = config.get("target_hidden_size") or config.get("hidden_size")
    if hidden is None or config.get("vocab_size") is None:
        raise CheckpointError("the head's config.json lacks hidden_size or vocab_size")
    return TargetShape(hidden_size=int(hidden), vocab_size=int(config["vocab_size"]), num_hidden_layers=None)


def named_capture_layers(config: Mapping[str, Any], source: RenamedSource) -> tuple[int, ...] | None:
    """The capture layers that a head's config.json names; None where they have to be guessed."""
    return HeadReader(config, source).capture_layers()


def read_draft_config(
    config: Mapping[str, Any],
    source: RenamedSource,
    target: TargetShape,
    *,
    own_embedding: bool,
    rope_theta: float | None = None,
) -> tuple[DraftConfig, list[str]]:
    """Derives the configuration of an EAGLE-3 head, and remarks about what had to be decided.

    Shapes come from the tensors, because published configs are known to be wrong about them; what config.json says of hidden
    sizes and heads must agree. `num_hidden_layers` is not read at all: layers are counted.

    Args:
      config: the head's parsed config.json.
      source: the head's tensors.
      target: the target it is loaded for.
      own_embedding: the head keeps an embedding of its own.
      rope_theta: rotary base that overrides the config's.

    Raises:
      CheckpointError: a head of another kind or target, a contradiction, or an unknown key.
    """
    reader = HeadReader(config, source)
    reader.check_keys()
    notes: list[str] = []
    hidden, features = reader.shape("fc.weight", 2)
    reader.check_target(target)
    reader.agree("hidden_size", hidden, "fc.weight")
    layer_ids = reader.capture_layers()
    states = len(layer_ids) if layer_ids is not None else reader.value("num_aux_hidden_states", "num_aux_layers") or 3
    if features != states * target.hidden_size:
        made_for = f" (a target of hidden size {features // states} would fit)" if features % states == 0 else ""
        raise CheckpointError(
            f"fc.weight takes {features} features, but {states} hidden states of this target are "
            f"{states} x {target.hidden_size} = {states * target.hidden_size}{made_for}"
        )
    if layer_ids is None:
        layer_ids = _guess_layers(states, target, notes)
    elif target.num_hidden_layers is not None and not all(0 <= i <= target.num_hidden_layers for i in layer_ids):
        raise CheckpointError(
            f"{LAYER_IDS} {list(layer_ids)} must lie in 0..{target.num_hidden_layers}, the number of layers of the target"
        )
    heads, kv_heads, head_dim = reader.attention()
    draft_vocab = reader.shape("lm_head.weight", 2)[0]
    if config.get("draft_vocab_size") not in (None, draft_vocab):
        notes.append(
            f"draft_vocab_size {config['draft_vocab_size']} of config.json is wrong: lm_head.weight has {draft_vocab} rows"
        )
    rope = reader.rope(rope_theta)
    try:
        made = DraftConfig(
            method="eagle3",
            hidden_size=hidden,
            target_hidden_size=target.hidden_size,
            intermediate_size=reader.intermediate_size(),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab,
            capture_layers=layer_ids,
            num_hidden_layers=reader.layers(),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=rope,
            qkv_bias=reader.qkv_bias(),
            own_embedding=own_embedding,
            norm_before_residual=bool(reader.value("norm_before_residual")),
            norm_before_fc=reader.norm("norm_before_fc", "input_norm.weight"),
            fc_norm=reader.norm("fc_norm", "fc_norm.0.weight"),
            norm_output=bool(reader.value("norm_output")),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return made, notes


def _guess_layers(states: int, target: TargetShape, notes: list[str]) -> tuple[int, ...]:
    if states != 3:
        raise CheckpointError(
            f"the head reads {states} hidden states of the target; its config.json must name them ({LAYER_IDS})"
        )
    if target.num_hidden_layers is None:
        notes.append(f"config.json has no {LAYER_IDS}: the capture layers depend on the depth of the target")
        return (0, 1, 2)
    try:
        layers = default_capture_layers(target.num_hidden_layers)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    notes.append(
        f"config.json has no {LAYER_IDS}: capture layers {list(layers)} are EAGLE-3's default for a target of "
        f"{target.num_hidden_layers} layers"
    )
    return layers


class HeadReader:
    """Looks up what a head's config.json and tensors say, and makes sure that they say the same."""

    def __init__(self, config: Mapping[str, Any], source: RenamedSource):
        self.config, self.source = config, source
        nested = config.get("eagle_config") or {}
        if not isinstance(nested, Mapping):
            raise CheckpointError(f"eagle_config must be an object, not {nested!r}")
        self.nested = nested
        self.names = set(source.names())

    def check_keys(self) -> None:
        """Raises on keys that are unknown, and on known ones that ask for something that is not computed."""
        config = self.config
        if "speculators_model_type" in config or "transformer_layer_config" in config:
            raise CheckpointError(
                "the head is in the speculators format (config.json has speculators_model_type or transformer_layer_config), "
                "which is not read yet; give a head in the EAGLE format"
            )
        if config.get("quantization_config") is not None:
            raise CheckpointError("the head is quantised (quantization_config), which is not supported")
        unknown = sorted({k for k in config if not k.startswith("_")} - _RELEVANT - IRRELEVANT_KEYS)
        unknown += sorted(f"eagle_config.{k}" for k in set(self.nested) - _NESTED)
        if unknown:
            raise CheckpointError(
                f"the head's config.json has keys that this library does not know: {', '.join(unknown)}"
            )
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise CheckpointError(f"hidden_act {config['hidden_act']!r} of the head is not supported; 'silu' is")
        if config.get("mlp_bias"):
            raise CheckpointError("mlp_bias of the head is not supported")
        if self.value("use_aux_hidden_state") is False:
            raise CheckpointError(
                "the head reads the last hidden state only (use_aux_hidden_state false), which is not supported"
            )
        windowed = config.get("sliding_window") is not None and config.get("use_sliding_window") is not False
        if windowed or any(t != "full_attention" for t in config.get("layer_types") or ()):
            raise CheckpointError("sliding-window attention in the head (sliding_window, layer_types) is not supported")

    def check_target(self, target: TargetShape) -> None:
        """Raises if config.json names a hidden size or vocabulary that the target does not have."""
        target_hidden = self.config.get("target_hidden_size")
        if target_hidden is not None and target_hidden != target.hidden_size:
            raise CheckpointError(
                f"the head was made for a target of hidden size {target_hidden} (target_hidden_size); this target's "
                f"hidden_size is {target.hidden_size}"
            )
        vocab = self.config.get("vocab_size")
        if vocab is not None and vocab != target.vocab_size:
            raise CheckpointError(
                f"the head was made for a target of vocabulary {vocab} (vocab_size); this target's vocab_size is "
                f"{target.vocab_size}"
            )

    def value(self, *keys: str) -> Any:
        """The value of a key at the top level or under eagle_config, under any of its names; None if absent."""
        found = {
            f"{where}{key}": part[key]
            for where, part in (("", self.config), ("eagle_config.", self.nested))
            for key in keys
            if part.get(key) is not None
        }
        values = list(found.values())
        if any(v != values[0] for v in values):
            raise CheckpointError(
                "config.json contradicts itself: " + ", ".join(f"{k} is {v}" for k, v in found.items())
            )
        return values[0] if values else None

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        """Shape of a tensor that must be there."""
        if name not in self.names:
            raise CheckpointError(f"the head lacks {name}, which every head of its kind has")
        shape = self.source.shape(name)
        if len(shape) != axes:
            raise CheckpointError(f"{self.source.stored_name(name)} has shape {shape}, but must have {axes} axes")
        return shape

    def agree(self, key: str, value: int, tensor: str) -> None:
        """Raises if config.json has another value of a key than a tensor shows."""
        if self.config.get(key) not in (None, value):
            raise CheckpointError(
                f"the head's {key} is {self.config[key]} in config.json, but {value} by the shape {self.source.shape(tensor)} of "
                f"{self.source.stored_name(tensor)}"
            )

    def capture_layers(self) -> tuple[int, ...] | None:
        """The layers named in config.json; None if it names none."""
        ids = self.value(LAYER_IDS)
        if ids is None:
            return None
        if not isinstance(ids, list | tuple) or not ids or not all(isinstance(i, int) for i in ids):
            raise CheckpointError(f"{LAYER_IDS} must be a list of layer numbers, not {ids!r}")
        count = self.value("num_aux_hidden_states", "num_aux_layers")
        if count not in (None, len(ids)):
            raise CheckpointError(
                f"config.json announces {count} auxiliary hidden states, but {LAYER_IDS} {ids} names {len(ids)}"
            )
        return tuple(ids)

    def attention(self) -> tuple[int, int, int]:
        """Query heads, key/value heads and width of a head."""
        heads = self.config.get("num_attention_heads")
        if heads is None:
            raise CheckpointError("the head's config.json lacks num_attention_heads")
        width = self.shape("layers.0.self_attn.o_proj.weight", 2)[1]
        if width % heads:
            raise CheckpointError(f"o_proj takes {width} channels, no multiple of num_attention_heads {heads}")
        head_dim = width // heads
        self.agree("head_dim", head_dim, "layers.0.self_attn.o_proj.weight")
        fused = "layers.0.self_attn.qkv_proj.weight"
        tensor = fused if fused in self.names else "layers.0.self_attn.k_proj.weight"
        rows = self.shape(tensor, 2)[0]
        keys, odd = divmod(rows - width, 2) if tensor == fused else (rows, 0)
        if odd or keys < head_dim or keys % head_dim:
            raise CheckpointError(
                f"{self.source.stored_name(tensor)} has {rows} rows, which do not divide into heads of {head_dim}"
            )
        kv_heads = keys // head_dim
        self.agree("num_key_value_heads", kv_heads, tensor)
        return heads, kv_heads, head_dim

    def intermediate_size(self) -> int:
        """Width of the MLP."""
        size = self.shape("layers.0.mlp.down_proj.weight", 2)[1]
        self.agree("intermediate_size", size, "layers.0.mlp.down_proj.weight")
        return size

    def layers(self) -> int:
        """Number of decoder layers among the tensors."""
        found = {int(m[1]) for name in self.names if (m := re.match(r"layers\.(\d+)\.", name))}
        if found != set(range(len(found))):
            raise CheckpointError(f"the head has layers {sorted(found)}, which are not numbered from 0 without gaps")
        return len(found)

    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases: the tensors say so, config.json must not deny it."""
        return self._present(self._any_bias(), "layers.0.self_attn.q_proj.bias", ("attention_bias", "qkv_bias"))

    def rope(self, theta: float | None) -> RopeConfig:
        """Rotary settings: the head's own, its base overridden by `theta` if that is given."""
        rope = RopeConfig.from_config(self.config)
        if rope.rope_type == "dynamic":
            raise CheckpointError(
                "rope type 'dynamic' is not supported for a draft head: its phases would depend on the prompt"
            )
        return rope if theta is None else dataclasses.replace(rope, theta=float(theta))

    def norm(self, flag: str, tensor: str) -> bool:
        """Whether an optional norm is there: its tensor says so, config.json must not deny it."""
        return self._present(tensor in self.names, tensor, (flag,))

    def _any_bias(self) -> bool:
        return any(re.search(r"self_attn\.(q|k|v|qkv)_proj\.bias$", name) for name in self.names)

    def _present(self, present: bool, tensor: str, keys: Iterable[str]) -> bool:
        for key in keys:
            said = self.value(key)
            if said is not None and bool(said) != present:
                raise CheckpointError(
                    f"config.json says {key} {said}, but the head {'has' if present else 'lacks'} the tensor "
                    f"{self.source.stored_name(tensor)}"
                )
        return present
