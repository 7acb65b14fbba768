"""Heads as they are published: configuration, tensor names, dtype and file layout of public repositories, scaled down.

Each row gives the numbers of the public config.json. `write` divides widths by 64, vocabularies by 800 and the number of
attention heads by 4 (or what the row says), so that proportions stay, and writes the checkpoint with random weights as that
repository has it. Where a configuration was not available in full, the row says what of it is known.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from checkpoint_files import random_target
from safetensors.torch import save_file
from support.torch_heads import Reading, Tensors

from eagle_jax import Target

WIDTH, VOCABULARY = 64, 800
IDS = "eagle_aux_hidden_state_layer_ids"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A published head."""

    repository: str
    config: dict[str, Any]
    """Its config.json, in true numbers."""
    method: str = "eagle3"
    dtype: torch.dtype = torch.float16
    container: str = "pytorch_model.bin"
    rename: Callable[[Tensors], Tensors] = dict
    """From SafeAILab's names to the repository's."""
    states: int = 3
    target_layers: int = 32
    capture: tuple[int, ...] | None = None
    """Hidden states it reads; None: the last one."""
    embedding: str = "absent"
    """"target" (a copy of the target's), "own" or "absent"."""
    draft_vocab: int | None = None
    """True rows of lm_head, where config.json is wrong about them."""
    extra: tuple[str, ...] = ()
    """Optional tensors, by name."""
    layers: int = 1
    reading: dict[str, Any] = dataclasses.field(default_factory=dict)
    """How the configuration is to be understood, where it departs from the plain head."""
    heads_divisor: int = 4
    dim_divisor: int = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """A checkpoint on disk and what it means."""

    folder: Path
    tensors: Tensors
    """Under SafeAILab's names."""
    reading: Reading
    hidden: int
    target_hidden: int
    vocab: int
    draft_vocab: int


def scaled(config: dict[str, Any], row: Row) -> dict[str, Any]:
    """A decoder's configuration with smaller numbers."""
    out = dict(config)
    for key, by in (
        ("hidden_size", WIDTH),
        ("target_hidden_size", WIDTH),
        ("intermediate_size", WIDTH),
        ("vocab_size", VOCABULARY),
        ("draft_vocab_size", VOCABULARY),
        ("truncated_vocab_size", VOCABULARY),
        ("num_attention_heads", row.heads_divisor),
        ("num_key_value_heads", row.heads_divisor),
        ("head_dim", row.dim_divisor),
        ("sliding_window", 512),
    ):
        if isinstance(out.get(key), int):
            out[key] //= by
    return out


def write(row: Row, folder: Path, target_embedding: np.ndarray | None = None, seed: int = 0) -> Written:
    """Writes the row's checkpoint into a new folder.

    Args:
      row: what to write.
      folder: where to.
      target_embedding: table of the target, for rows that store a copy of it.
      seed: of the weights.
    """
    top = dict(row.config)
    nested = "transformer_layer_config" in top
    layer = scaled(top["transformer_layer_config"] if nested else top, row)
    config = scaled(top, row) | {"transformer_layer_config": layer} if nested else layer
    heads = layer["num_attention_heads"]
    kv_heads = layer.get("num_key_value_heads", heads)
    hidden = layer["hidden_size"]
    target_hidden = config.get("target_hidden_size") or hidden
    vocab = layer["vocab_size"]
    said = config.get("draft_vocab_size") or config.get("truncated_vocab_size") or vocab
    draft_vocab = row.draft_vocab // VOCABULARY if row.draft_vocab else said
    size = Sizes(
        hidden=hidden,
        inner=layer["intermediate_size"],
        heads=heads,
        kv_heads=kv_heads,
        dim=layer.get("head_dim", hidden // heads),
        target_hidden=target_hidden,
        vocab=vocab,
        draft_vocab=draft_vocab,
    )
    tensors = make_tensors(row, size, seed)
    if row.embedding == "target":
        assert target_embedding is not None
        tensors["embed_tokens.weight"] = torch.from_numpy(target_embedding)
    elif row.embedding == "own":
        tensors["embed_tokens.weight"] = torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(seed + 1))
    tensors = {n: t.to(row.dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    stored = row.rename(dict(tensors))
    if row.container.endswith(".bin"):
        torch.save(stored, folder / row.container)
    else:
        save_file({n: t.contiguous() for n, t in stored.items()}, folder / row.container)
    rope = layer.get("rope_theta", 10000.0)
    reading = {"theta": rope, "eps": layer["rms_norm_eps"]} | row.reading
    return Written(
        folder=folder,
        tensors=tensors,
        reading=Reading(method=row.method, heads=heads, kv_heads=kv_heads, **reading),
        hidden=hidden,
        target_hidden=target_hidden,
        vocab=vocab,
        draft_vocab=draft_vocab,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Geometry of a head."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    target_hidden: int
    vocab: int
    draft_vocab: int


def make_tensors(row: Row, size: Sizes, seed: int) -> Tensors:
    """Random float32 tensors under SafeAILab's names."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (gain * shape[-1] ** -0.5 if len(shape) > 1 else 0.3)

    three, hidden = row.method == "eagle3", size.hidden
    gain = 1.5 if three else 0.8  # EAGLE-1/2 does not norm what goes into the output head
    tensors: Tensors = {}
    fc_inputs = row.states * size.target_hidden if three else 2 * hidden
    if row.states:
        tensors["fc.weight"] = random(hidden, fc_inputs)
    if three:
        tensors |= {"norm.weight": 1 + random(hidden), "lm_head.weight": random(size.draft_vocab, hidden)}
        tensors["midlayer.hidden_norm.weight"] = 1 + random(hidden)
        if size.draft_vocab < size.vocab:
            ids = torch.randperm(size.vocab, generator=generator)[: size.draft_vocab].sort().values
            tensors["d2t"] = ids - torch.arange(size.draft_vocab)
            tensors["t2d"] = torch.zeros(size.vocab, dtype=torch.bool).index_fill(0, ids, True)
    for i in range(row.layers):
        layer = "midlayer" if three and i == 0 else f"layers.{i}"
        width = 2 * hidden if layer == "midlayer" else hidden
        if three or i:
            tensors[f"{layer}.input_layernorm.weight"] = 1 + random(hidden)
        tensors[f"{layer}.post_attention_layernorm.weight"] = 1 + random(hidden)
        for part, rows in (("q", size.heads), ("k", size.kv_heads), ("v", size.kv_heads)):
            tensors[f"{layer}.self_attn.{part}_proj.weight"] = random(rows * size.dim, width)
        tensors[f"{layer}.self_attn.o_proj.weight"] = random(hidden, size.heads * size.dim)
        tensors[f"{layer}.mlp.gate_proj.weight"] = random(size.inner, hidden)
        tensors[f"{layer}.mlp.up_proj.weight"] = random(size.inner, hidden)
        tensors[f"{layer}.mlp.down_proj.weight"] = random(hidden, size.inner)
    queries, keys = size.heads * size.dim, size.kv_heads * size.dim
    widths = {"fc_norm": size.target_hidden, "q_norm": size.dim, "k_norm": size.dim, "q_proj": queries, "k_proj": keys}
    widths |= {"v_proj": keys, "input_norm": fc_inputs, "gate_proj": size.inner, "up_proj": size.inner}
    for name in row.extra:
        if name == "zero map":
            tensors["d2t"] = torch.zeros(size.draft_vocab, dtype=torch.int64)
            tensors["t2d"] = torch.ones(size.vocab, dtype=torch.bool)
        else:
            width = next((w for part, w in widths.items() if part in name.split(".")), hidden)
            tensors[name] = (0 if name.endswith("bias") else 1) + random(width)
    return tensors


def numbered(tensors: Tensors) -> Tensors:
    """As `layers.0.` instead of `midlayer.`."""
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def prefixed(tensors: Tensors) -> Tensors:
    """As engines store them: `model.` before all but the output head and the map, which has its long name."""
    apart = {"lm_head.weight": "lm_head.weight", "d2t": "draft_id_to_target_id", "t2d": "t2d"}
    return {apart.get(name, f"model.{name}"): tensor for name, tensor in numbered(tensors).items()}


def fused(tensors: Tensors) -> Tensors:
    """With q, k, v in one projection, and gate and up in one."""
    out = dict(tensors)
    for layer in ("midlayer", "layers.0", "layers.1"):
        for parts, whole in ((("q", "k", "v"), "self_attn.qkv_proj"), (("gate", "up"), "mlp.gate_up_proj")):
            block, name = whole.split(".")
            for kind in ("weight", "bias"):
                found = [out.pop(f"{layer}.{block}.{p}_proj.{kind}", None) for p in parts]
                if found[0] is not None:
                    out[f"{layer}.{block}.{name}.{kind}"] = torch.cat(found)
    return out


def speculators_v1(tensors: Tensors) -> Tensors:
    """The first form of speculators."""
    names = {
        "embed_layernorm.weight": "embedding_layernorm.weight",
        "lm_head_layernorm.weight": "pre_lm_head_layernorm.weight",
    }
    return {
        names.get(name, name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer.")): tensor
        for name, tensor in tensors.items()
    }


def mistral_native(tensors: Tensors) -> Tensors:
    """`eagle_linear`, as Mistral calls `fc`."""
    return {name.replace("fc.", "eagle_linear."): tensor for name, tensor in tensors.items()}


def decoder(
    hidden: int, inner: int, heads: int, kv_heads: int | None, vocab: int, eps: float = 1e-5, **others: Any
) -> dict[str, Any]:
    """The keys that every config.json has."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": eps,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": vocab,
    } | others
    return config if kv_heads is None else config | {"num_key_value_heads": kv_heads}


LLAMA3 = {"bos_token_id": 128000, "eos_token_id": 128001, "pad_token_id": 0}
SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "bfloat16", "transformers_version": "4.53.0"}
BF16 = {"dtype": torch.bfloat16, "container": "model.safetensors"}


def speculators(kind: str, layer: dict[str, Any], tokens: int = 3, **top: Any) -> dict[str, Any]:
    """A config.json of speculators around a decoder's."""
    return {
        "architectures": [{"eagle3": "Eagle3Speculator", "eagle": "EagleSpeculator"}[kind]],
        "auto_map": {"": f"config.{kind.capitalize()}SpeculatorConfig"},
        "has_no_defaults_at_init": False,
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]},
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": {k: v for k, v in layer.items() if k != "architectures"},
        "transformers_version": "4.56.1",
    } | top


def eagle1(repository: str, config: dict[str, Any], **others: Any) -> Row:
    return Row(repository=repository, config=config, **({"method": "eagle", "embedding": "target"} | others))


BIAS = {"extra": ("fc.bias",)}
"""config.json has no `bias`, whose default is true."""
QKV = tuple(f"layers.0.self_attn.{part}_proj.bias" for part in "qkv")
GPT_OSS = decoder(2880, 17280, 64, 8, 201088, head_dim=64, rope_theta=150000.0, **SPECFORGE, draft_vocab_size=32000)
QWEN3_8B = decoder(4096, 12288, 32, 8, 151936, 1e-6, head_dim=128, rope_theta=1e6)

ROWS = (
    eagle1("yuhuili/EAGLE-Vicuna-7B-v1.3", decoder(4096, 11008, 32, None, 32000, 1e-6, pad_token_id=0), **BIAS),
    eagle1("yuhuili/EAGLE-Vicuna-13B-v1.3", decoder(5120, 13824, 40, None, 32000, 1e-6, pad_token_id=0), **BIAS),
    eagle1(
        "yuhuili/EAGLE-Vicuna-33B-v1.3",
        {k: v for k, v in decoder(6656, 17920, 52, 13, 32000, 1e-6).items() if k != "max_position_embeddings"}
        | {"max_sequence_length": 2048},
        heads_divisor=13,
        **BIAS,
    ),
    eagle1(
        "yuhuili/EAGLE-llama2-chat-7B",
        decoder(4096, 11008, 32, 32, 32000, 1e-6, pretraining_tp=1, rope_scaling=None),
        dtype=torch.float32,  # 1.4 GB for 0.24 billion parameters and an embedding
        **BIAS,
    ),
    eagle1("yuhuili/EAGLE-llama2-chat-13B", decoder(5120, 13824, 40, 40, 32000, pretraining_tp=1), **BIAS),
    eagle1("yuhuili/EAGLE-llama2-chat-70B", decoder(8192, 28672, 64, 8, 32000, pretraining_tp=1), **BIAS),
    eagle1(
        "yuhuili/EAGLE-mixtral-instruct-8x7B", decoder(4096, 14336, 32, 32, 32000, 1e-6, model_type="mixtral"), **BIAS
    ),
    eagle1(
        "yuhuili/EAGLE-LLaMA3-Instruct-8B",
        decoder(4096, 14336, 32, 8, 128256, bias=False, rope_theta=500000.0, **LLAMA3),
    ),
    eagle1(
        "yuhuili/EAGLE-LLaMA3-Instruct-70B",
        decoder(8192, 28672, 64, 8, 128256, bias=False, rope_theta=500000.0, **LLAMA3),
        target_layers=80,
    ),
    # Its config.json is known only to be of the EAGLE-1 kind.
    eagle1("yuhuili/EAGLE-LLaMA3.1-Instruct-8B", decoder(4096, 14336, 32, 8, 128256, bias=False, **LLAMA3)),
    # vocab_size and key/value heads were inferred from sizes.
    eagle1(
        "yuhuili/EAGLE-Qwen2-7B-Instruct",
        decoder(3584, 18944, 28, 28, 152064, 1e-6, model_type="qwen2", qkv_bias=True, torch_dtype="bfloat16"),
        dtype=torch.bfloat16,
        extra=("fc.bias", *QKV),
        target_layers=28,
    ),
    # HASS trains EAGLE-2's architecture: the same keys.
    eagle1("HArmonizedSS/HASS-LLaMA3-Instruct-8B", decoder(4096, 14336, 32, 8, 128256, bias=False, **LLAMA3)),
    # Mistral's own family: fc is called eagle_linear, layer 0 keeps its norm, and a final norm is fed back.
    eagle1(
        "mistral, as engines read it",
        decoder(4096, 14336, 32, 8, 32768, model_type="mistral", rope_theta=1e6, sliding_window=None),
        extra=("layers.0.input_layernorm.weight", "norm.weight"),
        embedding="absent",
        rename=mistral_native,
        **BF16,
    ),
    Row(
        repository="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        config=decoder(4096, 14336, 32, 8, 128256, draft_vocab_size=32000, **LLAMA3),
        capture=(2, 16, 29),
    ),
    Row(
        repository="yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
        config=decoder(4096, 14336, 32, 8, 128256, draft_vocab_size=128256, **LLAMA3),
        draft_vocab=32000,
        capture=(2, 16, 29),
    ),
    # A width of 6144 is recalled, not verified; that it is smaller than the target's is.
    Row(
        repository="yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
        config=decoder(6144, 16384, 48, 8, 128256, draft_vocab_size=32000, target_hidden_size=8192, **LLAMA3),
        embedding="own",
        target_layers=80,
        capture=(2, 40, 77),
    ),
    Row(
        repository="yuhuili/EAGLE3-Vicuna1.3-13B",
        config=decoder(5120, 13824, 40, 40, 32000, 1e-6, draft_vocab_size=32000, num_hidden_layers=40),
        extra=("zero map",),
        target_layers=40,
        capture=(2, 20, 37),
    ),
    Row(
        repository="SpecForge, llama3-8B-eagle3",
        config=decoder(4096, 14336, 32, 8, 128256, draft_vocab_size=32000, pretraining_tp=1, **LLAMA3) | SPECFORGE,
        capture=(2, 16, 29),
        **BF16,
    ),
    Row(
        repository="SpecForge, qwen3-32B-eagle3",
        config=decoder(5120, 25600, 64, 8, 151936, 1e-6, head_dim=128, rope_theta=1e6, draft_vocab_size=32000)
        | SPECFORGE
        | {"attention_bias": False, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False}
        | {"max_window_layers": 64, "attention_dropout": 0.0},
        target_layers=64,
        capture=(2, 32, 61),
        **BF16,
    ),
    Row(
        repository="AngelSlim/Qwen3-4B_eagle3",
        config=decoder(2560, 9728, 32, 8, 151936, 1e-6, head_dim=128, rope_theta=1e6, draft_vocab_size=32000)
        | {"architectures": ["Eagle3LlamaForCausalLM"]},
        target_layers=36,
        capture=(2, 18, 33),
    ),
    Row(
        repository="AQ-MedAI/Kimi-K2-Instruct-eagle3",
        config=decoder(7168, 18432, 64, 64, 163840, 1e-6, head_dim=128, rope_theta=1e6, draft_vocab_size=32000)
        | SPECFORGE
        | {"eagle_config": {IDS: [2, 30, 58], "use_aux_hidden_state": True}},
        target_layers=61,
        capture=(2, 30, 58),
        **BF16,
    ),
    Row(
        repository="MiniCPM4-8B eagle3",
        config=decoder(4096, 16384, 32, 2, 73448, 1e-6, rope_theta=1e4, draft_vocab_size=15000),
        heads_divisor=2,
        capture=(2, 16, 29),
    ),
    Row(
        repository="lmsys/DeepSeek-V3 eagle3",
        config=decoder(7168, 18432, 56, 8, 129280, 1e-6, draft_vocab_size=32000)
        | SPECFORGE
        | {"eagle_config": {IDS: [1, 29, 57], "use_aux_hidden_state": True}},
        target_layers=61,
        capture=(2, 30, 58),
        **BF16,
    ),
    Row(
        repository="nvidia/gpt-oss-120b-Eagle3",
        config=GPT_OSS
        | {
            "eagle_config": {
                IDS: [1, 17, 33],
                "next_layer_regular": True,
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
            }
        },
        target_layers=36,
        capture=(2, 18, 34),
        **BF16,
    ),
    Row(
        repository="nvidia/gpt-oss-120b-Eagle3-v2",
        config=GPT_OSS
        | {
            "eagle_config": {
                IDS: [],
                "use_aux_hidden_state": False,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
            }
        },
        states=0,
        target_layers=36,
        **BF16,
    ),
    # Named so by the tests of other engines; its yarn factor and context are representative.
    Row(
        repository="nebius/EAGLE3-gpt-oss-20b",
        config={k: v for k, v in GPT_OSS.items() if k != "draft_vocab_size"}
        | {
            "architectures": ["LlamaForCausalLM"],
            "truncated_vocab_size": 32000,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        },
        reading={"yarn": (32.0, 4096)},
        target_layers=24,
        capture=(2, 12, 21),
        **BF16,
    ),
    Row(
        repository="thoughtworks (SpecJAX), Llama-3.1-8B",
        config=decoder(4096, 14336, 32, 8, 128256, rope_theta=500000.0, draft_vocab_size=32000) | SPECFORGE,
        capture=(2, 16, 29),
        **BF16,
    ),
    Row(
        repository="two layers, model. prefix, long map name",
        config=decoder(4096, 14336, 32, 8, 151936, draft_vocab_size=32000, num_hidden_layers=2) | SPECFORGE,
        rename=prefixed,
        layers=2,
        capture=(2, 16, 29),
        **BF16,
    ),
    Row(
        repository="RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
        config=speculators(
            "eagle3",
            decoder(4096, 14336, 32, 8, 128256, rope_theta=500000.0, attention_bias=False, mlp_bias=False),
            draft_vocab_size=32000,
            norm_before_residual=True,
            target_hidden_size=None,
        ),
        embedding="target",
        rename=numbered,
        reading={"norm_before_residual": True},
        capture=(2, 16, 29),
        **BF16,
    ),
    Row(
        repository="RedHatAI/Qwen3-8B-speculator.eagle3",
        config=speculators(
            "eagle3",
            QWEN3_8B | {IDS: [2, 18, 33]},
            draft_vocab_size=32000,
            norm_before_residual=True,
            **{IDS: [2, 18, 33]},
        ),
        embedding="target",
        rename=numbered,
        reading={"norm_before_residual": True},
        target_layers=36,
        capture=(2, 18, 33),
        **BF16,
    ),
    Row(
        repository="RedHatAI/gpt-oss-20b-speculator.eagle3",
        config=speculators(
            "eagle3",
            decoder(2880, 2880, 64, 8, 201088, head_dim=64, rope_theta=10000.0),
            draft_vocab_size=64000,
            norm_before_fc=True,
            norm_before_residual=True,
        )
        | {"architectures": ["Eagle3DraftModel"]},
        extra=("input_norm.weight",),
        rename=numbered,
        reading={"norm_before_residual": True},
        target_layers=24,
        capture=(2, 12, 21),
        **BF16,
    ),
    # What the trainer of speculators makes by default since EAGLE-3.1.
    Row(
        repository="speculators, EAGLE-3.1 of Qwen3 layers",
        config=speculators(
            "eagle3",
            QWEN3_8B
            | {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2, "sliding_window": 2048}
            | {"use_sliding_window": True, "num_hidden_layers": 2},
            draft_vocab_size=32000,
            norm_before_residual=True,
            norm_before_fc=True,
            norm_output=True,
            embed_requires_grad=False,
            **{IDS: [2, 18, 33]},
        ),
        extra=(
            "input_norm.weight",
            *(f"{p}.self_attn.{n}_norm.weight" for p in ("midlayer", "layers.1") for n in "qk"),
        ),
        rename=numbered,
        layers=2,
        reading={"norm_before_residual": True, "norm_output": True, "windows": (4, 4)},
        target_layers=36,
        capture=(2, 18, 33),
        **BF16,
    ),
    Row(
        repository="speculators, fc_norm, silent about norm_before_residual",
        config=speculators("eagle3", decoder(4096, 14336, 32, 8, 128256), draft_vocab_size=32000, fc_norm=True),
        extra=tuple(f"fc_norm.{i}.weight" for i in range(3)),
        rename=lambda tensors: numbered(fused(tensors)),
        reading={"norm_before_residual": True},
        capture=(2, 16, 29),
        **BF16,
    ),
    eagle1(
        "speculators, converted EAGLE-LLaMA3.1-8B",
        speculators("eagle", decoder(4096, 14336, 32, 8, 128256), 5, fusion_bias=False, layernorms=False),
        embedding="absent",
        rename=speculators_v1,
        **BF16,
    ),
    eagle1(
        "speculators, converted HASS head",
        speculators(
            "eagle",
            decoder(4096, 14336, 32, 8, 128256),
            5,
            fusion_bias=True,
            layernorms=True,
            transformer_layer_architecture="LlamaDecoderLayer",
        ),
        embedding="absent",
        extra=("fc.bias", "embed_layernorm.weight", "layers.0.input_layernorm.weight", "lm_head_layernorm.weight"),
        rename=speculators_v1,
        **BF16,
    ),
)


@functools.cache
def small_target(hidden: int, vocab: int) -> Target:
    target = random_target(
        hidden_size=hidden,
        intermediate_size=16,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=vocab,
        num_hidden_layers=1,
    )
    # Representable in float16 and bfloat16, as the weights of real targets are in the dtype of their heads.
    weight = target.model.embed.weight
    weight[...] = jnp.round(512 * weight[...]) / 512
    return target


def target_of(row: Row, hidden: int, vocab: int) -> Target:
    """A target of that width and vocabulary that claims to be as deep as the row's; a head needs no more of it to be loaded."""
    target = small_target(hidden, vocab)
    return dataclasses.replace(target, config=dataclasses.replace(target.config, num_hidden_layers=row.target_layers))


def written(row: Row, folder: Path) -> tuple[Target, Written]:
    """The row on disk, and a target for it."""
    layer = row.config.get("transformer_layer_config", row.config)
    hidden = (row.config.get("target_hidden_size") or layer["hidden_size"]) // 64
    target = target_of(row, hidden, layer["vocab_size"] // 800)
    return target, write(row, folder, np.array(target.model.embed.weight[...]).astype(np.float32))
