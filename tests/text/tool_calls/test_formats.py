"""Which format a template has, and how conversations with calls render in it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.text.chat_template import ChatTemplate
from penstock.text.reasoning import find_reasoning
from penstock.text.tokenizer import Tokenizer
from penstock.text.tool_calls.formats import find_format
from tests.families import TEMPLATES, TOKENS

CALL: dict[str, Any] = {  # the type may be left out
    "id": "call_0123456789abcdef",
    "function": {"name": "weather", "arguments": '{"city": "Zürich", "days": 3}'},
}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": CALL["id"], "content": "rain"},
]
JSON = '{"city": "Zürich", "days": 3}'
RENDERED = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call><|im_end|>',
    "llama3": f'{{"name": "weather", "parameters": {JSON}}}<|eot_id|>',
    "mistral": f'{{"name": "weather", "arguments": {JSON}, "id": ',
    "deepseek": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>",
    "qwen3_coder": "<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>",
}


def source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("arguments", ["text", "object"])
def test_calls_sent_back_render_as_the_family_writes_them(name: str, arguments: str) -> None:
    template = ChatTemplate(source(name))
    messages = CONVERSATION
    if arguments == "object":
        function = {"name": "weather", "arguments": {"city": "Zürich", "days": 3}}
        messages = [messages[0], {**messages[1], "tool_calls": [{**CALL, "function": function}]}, messages[2]]
    text = template.render(messages)
    assert RENDERED[name] in text
    assert "rain" in text


def test_ids_that_a_template_refuses_are_shortened_alike_in_call_and_result() -> None:
    text = ChatTemplate(source("mistral")).render(CONVERSATION)
    sent = text.partition('"id": "')[2][:9]
    assert sent.isalnum()
    assert f'"call_id": "{sent}"' in text


def test_a_template_that_writes_arguments_as_they_are_gets_json() -> None:
    plain = "{% if tools %}{% endif %}{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments }}"
    assert ChatTemplate(f"{plain}{{% endfor %}}{{% endfor %}}").render(CONVERSATION) == JSON


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        *((source(name), name) for name in TOKENS),
        ("{% if tools %}{% endif %}[TOOL_CALLS]{{ name }}[ARGS]", "mistral_v11"),
        ("{% if tools %}{% endif %}<｜tool▁calls▁begin｜>{{ name }}<｜tool▁sep｜>", "deepseek_v31"),
        ("{% if tools %}{% endif %}<|python_tag|>", "llama3"),
        ("{% if tools %}some format of its own{% endif %}", None),
        ("{{ messages }}", "hermes"),  # as the tools are described to it
    ],
)
def test_the_format_is_found_from_the_template(template: str, expected: str | None) -> None:
    assert find_format(template, ChatTemplate(template).knows_tools) == expected


def test_the_built_in_model(tokenizer: Tokenizer) -> None:
    template = tokenizer.chat_template
    assert template is not None
    assert find_format(template, ChatTemplate(template).knows_tools) == "hermes"
    assert find_reasoning(template) is None
