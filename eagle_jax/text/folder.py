"""The tokenizer files of a Hugging Face model folder."""

import dataclasses
import json
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers

from eagle_jax.text.post_processor import set_added_tokens

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Vocabularies that only the Python tokenizer of the model can read.
_UNCONVERTED = ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "merges.txt", "vocab.txt", "*.tiktoken")


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """What the tokenizer files of a folder say."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]  # by Hugging Face name: "bos_token", ...
    chat_template: str | None


def read_tokenizer_folder(path: str | PathLike[str]) -> TokenizerFiles | None:
    """Reads the tokenizer of a folder, or None if it has none; `Tokenizer.from_folder` lists files and errors."""
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(f"no such folder: {folder}")
    if not folder.is_dir():
        raise NotADirectoryError(f"not a folder: {folder}")
    if not (folder / "tokenizer.json").is_file():
        found = sorted(file.name for pattern in _UNCONVERTED for file in folder.glob(pattern))
        if not found:
            return None
        raise ValueError(
            f"{folder} has {', '.join(found)} but no tokenizer.json. Convert it once with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    backend = _read_backend(folder / "tokenizer.json")
    config_file = folder / "tokenizer_config.json"
    config = _read_json(config_file)
    # A null in tokenizer_config.json says that there is no such token; a missing key says nothing.
    named = {**_read_json(folder / "special_tokens_map.json"), **config}
    special_tokens = _special_tokens(named, backend, folder)
    _set_bos_eos(backend, special_tokens, config, config_file)
    return TokenizerFiles(backend, special_tokens, _chat_template(folder, config))


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises bare Exception
        raise ValueError(f"{file} is not a file that tokenizers {tokenizers.__version__} can read: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content


def _special_tokens(named: dict[str, Any], backend: tokenizers.Tokenizer, folder: Path) -> dict[str, str]:
    special_tokens = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = named.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if value is None:
            continue
        if not isinstance(text, str):
            raise ValueError(f"{name} in {folder} must be a string or an object with a string content, got {value!r}")
        if backend.token_to_id(text) is None:
            raise ValueError(f"{name} in {folder} is {text!r}, which is not in the vocabulary of tokenizer.json")
        special_tokens[name] = text
    return special_tokens


def _set_bos_eos(
    backend: tokenizers.Tokenizer, special_tokens: dict[str, str], config: dict[str, Any], config_file: Path
) -> None:
    """Makes `backend` follow add_bos_token and add_eos_token, which win over what tokenizer.json does."""
    bos, eos = special_tokens.get("bos_token"), special_tokens.get("eos_token")
    added = backend.encode("").ids
    adds_bos = bos is not None and added[:1] == [backend.token_to_id(bos)]
    adds_eos = eos is not None and added[int(adds_bos) :][-1:] == [backend.token_to_id(eos)]
    want_bos = _flag(config, "add_bos_token", adds_bos, config_file)
    want_eos = _flag(config, "add_eos_token", adds_eos, config_file)
    for name, want, token in (("bos_token", want_bos, bos), ("eos_token", want_eos, eos)):
        if want and token is None:
            raise ValueError(f"{config_file} sets add_{name} but names no {name}")
    if (want_bos, want_eos) != (adds_bos, adds_eos):
        set_added_tokens(backend, bos if want_bos else None, eos if want_eos else None)


def _flag(config: dict[str, Any], name: str, default: bool, config_file: Path) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} in {config_file} must be true or false, got {value!r}")
    return default if value is None else value


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template; a file of its own wins over tokenizer_config.json, as in Hugging Face."""
    jinja_file, json_file = folder / "chat_template.jinja", folder / "chat_template.json"
    if jinja_file.is_file():
        return jinja_file.read_text(encoding="utf-8")
    source: Path = json_file if json_file.is_file() else folder / "tokenizer_config.json"
    template = _read_json(json_file).get("chat_template") if source is json_file else config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        if "default" not in named:
            raise ValueError(
                f'chat_template in {source} is a list without a "default" entry: {sorted(map(str, named))}'
            )
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise ValueError(f"chat_template in {source} must be a string or a list, got {type(template).__name__}")
    return template
