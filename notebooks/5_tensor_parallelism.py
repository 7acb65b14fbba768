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
# # Tensor parallelism on simulated devices
#
# A model that is too large for one device is split over several. JAX can simulate devices on a CPU, which is enough to see that a
# configuration works and what each device holds; it says nothing about speed. With several GPUs or TPU chips the same cells use those.

# %%
# Variables for JAX count only if they are set before it is imported for the first time: restart the runtime if it was.
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Asked in a process of its own, because here JAX must not be imported before the choice is made.
count = "import jax; print(len(jax.devices()) if jax.default_backend() != 'cpu' else 0)"
asked = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=False)
if asked.stdout.strip() in ("", "0", "1", "2"):
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=3"
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
print(len(jax.devices()), "devices")

# %% [markdown]
# ## Which sizes are possible
#
# Attention heads are split, so their number must be a multiple of `tensor_parallel_size`. SmolLM2 has 9 query and 3 key/value heads: 3 devices
# work, 2 are refused, and the error names the numbers.

# %%
from eagle_jax import LLM, SamplingParams, load_target
from eagle_jax.loading import default_target
from eagle_jax.parallel import make_mesh

MODEL = default_target()
try:
    load_target(MODEL, mesh=make_mesh(2))
except ValueError as error:
    print(error)

# %% [markdown]
# ## One device and three
#
# Each device reads its own rows and columns from the file. The text is the same.

# %%
TOKENS = 12 if FAST else 48
HEAD = {"method": "eagle3", "model": "smollm2-135m-instruct-eagle3", "num_speculative_tokens": 2}
CHAT = [{"role": "user", "content": "Why is the sky blue?"}]
texts = {}
for size in (1, 3):
    llm = LLM(model=MODEL, dtype="float32", tensor_parallel_size=size, max_num_seqs=1, speculative_config=HEAD)
    [output] = llm.chat([CHAT], SamplingParams(max_tokens=TOKENS))
    texts[size] = output.outputs[0].token_ids
    held = {}
    from flax import nnx

    for array in jax.tree.leaves(nnx.state(llm.target.model)):
        for shard in array.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    print(f"{size} devices, MB held by each: {[round(number / 1e6) for number in held.values()]}")
    print(output.outputs[0].text)
print("the same tokens:", texts[1] == texts[3])

# %% [markdown]
# ## What to expect on real devices
#
# Each layer of the target adds two sums over all devices. Within one host they are cheap beside reading the weights of a large model; a small
# model is slower on several devices than on one. The draft head is split like the target by default; with
# `draft_tensor_parallel_size` 1 it stays whole on each device, and drafting communicates nothing.
