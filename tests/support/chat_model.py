"""A tiny model with a tokenizer and a chat template, in place of a real one."""

import json
import shutil
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
CHAT_TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"


def write_tokenizer(folder: Path, *, chat: bool) -> None:
    """Byte-level BPE that gives each of the 512 ids of the golden target a text; its special tokens are those of the target."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog"], trainer)
    backend.add_tokens([f"w{id_}," for id_ in range(backend.get_vocab_size(), 512)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    if chat:
        config["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_chat_model(folder: Path, *, chat: bool = True) -> str:
    """Copies the golden target `target_A` to a new folder and gives it a tokenizer; returns the folder."""
    shutil.copytree(GOLDEN / "target_A", folder)
    write_tokenizer(folder, chat=chat)
    return str(folder)


def write_shallow_models(folder: Path, layers: int = 3) -> tuple[str, str]:
    """A chat model of the golden target's first layers, and its head reading them: they compile quickly and agree rarely.

    Returns:
      The folders of the model and of the head.
    """
    model, head = Path(write_chat_model(folder / "shallow")), folder / "shallow_head"
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (model / "model.safetensors.index.json").unlink()
    kept = tuple(f"model.layers.{layer}." for layer in range(layers))
    save_file(
        {name: x for name, x in tensors.items() if ".layers." not in name or name.startswith(kept)},
        model / "model.safetensors",
    )
    shutil.copytree(GOLDEN / "head_A_e3", head)
    for config, values in (
        (model, {"num_hidden_layers": layers}),
        (head, {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}),
    ):
        path = config / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return str(model), str(head)
