"""Small checkpoints on disk, in the layouts that public ones have, and ways to look at what was loaded from them."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax.loading import Target
from eagle_jax.models import CacheContext, Llama, LlamaConfig

LLAMA = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
DRAFT_VOCAB = 40


def hugging_face_llama(seed=0, family="Llama", **overrides):
    """A random LlamaForCausalLM (or a relative of it) in float32, every parameter away from its initial value."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(LLAMA | overrides))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def write_config(folder, config, name="config.json"):
    (Path(folder) / name).write_text(json.dumps(config))


def edit_config(folder, drop=(), **values):
    config = json.loads((folder / "config.json").read_text())
    write_config(folder, {k: v for k, v in config.items() if k not in drop} | values)


def edit_tensors(folder, edit):
    """Rewrites model.safetensors with the dict that `edit` returns (or changes in place)."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors = edit(tensors) or tensors
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def head_tensors(
    *,
    hidden=32,
    target_hidden=32,
    vocab=97,
    draft_vocab=DRAFT_VOCAB,
    heads=4,
    kv_heads=2,
    head_dim=8,
    states=3,
    layers=1,
    seed=0,
):
    """The tensors of a random EAGLE-3 head under the names of SafeAILab/EAGLE."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    inner = 2 * hidden

    def random(*shape):
        return torch.randn(*shape, generator=generator) * 0.1

    tensors = {
        "fc.weight": random(hidden, states * target_hidden),
        "norm.weight": 1 + random(hidden),
        "lm_head.weight": random(draft_vocab, hidden),
    }
    for i in range(layers):
        layer = f"layers.{i}" if i else "midlayer"
        width = hidden if i else 2 * hidden
        if not i:
            tensors["midlayer.hidden_norm.weight"] = 1 + random(hidden)
        tensors |= {
            f"{layer}.input_layernorm.weight": 1 + random(hidden),
            f"{layer}.post_attention_layernorm.weight": 1 + random(hidden),
            f"{layer}.self_attn.q_proj.weight": random(heads * head_dim, width),
            f"{layer}.self_attn.k_proj.weight": random(kv_heads * head_dim, width),
            f"{layer}.self_attn.v_proj.weight": random(kv_heads * head_dim, width),
            f"{layer}.self_attn.o_proj.weight": random(hidden, heads * head_dim),
            f"{layer}.mlp.gate_proj.weight": random(inner, hidden),
            f"{layer}.mlp.up_proj.weight": random(inner, hidden),
            f"{layer}.mlp.down_proj.weight": random(hidden, inner),
        }
    if draft_vocab < vocab:
        ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def head_config(**values):
    """The config.json of `head_tensors()`, as public heads have it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": 97,
        "draft_vocab_size": DRAFT_VOCAB,
    } | values


def save_head(folder, tensors=None, config=None, container="safetensors"):
    """Writes a head; returns the folder."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = head_tensors() if tensors is None else tensors
    write_config(folder, head_config() if config is None else config)
    if container == "safetensors":
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def random_target(**overrides):
    """A target that was never on disk, for heads to be loaded for."""
    config = LlamaConfig.from_dict({"model_type": "llama"} | LLAMA | overrides)
    graph, state = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(0))))
    draw = np.random.default_rng(0)
    values = jax.tree.map(lambda leaf: jnp.asarray(0.1 * draw.standard_normal(leaf.shape), leaf.dtype), state)
    model = nnx.merge(graph, values)
    return Target(model=model, config=config, tokenizer=None, name="random", path=Path(), generation_config={})


def parameters(module):
    """The variables of a module by path, as numpy arrays."""
    flat = nnx.to_flat_state(nnx.state(module))
    return {".".join(map(str, path)): np.asarray(variable[...]) for path, variable in flat}


def assert_same_parameters(first, second):
    first, second = parameters(first), parameters(second)
    assert first.keys() == second.keys()
    for path, value in first.items():
        assert value.dtype == second[path].dtype, path
        np.testing.assert_array_equal(value, second[path], err_msg=path)


def logits(target, ids):
    """Logits `[T, V]` of our model for one prompt, run without a cache."""
    tokens = jnp.asarray([ids])
    positions = jnp.arange(len(ids))[None]
    cache = target.model.empty_cache(1, 8)

    @jax.jit
    def forward(tokens, positions, cache):
        context = CacheContext(positions, cache, jnp.zeros(1, jnp.int32))
        output = target.model(tokens, context, prompt_lengths=jnp.full(1, len(ids), jnp.int32))
        return target.model.logits(output.hidden)

    return np.asarray(forward(tokens, positions, cache))[0]


def hugging_face_logits(model, ids):
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()
