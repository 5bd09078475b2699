from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from penstock.core.errors import InvalidRequest
from penstock.text.chat_template import ChatTemplate
from penstock.text.tokenizer import Tokenizer

USER: dict[str, Any] = {"role": "user", "content": "hi"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL: dict[str, Any] = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Zürich"}'},
}

ECHO = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [{"role": "system", "content": "be brief"}, USER],
        [USER, {"role": "assistant", "content": "<b>hello</b> & ünï"}, USER],
    ],
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_built_in_template_renders_as_in_transformers(
    tokenizer: Tokenizer, reference: Any, messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    ours = ChatTemplate(tokenizer.chat_template).render(messages, add_generation_prompt=add_generation_prompt)
    theirs = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert ours == theirs


FEATURES = """
{%- if tools %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {% endfor %}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {% if message.role == "skipped" %}{% continue %}{% endif %}
    {%- if message.role == "assistant" %}
        {%- generation %}{{ message.content }}{% for call in message.tool_calls %}
{{ call.function.name }}{{ call.function.arguments | tojson }}{% for k, v in call.function.arguments.items() %}
{{ k }}={{ v }};{% endfor %}{% endfor %}
{% endgeneration %}
    {%- else %}
        {{- message.role + ": " + message.content }}
    {%- endif %}
    {%- if loop.index == 5 %}{% break %}{% endif %}
{%- endfor %}
{{- eos_token if not add_generation_prompt }}{{ "deep" if thinking is defined and thinking }}
{%- set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}
"""


@pytest.mark.parametrize("thinking", [True, False])
def test_what_templates_use_renders_as_in_transformers(reference: Any, thinking: bool) -> None:
    parsed = {**CALL, "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    history: list[dict[str, Any]] = [
        {"role": "system", "content": "<&>"},
        {"role": "skipped", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        USER,
        {"role": "user", "content": "never shown"},
    ]
    theirs = reference.apply_chat_template(
        [{**m, "tool_calls": [parsed]} if "tool_calls" in m else m for m in history],
        chat_template=FEATURES, tools=[WEATHER], tokenize=False, thinking=thinking,
    )  # fmt: skip
    ours = ChatTemplate(FEATURES).render(
        history, tools=[WEATHER], add_generation_prompt=False,
        bos_token="<|im_start|>", eos_token="<|im_end|>", thinking=thinking,
    )  # fmt: skip
    assert ours == theirs
    assert '{"city": "Zürich"}' in ours


@pytest.mark.parametrize("arguments", ['{"city": "Zür', "[1]", "no JSON"])
def test_arguments_that_are_no_object_come_back_as_they_were_written(tokenizer: Tokenizer, arguments: str) -> None:
    """As those of a call that was cut off: the model is shown what it wrote, so that it can try again."""
    cut: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "not valid JSON"},
    ]
    quoted = json.dumps(arguments, ensure_ascii=False)
    calls = "{% for m in messages %}{% for call in m.tool_calls or () %}"
    ends = "{% endfor %}{% endfor %}{{ tools }}"
    spelled_out = ChatTemplate(tokenizer.chat_template).render(cut, tools=[WEATHER])
    assert f'<tool_call>\n{{"name": "weather", "arguments": {quoted}}}\n</tool_call>' in spelled_out
    assert quoted in ChatTemplate(f"{calls}{{{{ call.function.arguments | tojson }}}}{ends}").render(cut)
    as_text = ChatTemplate(f"{calls}{{{{ 'arguments: ' + call.function.arguments }}}}{ends}").render(cut)
    assert f"arguments: {arguments}" in as_text


def test_no_calls_are_as_no_list_of_them() -> None:
    """Templates of Llama and Mistral ask for the list alone. Some servers send an empty one, which clients repeat."""
    asks = """{% for m in messages %}{% if 'tool_calls' in m or m.tool_calls is defined %}[TOOL_CALLS][
    {%- else %}{{ m.content }}{% endif %}{% endfor %}{{ tools }}"""
    said = [USER, {"role": "assistant", "content": "hello", "tool_calls": []}]
    assert ChatTemplate(asks).render(said).startswith("hihello")


def test_tools_reach_a_model_whose_template_has_none(tokenizer: Tokenizer) -> None:
    history: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "warm"},
    ]
    prompt = ChatTemplate(tokenizer.chat_template).render(history, tools=[WEATHER])
    system, user, assistant, results, rest = prompt.split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nbe brief\n\n")
    assert '<tools>\n{"name": "weather", "parameters"' in system
    assert user == "<|im_start|>user\nhi"
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    assert assistant == f"<|im_start|>assistant\n{call}\n{call}"
    answers = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nwarm\n</tool_response>"
    assert results == f"<|im_start|>user\n{answers}"
    assert rest == "<|im_start|>assistant\n"


def test_a_template_of_its_own_for_tools_renders_chats_with_them() -> None:
    """As Hermes 2 Pro and 3 have it."""
    both = ChatTemplate(ECHO, "{{ tools[0].function.name }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert both.render([USER]) == both.render([USER], tools=[]) == "[user:hi]"
    assert both.render([USER], tools=[WEATHER]) == "weatherhi"
    assert both.knows_tools


def test_tools_without_a_system_message_get_one(tokenizer: Tokenizer) -> None:
    prompt = ChatTemplate(tokenizer.chat_template).render([USER], tools=[WEATHER])
    assert prompt.startswith("<|im_start|>system\nYou may call these functions")
    assert prompt.count("<|im_start|>system") == 1


PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
BOTH = """
{%- for m in messages %}
    {%- if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}
{%- endfor %}"""
ONLY_PARTS = "{% for m in messages %}{% for p in m['content'] %}<{{ p['text'] }}>{% endfor %}{% endfor %}"


def test_no_part_of_what_others_than_the_user_say_is_lost() -> None:
    """Templates of Mistral read the first part of a system prompt alone, and write a result as Python has it."""
    template = """
    {%- for m in messages %}
        {%- if m.role == "tool" %}{{ m.content | string }}
        {%- elif m.content is string %}{{ m.content }}
        {%- elif m.role == "user" %}{% for part in m.content %}{{ part.text }}{% endfor %}
        {%- else %}{{ m.content[0].text }}{% endif %}
    {%- endfor %}{{ tools }}"""
    for role in ("system", "assistant", "tool"):
        said = [USER, {**PARTS[0], "role": role, "tool_call_id": "c1"}]
        assert ChatTemplate(template).render(said).startswith("hione\ntwo")


@pytest.mark.parametrize(
    ("template", "from_parts", "from_string"),
    [(ECHO, "[user:one\ntwo]", "[user:hi]"), (BOTH, "<one><two>", "hi"), (ONLY_PARTS, "<one><two>", "<hi>")],
)
def test_content_comes_in_the_form_the_template_reads(template: str, from_parts: str, from_string: str) -> None:
    assert ChatTemplate(template).render(PARTS) == from_parts
    assert ChatTemplate(template).render([USER]) == from_string


def test_developer_is_the_system_to_templates_that_do_not_know_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert ChatTemplate(ECHO).render(messages) == "[system:x]"
    assert ChatTemplate(ECHO + "{% if messages[0].role == 'developer' %}!{% endif %}").render(messages).endswith("!")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}],
            "messages[0].tool_calls[0]",
        ),
    ],
)
def test_bad_messages_are_named(messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(ECHO).render(messages)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].absent.name }}", "has no attribute 'absent'"),
        ("{{ messages[0].content + 1 }}", "concatenate str"),
        ("{{ messages.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", r"items of range\(\)"),
        ("{{ 'ab' * 10**9 }}", "repetition exceeds"),
        ("{{ [1] * 10**9 }}", "repetition exceeds"),
        ("{{ 9 ** 99 }}", "exponent exceeds"),
        ("{% set big = 'a' * 2**20 %}{% for i in range(64) %}{{ big }}{% endfor %}", "output exceeds"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% if %}", "does not compile.*v1/completions"),
    ],
)
def test_a_template_that_fails_or_never_ends_is_an_invalid_request(template: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        ChatTemplate(template).render([USER])
    assert caught.value.param == "messages"


def test_a_model_without_template_points_to_completions() -> None:
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        ChatTemplate(None).render([USER])


@pytest.mark.parametrize("template_kwargs", [{"messages": []}, {"range": 1}, {"self": 1, "n": "x"}])
def test_bad_template_kwargs_are_named(template_kwargs: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate("{% for i in range(n) %}{% endfor %}").render([USER], **template_kwargs)
    assert caught.value.param == "chat_template_kwargs"


def test_rendering_leaves_the_callers_messages_alone() -> None:
    call, result = {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "x"}
    messages: list[dict[str, Any]] = [call, result]
    before = repr(messages)
    ChatTemplate(ECHO).render(messages, tools=[WEATHER])
    assert repr(messages) == before


NO_FILES = """
import errno, os, resource, sys
from penstock.text import template_sandbox
from penstock.text.chat_template import ChatTemplate
if sys.argv[1] == "loaded":
    import jinja2.debug
template = ChatTemplate("{% for message in messages %}{{ message['content'] }}{% endfor %}")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
try:
    template.render([{"role": "user", "content": "Hi"}])
except OSError as error:
    assert error.errno == errno.EMFILE
    for descriptor in held:
        os.close(descriptor)
    print(template.render([{"role": "user", "content": "Hi"}]))
"""


@pytest.mark.parametrize("debug", ["loaded", "not yet"])
def test_a_machine_out_of_file_descriptors_is_not_the_templates_fault(debug: str) -> None:
    """Compiling loads a module of Python's; when that fails, Jinja says that the syntax is wrong."""
    done = subprocess.run([sys.executable, "-c", NO_FILES, debug], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("Hi\n", 0), done.stderr
