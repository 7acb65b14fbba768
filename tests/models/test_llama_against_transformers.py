"""Logits and hidden states of our targets against transformers' over the families and the space of their configurations."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from eagle_jax.loading import load_target
from eagle_jax.models import CacheContext, Llama, RopeConfig

LENGTH = 300
BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

# Settings on top of BASE; "rope" is the block of rotary settings, written in the layout of transformers 4 or 5.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "theta, kv heads 4, head_dim 24": {"rope_theta": 1e6, "num_key_value_heads": 4, "head_dim": 24},
    "linear under type, kv heads 1, tied": {
        "rope": {"rope_type": "linear", "factor": 4.0},
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "dynamic": {"rope": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64},
    "llama3, factor 8": {"rope": {"rope_type": "llama3", "factor": 8.0, **BANDS}, "rope_theta": 500000.0},
    "llama3 under type, factor 32, all biases": {
        "rope": {"rope_type": "llama3", "factor": 32.0, **BANDS},
        "rope_theta": 500000.0,
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 1e-2,
    },
    "yarn, attention_factor": {"rope": {**YARN, "attention_factor": 0.8, "beta_fast": 16.0, "beta_slow": 2.0}},
    "yarn, mscale": {"rope": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.6}},
    "yarn, not truncated": {"rope": {**YARN, "truncate": False}},
    "mistral, window": {"family": "Mistral", "sliding_window": 7, "head_dim": 24, "num_key_value_heads": 1},
    "qwen2, windows from layer 1": {
        "family": "Qwen2",
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
    },
    "qwen3": {"family": "Qwen3", "head_dim": 24, "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen3, layer types, biases": {
        "family": "Qwen3",
        "head_dim": 8,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        "rms_norm_eps": 1e-2,
    },
}


def build(**settings: Any) -> Any:
    """A model of transformers: of the class that "family" names, Llama without."""
    family = settings.pop("family", "Llama")
    config = getattr(transformers, f"{family}Config")(**settings)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def reference(folder: Path, case: str, layout: int) -> Any:
    """Writes a random model into the folder, its config.json in the layout of transformers 4 or 5, and returns it."""
    settings = BASE | CASES[case]
    rope, theta = settings.pop("rope", {}), settings.pop("rope_theta", 10000.0)
    torch.manual_seed(sum(map(ord, case)))
    model = build(**settings, rope_parameters={"rope_type": "default", "rope_theta": theta} | rope)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large enough that attention is not flat and rotary phases matter; norms and biases are not trivial either.
            if parameter.ndim == 2:
                parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.3)
    model.save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text())
    assert "rope_parameters" in written
    if layout == 4:
        old = {k: v for k, v in written.pop("rope_parameters").items() if k != "rope_theta"}
        if "type" in case:  # the older of its two names
            old["type"] = old.pop("rope_type")
        written["rope_scaling"] = None if old == {"rope_type": "default"} else old
        written["rope_theta"] = theta
        written["torch_dtype"] = written.pop("dtype")
        if "layer types" not in case:  # earlier releases derived them, as a reader of their files must
            written.pop("layer_types", None)
        path.write_text(json.dumps(written))
    return model


@functools.partial(jax.jit, static_argnames="graph")
def forward(graph: Any, weights: Any, tokens: Any, cache: Any, length: Any, prompt_length: Any) -> tuple[Any, ...]:
    """Logits and captured hidden states of T tokens, and the cache with their rows."""
    model: Llama = nnx.merge(graph, weights)
    lengths = length[None]
    out = model(
        tokens[None],
        CacheContext(length + jnp.arange(tokens.shape[0])[None], cache, lengths),
        aux_layers=tuple(range(model.config.num_hidden_layers + 1)),
        prompt_lengths=prompt_length[None],
    )
    return model.logits(out.hidden)[0], out.aux[0], cache.write(out.rows, lengths)


def run(model: Llama, tokens: np.ndarray, sizes: list[int], prompt_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits and features of all tokens, run in chunks of the given sizes behind one another."""
    graph, weights = nnx.split(model)
    cache, start, parts = model.empty_cache(1, LENGTH), 0, []
    for size in sizes:
        chunk = jnp.asarray(tokens[start : start + size], jnp.int32)
        *out, cache = forward(graph, weights, chunk, cache, jnp.int32(start), jnp.int32(prompt_length))
        parts.append([np.asarray(x) for x in out])
        start += size
    assert start == len(tokens)
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def assert_equal(ours: tuple[np.ndarray, np.ndarray], logits: torch.Tensor, states: tuple[torch.Tensor, ...]) -> None:
    np.testing.assert_allclose(ours[0], logits.numpy(), atol=1e-4, rtol=0)
    np.testing.assert_allclose(ours[1], torch.cat(states, dim=-1).numpy(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_one_forward(case: str, tmp_path: Path) -> None:
    layout = 4 if "type" in case or case in ("dynamic", "mistral, window", "qwen2, windows from layer 1") else 5
    hf = reference(tmp_path, case, layout)
    model = load_target(tmp_path, dtype="float32").model
    tokens = np.random.default_rng(0).integers(0, 61, LENGTH)
    with torch.no_grad():
        out = hf(torch.tensor(tokens)[None], output_hidden_states=True)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    assert out.logits.std() > 0.5, "a flat model proves nothing"
    # Windows reach from one chunk into the rows of the chunk before.
    ours = run(model, tokens, [60] * 5 if "family" in CASES[case] else [LENGTH], LENGTH)
    assert_equal(ours, out.logits[0], tuple(s[0] for s in out.hidden_states))
    # The settings matter here: the same weights without them speak differently.
    without: list[tuple[set[str], dict[str, Any]]] = []
    if CASES[case].keys() & {"rope", "rope_theta"}:
        without.append(({"rope", "rope_theta"}, {}))
    if CASES[case].get("sliding_window"):
        without.append(
            ({"rope", "rope_theta", "sliding_window", "use_sliding_window", "layer_types"}, {"sliding_window": None})
        )
    for dropped, changed in without:
        plain = build(**{k: v for k, v in (BASE | CASES[case]).items() if k not in dropped}, **changed)
        plain.load_state_dict(hf.state_dict())
        with torch.no_grad():
            difference = (plain(torch.tensor(tokens)[None]).logits - out.logits).abs().max()
        assert difference > 0.1


@pytest.mark.parametrize("case", ["linear under type, kv heads 1, tied", "llama3, factor 8"])
def test_chunks_and_single_tokens_behind_a_cache(case: str, tmp_path: Path) -> None:
    hf = reference(tmp_path, case, 5)
    model = load_target(tmp_path, dtype="float32").model
    tokens = np.random.default_rng(1).integers(0, 61, 270)
    with torch.no_grad():
        out = hf(torch.tensor(tokens)[None], output_hidden_states=True)
    ours = run(model, tokens, [64] * 4 + [1] * 14, 256)
    assert_equal(ours, out.logits[0], tuple(s[0] for s in out.hidden_states))


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_dynamic_scaling_follows_the_growing_sequence(tmp_path: Path) -> None:
    """As in transformers' `generate`: the prompt at its own length, each later token at the length it makes."""
    hf = reference(tmp_path, "dynamic", 4)
    model = load_target(tmp_path, dtype="float32").model
    rng = np.random.default_rng(2)
    for prompt, total in ((128, 148), (64, 70)):
        tokens = rng.integers(0, 61, total)
        hf.model.rotary_emb.__init__(hf.config)  # it remembers the longest sequence that it saw
        cache, logits = transformers.DynamicCache(), []
        with torch.no_grad():
            for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, total))]:
                out = hf(torch.tensor(tokens[None, start:end]), past_key_values=cache, use_cache=True)
                logits.append(out.logits[0])
        ours, _ = run(model, tokens, [64] * (prompt // 64) + [1] * (total - prompt), prompt)
        np.testing.assert_allclose(ours, torch.cat(logits).numpy(), atol=1e-4, rtol=0)


def test_tree_nodes_get_the_phases_of_plain_decoding() -> None:
    """Dynamic scaling depends on the position of a node, not on how many nodes are run with it."""
    rope = RopeConfig(rope_type="dynamic", factor=2.0, original_max_position_embeddings=16)
    alone = [rope.phases(jnp.array([[p]]), 8, jnp.array([20])) for p in (20, 21, 25)]
    together = rope.phases(jnp.array([[20, 21, 25, 21]]), 8, jnp.array([20]))
    for i in range(2):
        np.testing.assert_array_equal(together[i][0, :3], np.concatenate([a[i][0] for a in alone]))
        np.testing.assert_array_equal(together[i][0, 3], together[i][0, 1])
