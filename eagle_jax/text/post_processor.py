"""The step of a `tokenizers` pipeline which puts BOS in front of a text and EOS behind it."""

import tokenizers
from tokenizers import processors


def set_added_tokens(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes `backend` add the token `bos` before and `eos` after every text; None adds nothing there."""
    named = [(name, token) for name, token in (("bos", bos), ("eos", eos)) if token is not None]
    # The template speaks of "bos" and "eos", because the text of a token may hold characters (":", "$") that mean
    # something in a template.
    backend.post_processor = processors.TemplateProcessing(
        single=[*(["bos"] if bos is not None else []), "$A", *(["eos"] if eos is not None else [])],
        special_tokens=[{"id": name, "ids": [backend.token_to_id(text)], "tokens": [text]} for name, text in named],
    )
