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
# # Trees and acceptance
#
# What a head drafts, what the target says to it, and what longer chains and larger trees bring.

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
    subprocess.check_call(
        [sys.executable, "-m", "pip", "install", "-q", "-c", "constraints.txt", f"{source}[gguf,eval]"]
    )

import jax

print("jax", jax.__version__, "on", jax.default_backend(), jax.local_devices()[0].device_kind)

# %%
import matplotlib.pyplot as plt
from IPython.display import SVG, display

from eagle_jax import load_draft, load_target, speculative_generate
from eagle_jax.evaluation import trace_rounds, tree_svg
from eagle_jax.loading import default_target

target = load_target(default_target(), dtype="float32")
draft = load_draft("smollm2-135m-instruct-eagle3", target)

# %% [markdown]
# ## Look at rounds
#
# A tree by three numbers: `total_tokens` nodes with the root, `depth` expansions after the first level, `top_k` nodes expanded in each and children of
# each. The number in a box is the probability that the head gives to the way from the root; green nodes are what the target wanted too, and
# the dashed one is its own token behind them.

# %%
QUESTION = "How does photosynthesis work?"
TREE = {"total_tokens": 10, "depth": 2, "top_k": 3}
rounds = trace_rounds(target, draft, QUESTION, rounds=3 if FAST else 8, tree=TREE, chat=True)
for number, traced in enumerate(rounds):
    path = "".join(traced.texts[node] for node in traced.accepted[1:])
    print(f"round {number}: {traced.texts[0]!r} -> accepted {path!r}, then {traced.bonus_text!r}")

# %%
best = max(rounds, key=lambda traced: traced.accepted_length)
worst = min(rounds, key=lambda traced: traced.accepted_length)
for traced in (best, worst) if worst is not best else (best,):  # the same where all rounds accepted as much
    display(SVG(tree_svg(traced)))

# %% [markdown]
# ## Acceptance by depth
#
# A chain ends at its first wrong guess, so its rates fall quickly. A tree has other guesses at each place.

# %%
PROMPTS = [
    "How does photosynthesis work?",
    "Natalia sold 48 clips in April and half as many in May. How many did she sell altogether?",
    "Write a Python function that returns the n-th Fibonacci number.",
]
SHAPES = {
    "chain of 3": {"num_speculative_tokens": 3},
    "chain of 7": {"num_speculative_tokens": 7},
    "tree 60/7/10": {"tree": {"total_tokens": 60, "depth": 7, "top_k": 10}},
}
TOKENS = 96
if FAST:
    PROMPTS, TOKENS = PROMPTS[:2], 16
    SHAPES = {"chain of 3": SHAPES["chain of 3"], "tree 10/2/3": {"tree": TREE}}
results = {
    name: speculative_generate(target, draft, PROMPTS, chat=True, max_new_tokens=TOKENS, **shape)
    for name, shape in SHAPES.items()
}

# %%
figure, (rates, lengths) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
for name, result in results.items():
    by_depth = result.metrics.total.acceptance_rates
    rates.plot(range(1, len(by_depth) + 1), by_depth, marker="o", label=name)
rates.set(xlabel="draft position", ylabel="share of rounds that accepted it", ylim=(0, 1), title="acceptance")
rates.xaxis.get_major_locator().set_params(integer=True)
rates.legend()
lengths.bar(list(results), [result.metrics.mean_acceptance_length for result in results.values()], color="#1b7837")
lengths.axhline(1, color="#9a9a9a", linestyle="--")
lengths.set(ylabel="tokens a forward", title="accepted length (plain decoding: 1)")
plt.show()

# %% [markdown]
# ## By prompt
#
# Arithmetic and code are easier to guess than prose. What a round *costs* decides whether a longer draft pays: measure it on your device with
# `eagle-jax demo --num-speculative-tokens 5`, or all at once with `eagle-jax sweep`.

# %%
for index, prompt in enumerate(PROMPTS):
    row = {name: f"{result.metrics[index].mean_acceptance_length:.2f}" for name, result in results.items()}
    print(f"{prompt[:48]:50}", row)
texts = {name: result.token_ids for name, result in results.items()}
print("all shapes gave the same tokens:", len({str(ids) for ids in texts.values()}) == 1)
