import datetime
import importlib

import pytest
import transformers
from small_tokenizers import byte_level_backend

from eagle_jax.text import Tokenizer, render_chat_template

CHATML = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|begin|>system\nBe brief.<|end|>\n' }}
{% endif %}
    {{- '<|begin|>' + message['role'] + '\n' + message['content'] + '<|end|>' + '\n' }}
{% endfor %}
{% if tools is not none %}tools{% endif %}
{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{%- continue %}{%- endif %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception("no role " + message.role) }}
    {%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<h>' + message['role'] + '</h>\n\n' + message['content'] | trim + eos_token }}
    {%- if message.role == 'assistant' %}{% generation %}{{- message | tojson }}{% endgeneration %}{%- endif %}
{%- endfor %}
{%- if tools is not none %}{{- tools | tojson(indent=2) }}{%- endif %}
{{- ns.count }} {{ date_string }} {{ pad_token }}[{{ unk_token }}]
{%- if add_generation_prompt %}
    {{- '<h>assistant</h>\n\n' }}
{%- endif %}
"""

# What Qwen3's template asks of a renderer: the messages backwards, loop state in a namespace, string methods, and variables that
# may be undefined; thoughts of earlier turns are dropped, and `enable_thinking` false writes an empty thought.
THINKING = """{%- if messages[0].role == 'system' %}
    {{- '<|begin|>system\n' + messages[0].content + '<|end|>\n' }}
{%- endif %}
{%- set ns = namespace(open=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- set result = message.content.startswith('<result>') and message.content.endswith('</result>') %}
    {%- if ns.open and message.role == 'user' and message.content is string and not result %}
        {%- set ns.open = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content, thought = message.content, '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|begin|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content + '<|end|>\n' }}
        {%- else %}
            {{- '<|begin|>' + message.role + '\n' + content + '<|end|>\n' }}
        {%- endif %}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|begin|>' + message.role + '\n' + message.content + '<|end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|begin|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
CHATS = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "Sé breve <b>'&' \"q\"</b>"},
        {"role": "user", "content": "  spaces, {{ braces }} and {% tags %}\n"},
        {"role": "skip", "content": "left out"},
        {"role": "assistant", "content": "日本語 😀", "name": "bot"},
        {"role": "user", "content": ""},
    ],
]
THOUGHTS = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "<think>\nfour\n</think>\n\n4"},
    {"role": "user", "content": "and 3 + 3?"},
    {"role": "assistant", "content": "6", "reasoning_content": "six"},
    {"role": "user", "content": "<result>7</result>"},
]


@pytest.fixture(params=[CHATML, LLAMA3, THINKING], ids=["chatml", "llama3", "qwen3"])
def pair(request):
    """Our tokenizer and that of transformers, with the same vocabulary and template."""
    ours = Tokenizer(byte_level_backend(), special_tokens=SPECIAL, chat_template=request.param)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), **SPECIAL, chat_template=request.param
    )
    return ours, theirs


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_text_and_ids_are_those_of_transformers(pair, messages, prompt):
    ours, theirs = pair
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert ours.render_chat(messages, add_generation_prompt=prompt) == text
    ids = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
    assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == list(ids)


def test_template_variables_reach_the_template(pair):
    ours, theirs = pair
    variables = {"date_string": "1 Jan 2025", "tools": [{"name": "é", "b": 1, "a": "<"}]}
    expected = theirs.apply_chat_template(CHATS[1], tokenize=False, add_generation_prompt=True, **variables)
    assert ours.render_chat(CHATS[1], template_variables=variables) == expected


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_thoughts_are_rendered_as_transformers_renders_them(variables):
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), **SPECIAL, chat_template=THINKING
    )
    expected = theirs.apply_chat_template(THOUGHTS, tokenize=False, add_generation_prompt=True, **variables)
    assert render_chat_template(THINKING, THOUGHTS, special_tokens=SPECIAL, template_variables=variables) == expected


def test_thinking_is_switched_off_by_a_template_variable():
    chat = {"messages": THOUGHTS, "special_tokens": SPECIAL}
    thinking = render_chat_template(THINKING, **chat)
    assert "four" not in thinking, "thoughts of earlier turns are dropped"
    assert "<think>\nsix\n</think>" in thinking
    silent = render_chat_template(THINKING, **chat, template_variables={"enable_thinking": False})
    assert silent == thinking + "<think>\n\n</think>\n\n"


def test_chat_and_its_rendered_text_have_one_bos():
    tokenizer = Tokenizer(byte_level_backend(adds_bos=True), special_tokens=SPECIAL, chat_template=LLAMA3)
    bos = tokenizer.bos_token_id
    ids = tokenizer.apply_chat_template(CHATS[0])
    assert ids[0] == bos
    assert ids.count(bos) == 1
    # The rendered text handed in as a prompt gives the same ids: the BOS in it is the one that encode() would add.
    assert tokenizer.encode(tokenizer.render_chat(CHATS[0])) == ids
    assert tokenizer.encode("hi")[0] == bos
    assert tokenizer.encode("hi").count(bos) == 1
    assert tokenizer.encode("<|begin|><|begin|>hi").count(bos) == 2  # what somebody wrote is never removed
    assert tokenizer.encode("") == tokenizer.encode("<|begin|>") == [bos]


def test_tokenizer_without_automatic_bos_keeps_every_bos_of_the_text():
    tokenizer = Tokenizer(
        byte_level_backend(adds_bos=False), special_tokens=SPECIAL, chat_template="{{ bos_token * 2 }}"
    )
    assert tokenizer.encode("<|begin|><|begin|>") == [tokenizer.bos_token_id] * 2
    assert tokenizer.apply_chat_template(CHATS[0]) == [tokenizer.bos_token_id] * 2


def test_today_is_the_default_date(monkeypatch):
    class Monday(datetime.datetime):
        @classmethod
        def now(cls):
            return cls(2024, 1, 1)

    monkeypatch.setattr(importlib.import_module("eagle_jax.text.chat_template"), "datetime", Monday)
    assert render_chat_template("{{ strftime_now('%Y-%m-%d') }}", CHATS[0]) == "2024-01-01"


def test_tokenizer_without_template_says_so(byte_level):
    with pytest.raises(ValueError, match="no chat template"):
        byte_level.apply_chat_template(CHATS[0])


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ("hi", TypeError, "messages must be a list of dicts .* got str"),
        ({"role": "user", "content": "hi"}, TypeError, "messages must be a list of dicts .* got dict"),
        ([], ValueError, "messages is empty"),
        (["hi"], TypeError, r"messages\[0\] must be a dict"),
        ([{"role": "user"}], TypeError, r"messages\[0\] has no 'content'; its keys are \['role'\]"),
        ([{"role": "user", "content": None}], TypeError, r"messages\[0\]\['content'\] must be a str, got NoneType"),
        ([{"role": 1, "content": "hi"}], TypeError, r"messages\[0\]\['role'\] must be a str, got int"),
    ],
)
def test_wrong_messages_are_refused(messages, error, message):
    with pytest.raises(error, match=message):
        render_chat_template(CHATML, messages)


def test_template_errors_are_explained():
    with pytest.raises(ValueError, match="the chat template refused the messages: no role poet"):
        render_chat_template(LLAMA3, [{"role": "poet", "content": ""}], special_tokens=SPECIAL)
    with pytest.raises(ValueError, match="not valid Jinja, line 2"):
        render_chat_template("a\n{% if %}", CHATS[0])
    with pytest.raises(ValueError, match=r"template_variables may not hold \['messages'\]"):
        render_chat_template(CHATML, CHATS[0], template_variables={"messages": []})


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'other'}) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['json'] }}",
    ],
)
def test_template_runs_in_a_sandbox(attack):
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="refused"):
        render_chat_template(attack, messages)
    assert messages == [{"role": "user", "content": "hi"}]
