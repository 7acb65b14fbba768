"""Writing a head in EAGLE's format or in that of speculators, from either: the same values under other names."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.loading.draft import DraftPlan, open_draft, plan_draft
from eagle_jax.loading.draft_capture import Convention
from eagle_jax.loading.draft_config import EMBEDDING, LM_HEAD, guess_target
from eagle_jax.loading.draft_format import LAYER_IDS, Format, read_head_config
from eagle_jax.loading.draft_names import RenamedSource
from eagle_jax.loading.draft_reader import TargetShape
from eagle_jax.loading.errors import CheckpointError, about
from eagle_jax.loading.hub import resolve
from eagle_jax.loading.safetensors import write_safetensors
from eagle_jax.loading.target import plan_target
from eagle_jax.models import DraftConfig

FORMATS: tuple[Format, ...] = ("eagle", "speculators")
DEFAULT_SPECULATIVE_TOKENS = 5
"""What a file of speculators asks for where nothing else is said, as that library's own default."""

# Keys of a decoder's config.json that are written again as they are. Everything else that matters is in DraftConfig.
_KEPT = (
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters", "torch_dtype", "dtype", "use_cache",
)  # fmt: skip
_NORMS = {
    "eagle": {
        "embed_norm": "embed_layernorm",
        "feature_norm": "hidden_states_layernorm",
        "head_norm": "lm_head_layernorm",
    },
    "speculators": {"embed_norm": "embedding_layernorm", "head_norm": "pre_lm_head_layernorm", "fc": "fusion_fc"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """What `convert_head` wrote."""

    path: Path
    """The new folder, with config.json and model.safetensors."""
    format: Format
    method: str
    tensors: int
    notes: tuple[str, ...]
    """What the new format cannot say, or had to be assumed."""


def convert_head(
    path_or_repo: str | Path,
    output: str | Path,
    *,
    to: Format,
    verifier: str | None = None,
    num_speculative_tokens: int | None = None,
    target: str | Path | None = None,
    layer_id_convention: Convention | None = None,
    revision: str | None = None,
    download_dir: str | Path | None = None,
) -> Conversion:
    """Writes a head in another format; values and dtypes stay as they are, projections that are fused become separate.

    Args:
      path_or_repo: the head, in either format.
      output: a folder that does not exist yet, or an empty one.
      to: "eagle" (https://github.com/SafeAILab/EAGLE) or "speculators" (https://github.com/vllm-project/speculators).
      verifier: for "speculators", the target that the file shall name; None takes the one that the head names, else `target`.
      num_speculative_tokens: for "speculators", the chain that the file shall ask for; None takes the head's, else 5.
      target: the target that the head is for; only needed to tell which convention its layer numbers follow.
      layer_id_convention: as in `load_draft`.
      revision: branch, tag or commit of a repository.
      download_dir: where repositories are kept, instead of the hub's own cache.

    Raises:
      CheckpointError: a head that would not load, or that the format cannot express.
      ValueError: a wrong argument, or an output folder that is not empty.
    """
    if to not in FORMATS:
        raise ValueError(f"to must be one of {', '.join(map(repr, FORMATS))}, not {to!r}")
    if num_speculative_tokens is not None and num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens must be at least 1, not {num_speculative_tokens}")
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"output {folder} exists and is not an empty folder")
    source, raw = open_draft(resolve(path_or_repo, revision=revision, download_dir=download_dir))
    with about(f"draft head {path_or_repo}"):
        shape = guess_target(read_head_config(raw)) if target is None else _shape(target, download_dir)
        plan = plan_draft(source, raw, shape, layer_id_convention=layer_id_convention)
        plan.match.check()
        layer_ids = _layer_ids(plan, raw, layer_id_convention is not None or target is not None)
        notes: list[str] = []
        if to == "eagle":
            config = _eagle_config(plan, layer_ids)
            if plan.head.verifier is not None:
                notes.append(
                    f"EAGLE's format does not name the target ({plan.head.verifier}) or the number of tokens to draft "
                    f"({plan.head.num_speculative_tokens})"
                )
            if layer_ids is not None:
                notes.append(
                    f"{LAYER_IDS} {list(layer_ids)} are inputs of layers; load it with layer_id_convention='input'"
                )
        else:
            named = verifier or plan.head.verifier or (None if target is None else str(target))
            if named is None:
                raise CheckpointError("the speculators format names the target: give verifier, its repository or path")
            tokens = num_speculative_tokens or plan.head.num_speculative_tokens or DEFAULT_SPECULATIVE_TOKENS
            config = _speculators_config(plan, layer_ids, named, tokens)
        tensors = _tensors(plan, to)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return Conversion(
        path=folder, format=to, method=plan.config.method, tensors=len(tensors), notes=(*plan.guesses, *notes)
    )


def _shape(target: str | Path, download_dir: str | Path | None) -> TargetShape:
    config = plan_target(resolve(target, download_dir=download_dir)).config
    return TargetShape(
        hidden_size=config.hidden_size, vocab_size=config.vocab_size, num_hidden_layers=config.num_hidden_layers
    )


def _layer_ids(plan: DraftPlan, raw: Mapping[str, Any], certain: bool) -> tuple[int, ...] | None:
    """The capture layers to be written, as inputs of layers; None where the head takes the default or the last state."""
    if plan.config.method == "eagle" or not plan.capture.named:
        return None
    if plan.capture.guess is not None and not certain:
        raise CheckpointError(
            f"{plan.capture.origin}: whether these numbers are inputs or outputs of layers cannot be told; give "
            "layer_id_convention, or the target"
        )
    return plan.capture.layers


def _decoder(plan: DraftPlan) -> dict[str, Any]:
    """The keys of a decoder's config.json, which both formats have."""
    config, values = plan.config, plan.head.values
    out: dict[str, Any] = {
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_hidden_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }
    out |= {key: values[key] for key in _KEPT if values.get(key) is not None}
    if not {"rope_theta", "rope_parameters"} & out.keys():
        out["rope_theta"] = config.rope.theta  # silence means 10000 here, and other numbers elsewhere
    if config.sliding_windows:
        windows = {w for w in config.sliding_windows if w is not None}
        out["sliding_window"] = windows.pop()
        out["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in config.sliding_windows]
    return out


def _flags(config: DraftConfig) -> dict[str, Any]:
    """The switches of EAGLE-3, spelled out: what silence means differs from engine to engine."""
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {"draft_vocab_size": config.draft_vocab_size, **{name: getattr(config, name) for name in names}}


def _eagle_config(plan: DraftPlan, layer_ids: tuple[int, ...] | None) -> dict[str, Any]:
    config = plan.config
    three = config.method == "eagle3"
    out = {
        "architectures": ["LlamaForCausalLMEagle3" if three else "LlamaForCausalLM"],
        "model_type": "llama",
        **_decoder(plan),
    }
    if not three:
        return out | {"bias": config.fc_bias}
    out |= _flags(config)
    if config.hidden_size != config.target_hidden_size:
        out["target_hidden_size"] = config.target_hidden_size
    if not config.use_fc or plan.capture.last:
        out["eagle_config"] = {"use_aux_hidden_state": False}
    return out if layer_ids is None else out | {LAYER_IDS: list(layer_ids)}


def _speculators_config(
    plan: DraftPlan, layer_ids: tuple[int, ...] | None, verifier: str, tokens: int
) -> dict[str, Any]:
    config = plan.config
    three = config.method == "eagle3"
    layernorms = (config.embedding_norm, config.first_input_norm, config.head_norm)
    unsaid = {
        "use_aux_hidden_state false": three and (not config.use_fc or plan.capture.last),
        "several layers of an EAGLE-1/2 head": not three and config.num_hidden_layers > 1,
        "a norm of the feature": config.hidden_norm,
        "a final norm that is fed back": config.final_norm,
        "some of the three norms of `layernorms`, and not all": any(layernorms) and not all(layernorms),
    }
    if said := [what for what, there in unsaid.items() if there]:
        raise CheckpointError(f"the speculators format cannot express {said[0]}")
    layer = {"model_type": "qwen3" if config.qk_norm else "llama", **_decoder(plan)}
    if config.sliding_windows and config.qk_norm:
        layer["use_sliding_window"] = True
    out: dict[str, Any] = {
        "architectures": ["Eagle3Speculator" if three else "EagleSpeculator"],
        "speculators_model_type": config.method,
        "speculators_config": {
            "algorithm": config.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }
    out |= {key: layer[key] for key in ("torch_dtype", "dtype") if key in layer}
    if not three:
        return out | {"fusion_bias": config.fc_bias, "layernorms": all(layernorms)}
    width = config.target_hidden_size if config.target_hidden_size != config.hidden_size else None
    out |= _flags(config) | {"target_hidden_size": width}
    return out if layer_ids is None else out | {LAYER_IDS: list(layer_ids)}


def _tensors(plan: DraftPlan, to: Format) -> dict[str, tuple[np.dtype, tuple[int, ...], Callable[[], np.ndarray]]]:
    """dtype, shape and a reader of every tensor to be written, by its name in the format."""
    source, config = plan.source, plan.config
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    parts = {
        "qkv_proj": (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)),
        "gate_up_proj": (("gate_proj", config.intermediate_size), ("up_proj", config.intermediate_size)),
    }
    out = {}
    for name in (*plan.match.used, *plan.match.unused):
        if name.endswith("inv_freq"):
            continue
        block = name.split(".")[-2] if "." in name else ""
        start = 0
        for part, rows in parts.get(block, ((block, source.shape(name)[0]),)):
            shape = (rows, *source.shape(name)[1:])
            reader = _reader(source, name, start, start + rows)
            written = _name(name.replace(f".{block}.", f".{part}.") if block in parts else name, to, config.method)
            out[written] = (source.dtype(name), shape, reader)
            start += rows
    return out


def _reader(source: RenamedSource, name: str, start: int, stop: int) -> Callable[[], np.ndarray]:
    return lambda: source.read(name, (slice(start, stop),))


def _name(name: str, to: Format, method: str) -> str:
    """A canonical name in a format."""
    if method == "eagle3":
        return re.sub(r"^layers\.0\.", "midlayer.", name) if to == "eagle" else name
    if name in (EMBEDDING, LM_HEAD):
        return name
    stem, _, rest = name.partition(".")
    renamed = f"{_NORMS[to].get(stem, stem)}.{rest}"
    return re.sub(r"^layers\.0\.", "transformer.", renamed) if to == "speculators" else renamed
