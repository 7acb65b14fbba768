"""Float64 numpy versions of the target and of the EAGLE-3 head, written from their definitions: what tests compare with.

They read the parameters of the modules under test but share no code with them; whole sequences, no cache.
"""

from typing import Any

import numpy as np
from flax import nnx

from eagle_jax.models import DraftConfig, LlamaConfig, RopeConfig

Parameters = dict[str, np.ndarray]


def parameters(module: nnx.Module) -> Parameters:
    """Every parameter of a module in float64 (ids stay integers), by its dotted path."""
    out = {}
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        value = np.asarray(variable[...])
        out[".".join(map(str, path))] = value if value.dtype.kind == "i" else value.astype(np.float64)
    return out


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(log_softmax(x))


def angular_speeds(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians a position of each pair of channels, `[Dh / 2]`, for rope types default and llama3."""
    speed = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if rope.rope_type == "default":
        return speed
    assert rope.rope_type == "llama3"
    wave = 2 * np.pi / speed
    long = rope.original_max_position_embeddings / rope.low_freq_factor
    short = rope.original_max_position_embeddings / rope.high_freq_factor
    blend = (rope.original_max_position_embeddings / wave - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - blend) * speed / rope.factor + blend * speed
    return np.where(wave > long, speed / rope.factor, np.where(wave < short, speed, between))


def rotate(x: np.ndarray, positions: np.ndarray, speeds: np.ndarray) -> np.ndarray:
    """Rotates `[T, heads, Dh]` as complex numbers whose parts are channels i and i + Dh / 2."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * positions[:, None] * speeds)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attention(
    x: np.ndarray,
    weights: Parameters,
    prefix: str,
    config: LlamaConfig | DraftConfig,
    positions: np.ndarray,
    visible: np.ndarray,
) -> np.ndarray:
    """Attention among the T rows of x; `visible` is bool `[T, T]`, row by column."""
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    qkv = x @ weights[prefix + "qkv.weight"].T + weights.get(prefix + "qkv.bias", 0.0)
    qkv = qkv.reshape(len(x), heads + 2 * kv_heads, dim)
    queries, keys = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
    if prefix + "q_norm.weight" in weights:
        queries = rms_norm(queries, weights[prefix + "q_norm.weight"], config.rms_norm_eps)
        keys = rms_norm(keys, weights[prefix + "k_norm.weight"], config.rms_norm_eps)
    speeds = angular_speeds(config.rope, dim)
    queries, keys = rotate(queries, positions, speeds), rotate(keys, positions, speeds)
    values = qkv[:, heads + kv_heads :]
    out = np.empty_like(queries)
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        scores = queries[:, head] @ keys[:, kv_head].T / np.sqrt(dim)
        out[:, head] = softmax(np.where(visible, scores, -np.inf)) @ values[:, kv_head]
    return out.reshape(len(x), -1) @ weights[prefix + "out.weight"].T + weights.get(prefix + "out.bias", 0.0)


def mlp(x: np.ndarray, weights: Parameters, prefix: str) -> np.ndarray:
    gate_up = x @ weights[prefix + "gate_up.weight"].T + weights.get(prefix + "gate_up.bias", 0.0)
    gate, up = np.split(gate_up, 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ weights[prefix + "down.weight"].T + weights.get(
        prefix + "down.bias", 0.0
    )


class Float64Llama:
    """A target of any family over whole sequences."""

    def __init__(self, model: Any):
        self.config: LlamaConfig = model.config
        self.weights = parameters(model)

    def __call__(self, tokens: Any) -> tuple[np.ndarray, list[np.ndarray]]:
        """Logits `[T, V]` of the T tokens, and the hidden states as transformers numbers them (`[T, H]` each)."""
        config, weights = self.config, self.weights
        positions = np.arange(len(tokens))
        causal = positions[:, None] >= positions
        x = weights["embed.weight"][np.asarray(tokens)]
        states = []
        for i in range(config.num_hidden_layers):
            states.append(x)
            layer = f"layers.{i}."
            window = config.sliding_windows[i] if config.sliding_windows else None
            visible = causal if window is None else causal & (positions[:, None] - positions < window)
            normed = rms_norm(x, weights[layer + "input_norm.weight"], config.rms_norm_eps)
            x = x + attention(normed, weights, layer + "attention.", config, positions, visible)
            normed = rms_norm(x, weights[layer + "post_norm.weight"], config.rms_norm_eps)
            x = x + mlp(normed, weights, layer + "mlp.")
        x = rms_norm(x, weights["norm.weight"], config.rms_norm_eps)
        states.append(x)
        table = weights["embed.weight"] if config.tie_word_embeddings else weights["lm_head.weight"]
        return x @ table.T, states

    def features(self, tokens: Any, capture_layers: tuple[int, ...]) -> np.ndarray:
        """What a draft head reads, `[T, n * H]`."""
        states = self(tokens)[1]
        return np.concatenate([states[k] for k in capture_layers], axis=-1)


class Float64Eagle3:
    """The EAGLE-3 head over whole sequences of rows."""

    def __init__(self, head: Any, target_embedding: np.ndarray):
        self.config: DraftConfig = head.config
        self.weights = parameters(head)
        self.embedding = self.weights.get("embed.weight", target_embedding)

    def fuse(self, features: np.ndarray) -> np.ndarray:
        """Feature vectors `[T, n * H]` in the head's width."""
        config, weights, eps = self.config, self.weights, self.config.rms_norm_eps
        if config.norm_before_fc:
            features = rms_norm(features, weights["feature_norm.weight"], eps)
        if config.fc_norm:
            parts = np.split(features, len(config.capture_layers), axis=-1)
            features = np.concatenate(
                [rms_norm(part, weights[f"fc_norms.{i}.weight"], eps) for i, part in enumerate(parts)], axis=-1
            )
        return features @ weights["fc.weight"].T

    def rows(self, tokens: Any, hidden: np.ndarray, positions: np.ndarray, visible: np.ndarray) -> np.ndarray:
        """What is fed back after each row, `[T, h]`; row t embeds `tokens[t]` beside `hidden[t]`."""
        config, weights, eps = self.config, self.weights, self.config.rms_norm_eps
        embedded = self.embedding[np.asarray(tokens)]
        x = hidden
        for i in range(config.num_hidden_layers):
            layer = f"layers.{i}."
            if i == 0:
                normed = rms_norm(x, weights[layer + "hidden_norm.weight"], eps)
                left = rms_norm(embedded, weights[layer + "input_norm.weight"], eps)
                inputs = np.concatenate([left, normed], axis=-1)
                residual = normed if config.norm_before_residual else x
            else:
                inputs = rms_norm(x, weights[layer + "input_norm.weight"], eps)
                residual = x
            x = residual + attention(inputs, weights, layer + "attention.", config, positions, visible)
            x = x + mlp(rms_norm(x, weights[layer + "post_norm.weight"], eps), weights, layer + "mlp.")
        return rms_norm(x, weights["norm.weight"], eps) if config.norm_output else x

    def log_probs(self, outputs: np.ndarray) -> np.ndarray:
        """Log-probabilities over the draft vocabulary after each row, `[T, Vd]`."""
        if not self.config.norm_output:
            outputs = rms_norm(outputs, self.weights["norm.weight"], self.config.rms_norm_eps)
        return log_softmax(outputs @ self.weights["lm_head.weight"].T)

    def chain(self, tokens: list[int], features: np.ndarray, first: int, depth: int) -> list[np.ndarray]:
        """Log-probabilities behind a greedy chain of drafts, one `[Vd]` a depth.

        Args:
          tokens: the T known tokens.
          features: target features of them, `[T, n * H]`.
          first: the token after them, already decided (the root).
          depth: how many tokens are drafted.
        """
        embedded = [*tokens[1:], first]
        hidden = self.fuse(features)
        out = []
        for _ in range(depth):
            positions = np.arange(len(embedded))
            output = self.rows(embedded, hidden, positions, positions[:, None] >= positions)
            log_probs = self.log_probs(output[-1:])[0]
            out.append(log_probs)
            drafted = int(log_probs.argmax())
            mapping = self.weights.get("vocabulary")
            embedded.append(drafted if mapping is None else int(mapping[drafted]))
            hidden = np.concatenate([hidden, output[-1:]])
        return out
