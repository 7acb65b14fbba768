"""Where torch and transformers are not installed: targets, heads and GGUF files load, and generate."""

import json
import subprocess
import sys

import torch
from checkpoint_files import head_config, hugging_face_llama, save_head
from gguf_files import gguf_keys, gguf_tensors, write_gguf

GENERATE = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
import json
import jax
from flax import nnx
from eagle_jax import CheckpointError, load_draft, load_target, speculative_generate
folder, gguf, head, torch_head = sys.argv[1:]
target = load_target(folder)
for ours, theirs in zip(*(jax.tree.leaves(nnx.state(t.model)) for t in (target, load_target(gguf))), strict=True):
    assert (ours == theirs).all()
draft = load_draft(head, target)
result = speculative_generate(target, draft, [[1, 5, 9, 2]], max_new_tokens=12, num_speculative_tokens=1, ignore_eos=True)
print(json.dumps(result.token_ids[0]))
try:
    load_draft(torch_head, target)
except CheckpointError as error:
    print(error)
assert not any(name.split(".")[0] in ("torch", "transformers") for name, module in sys.modules.items() if module)
"""


def test_everything_but_bin_works_without_torch(tmp_path):
    model = hugging_face_llama(family="Qwen3", head_dim=8, num_hidden_layers=2, eos_token_id=None)
    model.save_pretrained(tmp_path / "folder")
    keys = gguf_keys(model.config, "qwen3")
    write_gguf(tmp_path / "m.gguf", gguf_tensors(model, "qwen3"), keys, architecture="qwen3")
    save_head(tmp_path / "head", config=head_config(eagle_aux_hidden_state_layer_ids=[0, 1, 2]))
    save_head(tmp_path / "torch", container="torch")
    paths = [str(tmp_path / name) for name in ("folder", "m.gguf", "head", "torch")]
    done = subprocess.run([sys.executable, "-c", GENERATE, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    generated, refusal = done.stdout.splitlines()
    prompt = torch.tensor([[1, 5, 9, 2]])
    wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    assert json.loads(generated) == wanted[0, 4:].tolist()
    assert "torch is not installed: pip install torch, or convert the checkpoint to safetensors" in refusal
