"""What a head's config.json and its tensors say, looked up and compared with each other."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from eagle_jax.loading.draft_capture import Capture, Convention, last_state, named_layers
from eagle_jax.loading.draft_format import LAYER_IDS, HeadConfig
from eagle_jax.loading.draft_names import RenamedSource
from eagle_jax.loading.errors import CheckpointError, listed
from eagle_jax.models.config import IRRELEVANT_KEYS
from eagle_jax.models.rope import RopeConfig

# Read below. The last rows are about the target or about training: public heads carry these, and they change nothing here.
_RELEVANT = frozenset({
    "add_para_norm", "attention_bias", "bias", "draft_vocab_size", "eagle_config", "fc_norm", "fusion_bias", "head_dim",
    "hidden_act", "hidden_size", "intermediate_size", "layer_types", "layernorms", "max_window_layers", "mlp_bias", "model_type",
    "norm_before_fc", "norm_before_residual", "norm_output", "num_attention_heads", "num_aux_hidden_states", "num_aux_layers",
    "num_eagle_features", "num_hidden_layers", "num_key_value_heads", "partial_rotary_factor", "qkv_bias",
    "quantization_config", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window",
    "target_hidden_size", "target_layer_ids", "truncated_vocab_size", "use_aux_hidden_state", "use_sliding_window", "vocab_size",
    LAYER_IDS,
    "bos_token_id", "dtype", "eos_token_id", "max_position_embeddings", "tie_word_embeddings", "torch_dtype",
})  # fmt: skip
_NESTED = frozenset({
    LAYER_IDS, "fc_norm", "layer_ids", "next_layer_regular", "norm_before_fc", "norm_before_residual", "norm_output",
    "num_aux_hidden_states", "num_aux_layers", "parallel_draft_heads_num_layers", "parallel_draft_step", "target_layer_ids",
    "use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm",
})  # fmt: skip

_STATES = ("num_aux_hidden_states", "num_aux_layers", "num_eagle_features")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetShape:
    """What a head must know of its target.

    `num_hidden_layers` is None where the target is not at hand: a head may be looked at then, but layers that its config.json
    does not name become the placeholders 0, 1, 2.
    """

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int | None


class HeadReader:
    """Looks up what a head's config.json and tensors say, and makes sure that they say the same."""

    def __init__(self, config: HeadConfig, source: RenamedSource):
        self.head, self.config, self.source = config, config.values, source
        nested = self.config.get("eagle_config") or {}
        if not isinstance(nested, Mapping):
            raise CheckpointError(f"eagle_config must be an object, not {nested!r}")
        self.nested = nested
        self.names = set(source.names())

    def check_keys(self) -> None:
        """Raises on keys that are unknown, and on known ones that ask for something that is not computed."""
        config = self.config
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
        if "mask_hidden" in self.names or (self.nested.get("parallel_draft_step") or 1) != 1:
            raise CheckpointError("heads that draft in parallel (mask_hidden, parallel_draft_step) are not supported")
        if other := [key for key in ("rope_interleaved", "use_mrope") if config.get(key)]:
            raise CheckpointError(f"{other[0]} of the head is not supported")
        if self.nested.get("use_mtp_layernorm"):
            raise CheckpointError("use_mtp_layernorm of the head is not supported")
        if self.nested.get("next_layer_regular") is False:
            raise CheckpointError("next_layer_regular false, layers that all take the embedding, is not supported")

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
            raise CheckpointError(f"the head lacks {self.source.stored_name(name)}, which every head of its kind has")
        shape = self.source.shape(name)
        if len(shape) != axes:
            raise CheckpointError(f"{self.source.stored_name(name)} has shape {shape}, but must have {axes} axes")
        return shape

    def size(self, key: str, *votes: tuple[str, int], unit: int = 1) -> int:
        """A size of the head: what config.json says if a tensor confirms it, else what most tensors show.

        One tensor that is not as the others is left to be reported by its name and both shapes.

        Args:
          key: the size's key in config.json.
          votes: tensors, and their axes along which they show the size.
          unit: rows for 1 of the size.

        Raises:
          CheckpointError: none of the tensors is there, or config.json says something that none of them shows.
        """
        shown = [(t, self.source.shape(t)) for t, axis in votes if t in self.names and axis < len(self.source.shape(t))]
        if not shown:
            raise CheckpointError(
                f"the head lacks {self.source.stored_name(votes[0][0])}, which every head of its kind has"
            )
        axes = dict(votes)
        sizes = [shape[axes[tensor]] for tensor, shape in shown]
        said = self.config.get(key)
        if said is not None and said * unit in sizes:
            return int(said)
        most = max(sizes, key=sizes.count)
        tensor, shape = shown[sizes.index(most)]
        if most % unit:
            raise CheckpointError(
                f"{self.source.stored_name(tensor)} has shape {shape}, which does not divide into heads of {unit}"
            )
        if said is not None:
            raise CheckpointError(
                f"the head's {key} is {said} in config.json, but {most // unit} by the shape {shape} of "
                f"{self.source.stored_name(tensor)}"
            )
        return most // unit

    def capture(self, target_layers: int | None, convention: Convention | None) -> tuple[Capture | None, int]:
        """The hidden states that config.json names (None if it names none), and how many the head reads."""
        count = self.value(*_STATES)
        named = {
            key: found
            for key in (LAYER_IDS, "target_layer_ids", "layer_ids")
            if (found := self.value(key)) not in (None, [])
        }
        if self.value("use_aux_hidden_state") is False:
            if named or count not in (None, 1):
                said = {**named, **({} if count is None else {_STATES[0]: count})}
                raise CheckpointError(
                    f"config.json says use_aux_hidden_state false, one state alone, and names others: {said}"
                )
            return last_state(target_layers), 1
        captures = []
        for key, ids in named.items():
            # The first key is written in both conventions, unless speculators wrote it; the others have one each.
            given: Convention | None = {"target_layer_ids": "output", "layer_ids": "input"}.get(key)  # type: ignore[assignment]
            if key == LAYER_IDS:
                given = convention or ("input" if self.head.format == "speculators" else None)
            captures.append(named_layers(ids, key, given, target_layers))
        if not captures:
            return None, count or 3
        if any(c.layers != captures[0].layers for c in captures):
            raise CheckpointError(f"config.json contradicts itself about capture layers: {named}")
        states = len(captures[0].layers)
        if count not in (None, states):
            raise CheckpointError(
                f"config.json announces {count} auxiliary hidden states, but {next(iter(named))} "
                f"{next(iter(named.values()))} names {states}"
            )
        return captures[0], states

    def draft_vocabulary(self, target: TargetShape, own_lm_head: bool, notes: list[str]) -> int:
        """Rows of the output head, Vd."""
        said = self.value("draft_vocab_size", "truncated_vocab_size")
        if not own_lm_head:
            reduced = "d2t" in self.names and self.source.shape("d2t") != (target.vocab_size,)
            if "lm_head.weight" not in self.names and (reduced or said not in (None, target.vocab_size)):
                raise CheckpointError(
                    f"the head lacks {self.source.stored_name('lm_head.weight')}, which a head with a vocabulary of its own needs"
                )
            return target.vocab_size
        shown = [self.source.shape(name)[0] for name in ("lm_head.weight", "d2t") if name in self.names]
        rows = said if said in shown else shown[0]
        if said not in (None, rows):
            problem = f"draft_vocab_size {said} of config.json is wrong: lm_head.weight has {rows} rows"
            # Files of EAGLE's format are known to be wrong about it; the tensor, checked against d2t, is right.
            if self.head.format == "speculators":
                raise CheckpointError(problem)
            notes.append(problem)
        return rows

    def hidden_size(self) -> int:
        """Width of the head, h."""
        names = ("self_attn.o_proj.weight", "post_attention_layernorm.weight", "mlp.down_proj.weight")
        return self.size("hidden_size", ("fc.weight", 0), *((f"layers.0.{name}", 0) for name in names))

    def attention(self) -> tuple[int, int, int]:
        """Query heads, key/value heads and width of a head."""
        heads = self.config.get("num_attention_heads")
        if heads is None:
            raise CheckpointError("the head's config.json lacks num_attention_heads")
        block = "layers.0.self_attn"
        queries = ((f"{block}.o_proj.weight", 1), (f"{block}.q_proj.weight", 0))
        shown = [
            self.source.shape(n)[axis] for n, axis in queries if n in self.names and len(self.source.shape(n)) == 2
        ]
        if shown and shown[0] % heads and shown[-1] % heads:
            raise CheckpointError(
                f"{self.source.stored_name(queries[0][0])} takes {shown[0]} channels, no multiple of num_attention_heads {heads}"
            )
        head_dim = self.size("head_dim", *queries, unit=heads)
        if f"{block}.qkv_proj.weight" not in self.names:
            kv = ((f"{block}.k_proj.weight", 0), (f"{block}.v_proj.weight", 0))
            return heads, self.size("num_key_value_heads", *kv, unit=head_dim), head_dim
        fused = f"{block}.qkv_proj.weight"
        kv_heads, odd = divmod(self.shape(fused, 2)[0] - heads * head_dim, 2 * head_dim)
        if odd or kv_heads < 1 or self.config.get("num_key_value_heads") not in (None, kv_heads):
            raise CheckpointError(
                f"{self.source.stored_name(fused)} has shape {self.source.shape(fused)}, which does not hold {heads} query heads "
                f"and {self.config.get('num_key_value_heads')} key and value heads of {head_dim}"
            )
        return heads, kv_heads, head_dim

    def intermediate_size(self) -> int:
        """Width of the MLP."""
        votes = (("down_proj", 1), ("gate_proj", 0), ("up_proj", 0))
        return self.size("intermediate_size", *((f"layers.0.mlp.{name}.weight", axis) for name, axis in votes))

    def layers(self) -> int:
        """Number of decoder layers among the tensors."""
        found = {int(m[1]) for name in self.names if (m := re.match(r"layers\.(\d+)\.", name))}
        if found != set(range(len(found))):
            raise CheckpointError(f"the head has layers {sorted(found)}, which are not numbered from 0 without gaps")
        said = self.config.get("num_hidden_layers")
        if self.head.format == "speculators" and said not in (None, len(found)):
            raise CheckpointError(
                f"transformer_layer_config.num_hidden_layers is {said}, but the head has tensors of {len(found)} layers"
            )
        return len(found)

    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases: the tensors say so, config.json must not deny it."""
        found = self.any_tensor(r"self_attn\.(q|k|v|qkv)_proj\.bias$")
        return self._present(found, "layers.0.self_attn.q_proj.bias", ("attention_bias", "qkv_bias"))

    def qk_norm(self) -> bool:
        """Whether queries and keys are normed, as in layers of Qwen3: the tensors say so."""
        found = self.any_tensor(r"self_attn\.[qk]_norm\.weight$")
        family = self.config.get("model_type")
        # In EAGLE's format model_type may be the target's; speculators builds the layers that it names.
        if self.head.format == "speculators" and family in ("llama", "qwen3") and found != (family == "qwen3"):
            tensor = self.source.stored_name("layers.0.self_attn.q_norm.weight")
            raise CheckpointError(
                f"transformer_layer_config has model_type {family!r}, but the head {'has' if found else 'lacks'} {tensor}"
            )
        return found

    def mlp_bias(self) -> bool:
        """Whether the MLP has biases: the tensors say so, config.json must not deny it."""
        found = self.any_tensor(r"mlp\.(gate|up|gate_up|down)_proj\.bias$")
        return self._present(found, "layers.0.mlp.gate_proj.bias", ("mlp_bias",))

    def sliding_windows(self, layers: int) -> tuple[int | None, ...]:
        """Attention window of each layer; empty if none has one."""
        window, used = self.config.get("sliding_window"), self.config.get("use_sliding_window")
        types, family = self.config.get("layer_types"), self.config.get("model_type")
        if types is None and window is not None and used is not False:
            if family == "mistral":
                types = ["sliding_attention"] * layers
            elif family in ("qwen2", "qwen3"):
                # These windows are off unless asked for, and begin at layer max_window_layers.
                first = self.config.get("max_window_layers", 28) if used else layers
                types = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
            else:
                raise CheckpointError(
                    f"sliding_window {window} of the head's config.json does not say in which layers; layer_types would"
                )
        if types is None:
            return ()
        if unknown := sorted({str(t) for t in types} - {"full_attention", "sliding_attention"}):
            raise CheckpointError(f"layer_types of the head has {listed(unknown)}, which is not supported")
        if len(types) != layers:
            raise CheckpointError(
                f"layer_types {list(types)} must have one entry for each of the head's {layers} layers"
            )
        if "sliding_attention" not in types:
            return ()
        if used is False or isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise CheckpointError(
                f"layer_types {list(types)} needs a sliding_window of at least 1; config.json has sliding_window {window}, "
                f"use_sliding_window {used}"
            )
        return tuple(window if t == "sliding_attention" else None for t in types)

    def rms_norm_eps(self) -> float:
        """Epsilon of every norm; where config.json has none, that of its configuration class."""
        eps = self.config.get("rms_norm_eps")
        if eps is not None and (isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < 1):
            raise CheckpointError(f"rms_norm_eps of the head must be a small number, not {eps!r}")
        return 1e-6 if eps is None else float(eps)

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

    def check_tensor(self, flag: str, tensor: str) -> None:
        """Raises if config.json has a flag that disagrees with the presence of its tensor."""
        self._present(tensor in self.names, tensor, (flag,))

    def any_tensor(self, pattern: str) -> bool:
        """Whether the name of any tensor matches."""
        return any(re.search(pattern, name) for name in self.names)

    def _present(self, present: bool, tensor: str, keys: Iterable[str]) -> bool:
        for key in keys:
            said = self.value(key)
            if said is not None and bool(said) != present:
                raise CheckpointError(
                    f"config.json says {key} {said}, but the head {'has' if present else 'lacks'} the tensor "
                    f"{self.source.stored_name(tensor)}"
                )
        return present
