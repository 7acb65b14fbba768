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
# # Train your own head
#
# A head learns to guess one target, so the target writes the data. The same three steps work for any supported target: answer prompts, train,
# decode. Here they run with SmolLM2 and little data: enough to see the loss fall and the head accepted now and then. The head that comes
# with the library took 106 million tokens of answers and 42 minutes of an H200.

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
        [sys.executable, "-m", "pip", "install", "-q", "-c", "constraints.txt", f"{source}[gguf,train]"]
    )

import jax

print("jax", jax.__version__, "on", jax.default_backend(), jax.local_devices()[0].device_kind)

# %%
import json

from eagle_jax import load_draft, load_target, speculative_generate
from eagle_jax.cli import main
from eagle_jax.loading import default_target

MODEL = str(default_target())
WORK = Path("train_a_head")  # give the commands another folder to begin anew: with the same one they go on
WORK.mkdir(exist_ok=True)
ON_CPU = jax.default_backend() == "cpu"

# %% [markdown]
# ## Prompts
#
# One JSON object a line. Use prompts like those of your users, tens of thousands of them, and none of your evaluation sets
# (`--evaluation` checks that).

# %%
THINGS = [
    "rain",
    "bread",
    "a violin",
    "the moon",
    "a bicycle",
    "salt",
    "a glacier",
    "paper",
    "an owl",
    "steel",
    "tea",
    "a volcano",
]
FORMS = ["What is {}?", "Write two sentences about {}.", "Why is {} useful?", "Explain {} to a child."]
prompts = [form.format(thing) for form in FORMS for thing in THINGS]
if FAST:
    prompts = prompts[:10]
(WORK / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))

# %% [markdown]
# ## The target answers
#
# `main` is the command `eagle-jax`; in a shell this is `eagle-jax synthesize --model ... --output ...`.

# %%
answers = ["--max-new-tokens", "32" if FAST else "192", "--slots", "10" if FAST else "16" if ON_CPU else "256"]
data = [
    "synthesize",
    "--model",
    MODEL,
    "--output",
    str(WORK / "data"),
    "--prompts",
    str(WORK / "prompts.jsonl"),
    *answers,
]
assert main([*data, "--quiet"]) == 0

# %% [markdown]
# ## Train
#
# For a real head leave the sizes at their defaults and give `--epochs 2 --draft-vocab-size 16384`. The run says the accuracy of each draft step
# and the accepted length that decoding would measure.

# %%
sizes = {
    "--total-steps": 4 if FAST else 60 if ON_CPU else 400,
    "--sequence-length": 64 if FAST else 256,
    "--batch-rows": 2 if FAST else 4 if ON_CPU else 32,
    "--steps": 2 if FAST else 4,
    "--draft-vocab-size": 1024 if FAST else 8192,
    "--held-out": 2 if FAST else 8,
    "--evaluation-depth": 3,
    "--evaluate-every": 4 if FAST else 30,
    "--log-every": 2 if FAST else 10,
}
flags = [word for name, value in sizes.items() for word in (name, str(value))]
training = [
    "train",
    "--model",
    MODEL,
    "--data",
    str(WORK / "data"),
    "--output",
    str(WORK / "run"),
    "--no-tensorboard",
    "--no-picture",
    *flags,
]
assert main([*training, "--quiet"]) == 0

# %%
course = [json.loads(line) for line in (WORK / "run" / "metrics.jsonl").read_text().splitlines()]
for row in course:
    print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items() if key != "time"})

# %% [markdown]
# ## Decode with it
#
# `run/head` is in the format of EAGLE's own heads; `run/head-speculators` is the same for vLLM. `eagle-jax eval` measures it on whole sets.

# %%
target = load_target(MODEL)
draft = load_draft(WORK / "run" / "head", target)
result = speculative_generate(
    target, draft, "What is snow?", chat=True, max_new_tokens=16 if FAST else 96, num_speculative_tokens=3
)
print(result.texts[0])
print("tokens a forward:", result.metrics.mean_acceptance_length)
print("acceptance at each position:", result.metrics.total.acceptance_rates)
