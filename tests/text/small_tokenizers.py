"""Small tokenizers of the two kinds that exist: by bytes (Llama 3) and by sentencepiece pieces (Llama 2)."""

import json

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog " * 3,
    "STOP stop. The end. naïve café 日本語 😀😀 1234 5678\n",
] * 4
SPECIAL = ["<|begin|>", "<|end|>", "<|pad|>"]


def byte_level_backend(adds_bos: bool = True) -> tokenizers.Tokenizer:
    """Byte-level BPE with 256 bytes, some merges, three special tokens and two ordinary added ones."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    # The first is spelled in the byte alphabet although it is no byte token, the second is not.
    backend.add_tokens([AddedToken("naïf", normalized=False), AddedToken("two words", normalized=False)])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", backend.token_to_id("<|begin|>"))]
        )
    return backend


def sentencepiece_metadata() -> dict:
    """GGUF metadata of a Llama-2 style vocabulary: control tokens, all 256 bytes, a few scored pieces."""
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz.", "▁t", "he", "▁the", "▁▁", "an", "and", "▁and", "▁a", "é"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *pieces, "<tool>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def write_folder(folder, backend=None, config=None, **files):
    """Writes a model folder's tokenizer files; `files` maps a name with its dot as "__" to JSON or text."""
    folder.mkdir(exist_ok=True)
    (backend or byte_level_backend()).save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder
