"""Writing a trained head in EAGLE's format, as published heads have it, and in that of speculators."""

import functools
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle_jax.loading.convert import convert_head
from eagle_jax.loading.draft_format import LAYER_IDS
from eagle_jax.loading.safetensors import write_safetensors
from eagle_jax.loading.tables import eagle1_table, eagle3_table
from eagle_jax.models import DraftConfig, LlamaConfig

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def head_tensors(
    config: DraftConfig, parameters: Mapping[str, Any], vocabulary: np.ndarray, dtype: np.dtype
) -> dict[str, np.ndarray]:
    """The tensors of a head under the names of EAGLE's format.

    Args:
      config: the head.
      parameters: its arrays by path (`eagle_jax.training.head.split_head`).
      vocabulary: target ids of the draft vocabulary, int32 `[Vd]`.
      dtype: of the weights.

    Returns:
      Weights, and where the vocabulary is a part of the target's, `d2t` (int64 offsets: draft id i is target id i + d2t[i]) and
      `t2d` (bool, which target ids can be drafted).
    """
    three = config.method == "eagle3"
    table = (eagle3_table if three else eagle1_table)(config, ())
    if missing := set(table) ^ set(parameters):
        raise ValueError(f"the head's parameters and its configuration disagree about {sorted(missing)}")
    out: dict[str, np.ndarray] = {}
    for path, pieces in table.items():
        values = np.asarray(parameters[path], np.float32).astype(dtype)
        start = 0
        for piece in pieces:
            name = piece.tensor
            if three and name.startswith("layers.0."):
                name = name.replace("layers.0.", "midlayer.", 1)
            out[name] = values[start : start + piece.shape[0]]
            start += piece.shape[0]
    if config.draft_vocab_size < config.vocab_size:
        ids = np.asarray(vocabulary, np.int64)
        out["d2t"] = ids - np.arange(len(ids))
        out["t2d"] = np.isin(np.arange(config.vocab_size), ids)
    return out


def head_config(config: DraftConfig, target: LlamaConfig, dtype: np.dtype) -> dict[str, Any]:
    """The config.json of a head in EAGLE's format, with everything spelled out that readers otherwise guess."""
    three = config.method == "eagle3"
    out: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if three else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_hidden_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": list(target.eos_token_ids) if len(target.eos_token_ids) != 1 else target.eos_token_ids[0],
        "torch_dtype": str(dtype),
    }
    if not three:
        return out | {"bias": config.fc_bias}
    out["draft_vocab_size"] = config.draft_vocab_size
    out |= {name: getattr(config, name) for name in _FLAGS}
    return out | {LAYER_IDS: list(config.capture_layers)}


def export_head(
    folder: Path,
    config: DraftConfig,
    target: LlamaConfig,
    parameters: Mapping[str, Any],
    vocabulary: np.ndarray,
    *,
    dtype: str = "bfloat16",
) -> Path:
    """Writes a head in EAGLE's format; an older one in the folder is replaced as a whole.

    Args:
      folder: with config.json and model.safetensors when done.
      config: the head; its rotary embedding must be the plain one, which the format says by its base alone.
      target: the model it is for.
      parameters: arrays by path.
      vocabulary: target ids, int32 `[Vd]`.
      dtype: of the weights in the file.
    """
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    tensors = head_tensors(config, parameters, vocabulary, kind)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_safetensors(
        partial / "model.safetensors",
        {name: (values.dtype, values.shape, functools.partial(np.asarray, values)) for name, values in tensors.items()},
    )
    text = json.dumps(head_config(config, target, kind), indent=2)
    (partial / "config.json").write_text(text + "\n", encoding="utf-8")
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(partial, folder)
    shutil.rmtree(old, ignore_errors=True)
    return folder


def export_speculators(
    head: Path, folder: Path, config: DraftConfig, *, verifier: str, num_speculative_tokens: int
) -> Path:
    """Writes a head of EAGLE's format in that of speculators; an older one in the folder is replaced."""
    partial = folder.with_name(folder.name + ".partial")
    for stale in (partial, folder):
        shutil.rmtree(stale, ignore_errors=True)
    convert_head(
        head,
        partial,
        to="speculators",
        verifier=verifier,
        num_speculative_tokens=num_speculative_tokens,
        layer_id_convention="input" if config.method == "eagle3" else None,
    )
    os.replace(partial, folder)
    return folder
