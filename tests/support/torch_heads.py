"""EAGLE heads in float64 PyTorch, straight from the tensors of a checkpoint: what loaded heads are compared with.

Written from the definitions of the formats. It reads file tensors under SafeAILab's names (`fc`, `midlayer`, `norm`, ...) and
what the checkpoint's configuration means, spelled out by the test; it shares no code with the loader or the modules.
"""

import dataclasses
import math

import numpy as np
import torch
from flax import nnx
from torch.nn.functional import linear, log_softmax, rms_norm, scaled_dot_product_attention, silu

from eagle_jax.models import DraftConfig, DraftHead

torch.set_num_threads(1)  # threads that wait for each other cost more than these sizes

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What a configuration means."""

    method: str
    heads: int
    kv_heads: int
    eps: float
    theta: float = 10000.0
    yarn: tuple[float, int] | None = None
    """Factor and original context."""
    norm_before_residual: bool = False
    norm_output: bool = False
    windows: tuple[int | None, ...] = ()
    """Rows that each layer sees back, itself included."""


class TorchHead:
    """A head; embedding and output head of the target stand in where the checkpoint has none."""

    def __init__(self, tensors: Tensors, reading: Reading, target_embedding: np.ndarray, target_head: np.ndarray):
        floats = {n: t.double() for n, t in tensors.items() if t.is_floating_point()}
        self.tensors, self.reading = floats, reading
        self.embedding = floats.get("embed_tokens.weight", torch.from_numpy(target_embedding).double())
        self.head = floats.get("lm_head.weight", torch.from_numpy(target_head).double())
        rows = len(self.head)
        self.ids = torch.arange(rows) + (tensors["d2t"].long() if "d2t" in tensors else 0)
        self.layers = 1 + sum(f"layers.{i}.mlp.down_proj.weight" in tensors for i in range(1, 8))

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.tensors[f"{name}.weight"]
        return rms_norm(x, weight.shape, weight, self.reading.eps)

    def optional_norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.norm(name, x) if f"{name}.weight" in self.tensors else x

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates `[heads, T, D]`, row t by t."""
        size = x.shape[-1]
        speeds, scale = self.reading.theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size), 1.0
        if self.reading.yarn:
            factor, original = self.reading.yarn

            def channel(turns: float) -> float:
                return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(self.reading.theta))

            low, high = max(math.floor(channel(32)), 0), min(math.ceil(channel(1)), size - 1)
            slow = ((torch.arange(size // 2) - low) / ((high - low) or 0.001)).clamp(0, 1)
            speeds = speeds * (slow / factor + 1 - slow)
            scale = 0.1 * math.log(factor) + 1
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * torch.cat([speeds, speeds])
        first, second = x.chunk(2, dim=-1)
        return scale * (x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin())

    def attend(self, layer: str, index: int, x: torch.Tensor) -> torch.Tensor:
        rows, block = len(x), f"{layer}.self_attn"
        queries, keys, values = (
            self.linear(f"{block}.{part}_proj", x).view(rows, count, -1).transpose(0, 1)
            for part, count in (("q", self.reading.heads), ("k", self.reading.kv_heads), ("v", self.reading.kv_heads))
        )
        queries, keys = self.optional_norm(f"{block}.q_norm", queries), self.optional_norm(f"{block}.k_norm", keys)
        distance = torch.arange(rows)[:, None] - torch.arange(rows)
        window = self.reading.windows[index] if self.reading.windows else None
        mask = (distance >= 0) & (distance < (window or rows))
        mixed = scaled_dot_product_attention(
            self.rotate(queries), self.rotate(keys), values, attn_mask=mask, enable_gqa=True
        )
        return self.linear(f"{block}.o_proj", mixed.transpose(0, 1).reshape(rows, -1))

    def feed_forward(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(f"{layer}.post_attention_layernorm", x)
        block = f"{layer}.mlp"
        return self.linear(
            f"{block}.down_proj", silu(self.linear(f"{block}.gate_proj", x)) * self.linear(f"{block}.up_proj", x)
        )

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The feature `[T, h]` of captured states `[T, n * H]`."""
        if self.reading.method == "eagle":
            return features
        features = self.optional_norm("input_norm", features)
        if "fc_norm.0.weight" in self.tensors:
            width = len(self.tensors["fc_norm.0.weight"])
            parts = features.split(width, dim=-1)
            features = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], dim=-1)
        return self.linear("fc", features) if "fc.weight" in self.tensors else features

    def rows(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """What is fed back after each row."""
        embedded = self.embedding[torch.tensor(tokens)]
        if self.reading.method == "eagle":
            embedded = self.optional_norm("embed_layernorm", embedded)
            hidden = self.optional_norm("hidden_states_layernorm", hidden)
            x = self.linear("fc", torch.cat([embedded, hidden], dim=-1))
            for i in range(self.layers):
                x = x + self.attend(f"layers.{i}", i, self.optional_norm(f"layers.{i}.input_layernorm", x))
                x = x + self.feed_forward(f"layers.{i}", x)
            return self.optional_norm("norm", x)
        x = hidden
        for i in range(self.layers):
            layer = f"layers.{i}" if i else "midlayer"
            if i:
                inputs = self.norm(f"{layer}.input_layernorm", x)
            else:
                normed = self.norm("midlayer.hidden_norm", x)
                inputs = torch.cat([self.norm("midlayer.input_layernorm", embedded), normed], dim=-1)
                x = normed if self.reading.norm_before_residual else x
            x = x + self.attend(layer, i, inputs)
            x = x + self.feed_forward(layer, x)
        return self.norm("norm", x) if self.reading.norm_output else x

    def log_probs(self, outputs: torch.Tensor) -> torch.Tensor:
        if self.reading.method == "eagle":
            outputs = self.optional_norm("lm_head_layernorm", outputs)
        elif not self.reading.norm_output:
            outputs = self.norm("norm", outputs)
        return log_softmax(linear(outputs, self.head), dim=-1)

    def chain(self, tokens: list[int], features: np.ndarray, depth: int) -> tuple[list[np.ndarray], list[int]]:
        """Log-probabilities behind a greedy chain, one `[Vd]` a depth, and the drafted target ids.

        Args:
          tokens: the known tokens and the root, T + 1.
          features: captured states of the T known tokens, `[T, n * H]`.
          depth: how many tokens are drafted.
        """
        embedded, hidden = list(tokens[1:]), self.fuse(torch.from_numpy(features).double())
        out, drafted = [], []
        for _ in range(depth):
            outputs = self.rows(embedded, hidden)
            log_probs = self.log_probs(outputs[-1])
            out.append(log_probs.numpy())
            drafted.append(int(self.ids[int(log_probs.argmax())]))
            embedded.append(drafted[-1])
            hidden = torch.cat([hidden, outputs[-1:]])
        return out, drafted


def file_tensors(head: DraftHead) -> Tensors:
    """The parameters of one of our heads under the names that `TorchHead` reads."""
    config = head.config
    three = config.method == "eagle3"
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    ends = {
        "embed": "embed_tokens",
        "lm_head": "lm_head",
        "fc": "fc",
        "feature_norm": "input_norm",
        "embedding_norm": "embed_layernorm",
        "hidden_norm": "hidden_states_layernorm",
        "norm": "lm_head_layernorm" if config.head_norm else "norm",
    }
    inner = {
        "input_norm": "input_layernorm",
        "post_norm": "post_attention_layernorm",
        "attention.out": "self_attn.o_proj",
    }
    inner |= {
        "mlp.down": "mlp.down_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
    }
    out: Tensors = {}
    for path, variable in nnx.to_flat_state(nnx.state(head)):
        value = torch.from_numpy(np.array(variable[...]))
        names = [str(part) for part in path]
        if names == ["vocabulary"]:
            out["d2t"] = value.long() - torch.arange(len(value))
            continue
        kind = names[-1]
        if names[0] == "fc_norms":
            out[f"fc_norm.{names[1]}.{kind}"] = value
        elif names[0] != "layers":
            out[f"{ends[names[0]]}.{kind}"] = value
        else:
            layer = "midlayer" if three and names[1] == "0" else f"layers.{names[1]}"
            block = ".".join(names[2:-1])
            if block == "attention.qkv":
                for part, piece in zip("qkv", value.split((queries, keys, keys)), strict=True):
                    out[f"{layer}.self_attn.{part}_proj.{kind}"] = piece
            elif block == "mlp.gate_up":
                for part, piece in zip(("gate", "up"), value.chunk(2), strict=True):
                    out[f"{layer}.mlp.{part}_proj.{kind}"] = piece
            else:
                out[f"{layer}.{inner.get(block, block)}.{kind}"] = value
    return out


def reading(config: DraftConfig) -> Reading:
    """What one of our configurations means."""
    return Reading(
        method=config.method,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        eps=config.rms_norm_eps,
        norm_before_residual=config.norm_before_residual,
        norm_output=config.norm_output,
        windows=config.sliding_windows,
    )
