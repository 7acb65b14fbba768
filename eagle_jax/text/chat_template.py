"""Chat templates, rendered as Hugging Face `apply_chat_template` renders them.

A chat template is a Jinja program that comes with the weights, so it is untrusted: it runs in Jinja's immutable
sandbox and sees plain data only.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_SET_BY_US = frozenset({"messages", "add_generation_prompt"})


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    template_variables: Mapping[str, Any] | None = None,
) -> str:
    """Renders a conversation into the text that the model was trained to continue.

    Args:
        template: Jinja source of the chat template.
        messages: the conversation, oldest first; each message is a dict with a str "role", a str "content" and
            whatever else the template reads.
        add_generation_prompt: whether to end with the header of the assistant's next message.
        special_tokens: text of the special tokens by their name in the template ("bos_token", "eos_token", ...).
        template_variables: further variables that this template reads, e.g. `{"enable_thinking": False}`. They win
            over `special_tokens`.

    Raises:
        TypeError: `messages` is not a sequence of dicts with str role and content.
        ValueError: `messages` is empty, the template is not valid Jinja or refuses the messages, or
            `template_variables` holds a variable that has its own argument.
    """
    _check_messages(messages)
    variables = dict(template_variables or {})
    if clash := sorted(_SET_BY_US & variables.keys()):
        raise ValueError(f"template_variables may not hold {clash}: these have arguments of their own")
    compiled = _compile(template)
    # Templates test `tools` and `documents` against none, so they exist even when nobody passed any.
    context: dict[str, Any] = {"tools": None, "documents": None, **(special_tokens or {}), **variables}
    try:
        return compiled.render(messages=messages, add_generation_prompt=add_generation_prompt, **context)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refused the messages: {error}") from error


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(f"messages must be a list of dicts with role and content, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages is empty: a chat needs at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{index}] must be a dict with role and content, got {type(message).__name__}")
        for key in ("role", "content"):
            if key not in message:
                raise TypeError(f"messages[{index}] has no {key!r}; its keys are {sorted(map(str, message))}")
            if not isinstance(message[key], str):
                raise TypeError(f"messages[{index}][{key!r}] must be a str, got {type(message[key]).__name__}")


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid Jinja, line {error.lineno}: {error.message}") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML and sorts the keys; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`, which marks the assistant's words for training, renders its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration is a plain set)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @staticmethod
    def _body(caller: Callable[[], str]) -> str:
        return caller()
