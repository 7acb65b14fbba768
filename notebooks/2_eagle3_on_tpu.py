# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # EAGLE-3 on a TPU
#
# Qwen3-1.7B with its public EAGLE-3 head on one chip (a v5e of Colab or of a TPU VM has room), Llama-3.1-8B on a v6e chip or several v5e chips. Neither
# Qwen nor its head is gated; Llama needs its licence and `HF_TOKEN`. Where nothing can be downloaded, or there is only a CPU, the same cells
# run with SmolLM2. On a GPU they run too.
#
# Only one process can hold a TPU: end other notebooks of the runtime first. This library's TPU programs are compiled for v5e, v5p, v6e and v7x
# in its tests, but no TPU could be timed while it was written; we would like to hear your figures.

# %%
# Variables for JAX count only if they are set before it is imported for the first time: restart the runtime if it was.
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
FAST = os.environ.get("EAGLE_JAX_FAST") == "1"  # small numbers, for a machine without an accelerator

if importlib.util.find_spec("eagle_jax") is None:
    # What the image has of JAX stays as it is: it belongs to the image's drivers.
    ours = {d.name.lower(): d.version for d in importlib.metadata.distributions() if d.name}
    kept = [
        f"{n}=={v}" for n, v in ours.items() if n in ("jax", "jaxlib", "libtpu", "numpy") or n.startswith("jax-cuda")
    ]
    Path("constraints.txt").write_text("\n".join(kept))
    clone = Path("..").resolve()
    source = str(clone) if (clone / "pyproject.toml").exists() else "eagle-jax"
    subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", "-c", "constraints.txt", f"{source}[gguf]"])

import jax

print("jax", jax.__version__, "on", jax.default_backend(), jax.local_devices()[0].device_kind)

# %% [markdown]
# ## What fits
#
# Weights and caches must fit into the memory of the chips.

# %%
MODEL = "qwen"  # or "llama"

CHOICES = {
    # target, head, gigabytes of both in bfloat16 with some room for caches and temporaries
    "qwen": ("Qwen/Qwen3-1.7B", "AngelSlim/Qwen3-1.7B_eagle3", 6),
    "llama": ("meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", 21),
}
devices = jax.local_devices()
ON_CPU = devices[0].platform == "cpu"
memory = [(device.memory_stats() or {}).get("bytes_limit", 0) / 1e9 for device in devices]
print([f"{device.device_kind}: {size:.1f} GB" for device, size in zip(devices, memory, strict=True)])


def reachable(repository):
    """Whether the hub can be asked for it, and would give it."""
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(repository, timeout=5)
    except Exception as error:
        print(f"{repository}: {type(error).__name__}")
        return False
    return True


target_name, head_name, needed = CHOICES[MODEL]
chips = next((n for n in (1, 2, 4, 8) if n <= len(devices) and n * min(memory[:n]) >= needed), None)
if ON_CPU or chips is None or not (reachable(target_name) and reachable(head_name)):
    from eagle_jax.loading import default_target

    target_name, head_name, chips = default_target(), "smollm2-135m-instruct-eagle3", 1
print("target", target_name, "\nhead", head_name, "\nchips", chips)

# %% [markdown]
# ## Load
#
# Each chip reads its part of the files; nothing is held as a whole on the host. `notes` say what the head's files left open. Heads of this
# family were trained with a rotary base of 10000, whatever their config.json says, and accept more with it, as users have measured.

# %%
from eagle_jax import generate, load_draft, load_target, speculative_generate
from eagle_jax.parallel import make_mesh

target = load_target(target_name, mesh=make_mesh(chips))
draft = load_draft(head_name, target, rope_theta=10000 if "Qwen3" in str(head_name) else None)
print(target.model.dtype)
for note in draft.notes:
    print("-", note)

# %% [markdown]
# ## Plain decoding, chains, trees
#
# The first call of a shape compiles its programs; the second is measured. On a TPU checking 60 tokens costs little more than one, so trees are
# what it is made for.

# %%
PROMPTS = ["What is speculative decoding?", "Write a Python function that merges two sorted lists."]
TOKENS = 8 if FAST else 200
if FAST:
    PROMPTS = PROMPTS[:1]
CHATS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
SHAPES = {
    "chain of 3": {"num_speculative_tokens": 3},
    "chain of 5": {"num_speculative_tokens": 5},
    "tree 60/7/10": {"tree": {"total_tokens": 60, "depth": 7, "top_k": 10}},
}
if FAST:
    SHAPES = {"chain of 3": SHAPES["chain of 3"]}

options = {"max_new_tokens": TOKENS}
runs = {"plain": lambda: generate(target, CHATS, **options)}
for name, shape in SHAPES.items():
    runs[name] = lambda shape=shape: speculative_generate(target, draft, CHATS, **options, **shape)

results = {}
for name, run in runs.items():
    if not FAST:
        run()
    results[name] = run()
    timing, metrics = results[name].timing, results[name].metrics
    print(
        f"{name:14} {metrics.mean_acceptance_length:5.2f} tokens a forward {timing.decode_tokens_per_second:8.1f} tokens/s"
    )

# %% [markdown]
# The texts are those of plain decoding; in bfloat16 near ties can part them (see `docs/lossless.md`).

# %%
print(results["plain"].texts[0])
for name in SHAPES:
    pairs = zip(results[name].token_ids, results["plain"].token_ids, strict=True)
    print(name, "- equal texts:", sum(a == b for a, b in pairs), "of", len(PROMPTS))

# %% [markdown]
# ## What ran
#
# `mosaic_tpu` is the tree attention kernel; `xla_blocked` is what other devices and dtypes get.

# %%
print(dict(results[next(iter(SHAPES))].timing.attention))
