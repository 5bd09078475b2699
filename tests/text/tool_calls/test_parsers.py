"""Every format, whole and in pieces: how a text is divided must not change what is read of it."""

from __future__ import annotations

import json
import os
import random
from itertools import chain
from typing import Any

import pytest

from penstock.core.request import ReasoningStart
from penstock.text.reasoning import ReasoningParser
from penstock.text.tool_calls.formats import FORMATS, ToolFormatName
from penstock.text.tool_calls.parser import CallDelta, Function, Piece

CASES = int(os.environ.get("CHUNKING_CASES", "3000"))  # of random texts, for all formats together

WEATHER = Function(
    "weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
    },
)
ADD = Function("add", {"type": "object", "properties": {"x": {"type": "number"}}})
FUNCTIONS = (WEATHER, ADD)

Read = tuple[str, list[tuple[str, str]]]


def read(name: ToolFormatName, pieces: list[str], most_calls: int | None = None) -> Read:
    """Content, and the calls by name and arguments."""
    parser = FORMATS[name].parser(FUNCTIONS, most_calls)
    content = ""
    calls: list[list[str]] = []
    for delta in chain(*map(parser.feed, pieces), parser.finish()):
        if isinstance(delta, str):
            content += delta
            continue
        if delta.id:
            assert delta.index == len(calls)
            assert len(delta.id) == 9
            calls.append([delta.name, ""])
        assert delta.index == len(calls) - 1
        calls[-1][1] += delta.arguments
    return content, [(name, arguments) for name, arguments in calls]


BONN = '{"city": "Bonn", "days": 3}'
TRICKY = '{"city": "a \\"}{\\\\ </tool_call> é \\u00e9", "tags": [{}, [], "]"], "x": {"y": -1.5e3}}'
SEP = "<｜tool▁sep｜>"


def deepseek(*calls: tuple[str, str]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function{SEP}{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def coder(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


GOOD: list[tuple[ToolFormatName, str, Read]] = [
    ("hermes", hermes("weather", BONN), ("", [("weather", BONN)])),
    ("hermes", f"Let me see.\n\n{hermes('add', '{}')}\n", ("Let me see.", [("add", "{}")])),
    ("hermes", f"{hermes('weather', TRICKY)}\n{hermes('add', '{}')}", ("", [("weather", TRICKY), ("add", "{}")])),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "add"}</tool_call>', ("", [("add", '{"x": 1}')])),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', ("", [("add", "{}")])),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"x\\": 1}"}</tool_call>', ("", [("add", '{"x": 1}')])),
    ("hermes", '<tool_call>{"id": 7, "name": "new", "arguments": null}</tool_call>', ("", [("new", "{}")])),
    ("hermes", f"{hermes('add', '{}')} and then", ("and then", [("add", "{}")])),
    (
        "hermes",
        f'<tool_call>[{{"name": "weather", "arguments": {BONN}}}, {{"name": "add"}}]</tool_call>',
        ("", [("weather", BONN), ("add", "{}")]),
    ),
    ("hermes", " two  words < 3 <tool_ \n", (" two  words < 3 <tool_ \n", [])),
    ("llama3", f'{{"name": "weather", "parameters": {BONN}}}', ("", [("weather", BONN)])),
    ("llama3", f'<|python_tag|>{{"name": "other", "parameters": {BONN}}}', ("", [("other", BONN)])),
    (
        "llama3",
        f'\n{{"type": "function", "name": "weather", "parameters": {BONN}}}; {{"name": "add", "parameters": {{}}}}',
        ("", [("weather", BONN), ("add", "{}")]),
    ),
    ("llama3", "Plain {text}", ("Plain {text}", [])),
    (
        "mistral",
        f'ok[TOOL_CALLS] [{{"name": "weather", "arguments": {BONN}}}, {{"name": "add", "arguments": {{}}}}]',
        ("ok", [("weather", BONN), ("add", "{}")]),
    ),
    ("mistral", '[TOOL_CALLS]{"name": "add", "arguments": {}}', ("", [("add", "{}")])),
    (
        "mistral_v11",
        f"[TOOL_CALLS]weather[ARGS]{TRICKY}[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{{}}",
        ("", [("weather", TRICKY), ("add", "{}")]),
    ),
    ("mistral_v11", "[TOOL_CALLS]add{}", ("", [("add", "{}")])),
    (
        "qwen3_coder",
        f"So:\n{coder('weather', city='<b> is</b>', days='3', tags='[1, 2]')}\n{coder('add')}",
        ("So:", [("weather", '{"city": "<b> is</b>", "days": 3, "tags": [1, 2]}'), ("add", "{}")]),
    ),
    ("qwen3_coder", coder("weather", city="7", days="soon"), ("", [("weather", '{"city": "7", "days": "soon"}')])),
    (
        "deepseek",
        f"ok\n{deepseek(('weather', BONN), ('add', '{}'))}",
        ("ok", [("weather", BONN), ("add", "{}")]),
    ),
    (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add{SEP}{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("", [("add", "{}")]),
    ),
]
# What is no call is content, to the letter.
BAD: list[tuple[ToolFormatName, str]] = [
    ("hermes", "<tool_call>\nweather(Bonn)\n</tool_call>"),
    ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call> {"na'),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>[7, 8]</tool_call>"),
    ("llama3", '{"name": "Anna", "parameters": {}, "age": 7}'),
    ("llama3", '{"answer": [1, 2'),
    ("llama3", "<|python_tag|>print(7)"),
    ("mistral", "[TOOL_CALLS] I would rather not {"),
    ("mistral", "[TOOL_CALLS][7]"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral_v11", "[TOOL_CALLS]weath"),
    ("qwen3_coder", "<tool_call>\n<func>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=wea"),
    ("deepseek", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function{SEP}weather"),
    ("deepseek", "<｜tool▁call▁begin｜>weather<｜tool▁call▁end｜>"),
    ("deepseek", "<｜tool▁calls▁begin｜> hello {"),
]
# A call that was begun stays one, with as much of its arguments as there is.
CUT: list[tuple[ToolFormatName, str, Read]] = [
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Bo', ("", [("weather", '{"city": "Bo')])),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"x": 1</tool_call> so', ("so", [("add", '{"x": 1')])),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}}</tool_call>', ("}", [("add", "{}")])),
    ("mistral_v11", '[TOOL_CALLS]add[ARGS]{"x"', ("", [("add", '{"x"')])),
    ("qwen3_coder", coder("weather", city="Bonn and")[:60], ("", [("weather", '{"city": "Bonn and')])),
]


@pytest.mark.parametrize(("name", "text", "expected"), [*GOOD, *CUT, *((name, text, (text, [])) for name, text in BAD)])
def test_content_and_calls(name: ToolFormatName, text: str, expected: Read) -> None:
    assert read(name, [text]) == expected
    assert read(name, list(text)) == expected, "a character at a time"


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"x": 1}}'),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n</function>"),
    ],
)
def test_an_end_tag_that_was_cut_off_is_no_content(name: ToolFormatName, call: str) -> None:
    end = "\n</tool_call>"
    for length in range(len(end) + 1):
        assert read(name, [call + end[:length]]) == ("", [("add", '{"x": 1}')])
    assert read(name, [call + end + "\n</tool"])[0] == "</tool"
    assert read(name, [call + "\n</tooth>"])[0] == "</tooth>"


def test_no_more_calls_than_asked_for() -> None:
    text = f"one: {hermes('weather', BONN)} two: {hermes('add', '{}')} three"
    parser = FORMATS["hermes"].parser(FUNCTIONS, 1)
    pieces = parser.feed(text)
    assert parser.full
    content = [piece for piece in pieces if isinstance(piece, str)]
    assert {piece.index for piece in pieces if isinstance(piece, CallDelta)} == {0}
    assert ("".join(content), parser.finish()) == ("one:two:", [])


OPTIONAL_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}  # as pydantic writes `str | None`


def arguments_of(pieces: list[Piece]) -> str:
    return "".join(piece.arguments for piece in pieces if isinstance(piece, CallDelta))


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "string"}, "True", "True"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "integer"}, "soon", "soon"),
        (OPTIONAL_TEXT, "53111", "53111"),
        (OPTIONAL_TEXT, "true", "true"),
        (OPTIONAL_TEXT, "null", None),
        (OPTIONAL_TEXT, '"quoted"', "quoted"),  # as a grammar has it
        ({"type": ["string", "integer"]}, "7", 7),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"anyOf": [{"$ref": "#/$defs/Day"}, {"type": "null"}]}, '{"a": 1}', {"a": 1}),
        ({}, "[1]", [1]),
    ],
)
def test_bare_values_are_of_a_type_that_the_schema_allows(schema: Any, value: str, expected: Any) -> None:
    function = Function("f", {"type": "object", "properties": {"key": schema}})
    parser = FORMATS["qwen3_coder"].parser([function])
    assert json.loads(arguments_of(parser.feed(coder("f", key=value)))) == {"key": expected}


def test_bare_values_of_a_function_that_says_nothing_of_them_are_text() -> None:
    parser = FORMATS["qwen3_coder"].parser([Function("f", {"type": "object", "properties": None})])
    assert json.loads(arguments_of(parser.feed(coder("f", key="7")))) == {"key": "7"}


def random_json(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 3 else 4)
    if kind == 0:
        return rng.choice([None, True, False, 0, -1, 2.5, 1e300])
    if kind < 4:
        return "".join(rng.choices(['"', "\\", "{", "}", "[", "]", "<", "a", "é", "🌍", "\n", "</tool_call>"], k=4))
    if kind == 4:
        return [random_json(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {f"k{i}": random_json(rng, depth + 1) for i in range(rng.randrange(3))}


def random_text(rng: random.Random, name: ToolFormatName) -> str:
    """Calls, words and pieces of both, in any order and with anything missing."""
    cases = [text for known, text, _ in [*GOOD, *CUT] if known == name]
    cases += [text for known, text in BAD if known == name]
    arguments = json.dumps({"v": random_json(rng)}, ensure_ascii=rng.random() < 0.5)
    whole = {
        "hermes": hermes("weather", arguments),
        "llama3": f'{{"name": "weather", "parameters": {arguments}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {arguments}}}]',
        "mistral_v11": f"[TOOL_CALLS]weather[ARGS]{arguments}",
        "qwen3_coder": coder("weather", city=arguments),
        "deepseek": deepseek(("weather", arguments)),
        "deepseek_v31": deepseek(("weather", arguments)),
    }[name]
    parts = [whole, *rng.choices([*cases, *FORMATS[name].parser.markers, " \n", "so ", "{", '"', "<", "["], k=3)]
    rng.shuffle(parts)
    text = "".join(parts)
    start = rng.randrange(len(text)) if rng.random() < 0.2 else 0
    return text[start : rng.randrange(start, len(text)) if rng.random() < 0.3 else None]


def divided(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(12)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True)]


def test_any_chunking_of_any_text_reads_the_same() -> None:
    rng = random.Random(7)
    names = list(FORMATS)
    for case in range(CASES):
        name = names[case % len(names)]
        text = random_text(rng, name)
        limit = rng.choice([None, None, 1])
        whole, pieces = read(name, [text], limit), divided(rng, text)
        assert read(name, pieces, limit) == whole, (name, text, pieces)


def test_random_arguments_arrive_as_they_were_written() -> None:
    rng = random.Random(11)
    for _ in range(CASES // 10):
        arguments = json.dumps({"v": random_json(rng)}, ensure_ascii=rng.random() < 0.5)
        assert read("hermes", divided(rng, hermes("weather", arguments))) == ("", [("weather", arguments)])
        text = f'[TOOL_CALLS][{{"name": "weather", "arguments": {arguments}}}]'
        assert read("mistral", divided(rng, text)) == ("", [("weather", arguments)])


# ---------------------------------------------------------------- reasoning

THOUGHTS: list[tuple[ReasoningStart, str, str, str]] = [
    ("free", "<think>\nOkay, so\n\n6 < 7\n</think>\n\nYes.", "Okay, so\n\n6 < 7", "Yes."),
    ("free", " \n<think>x</think>y", "x", "y"),
    ("free", " No thoughts <think> here.", "", " No thoughts <think> here."),
    ("free", "<thin", "", "<thin"),
    ("open", "Okay\n</think>\n\n Yes. </think> \n", "Okay", "Yes. </think> \n"),
    ("open", "cut off </thi \n", "cut off </thi \n", ""),
    ("closed", "\n\nYes.", "", "Yes."),
    ("open", "</think>", "", ""),
]


def split(start: ReasoningStart, pieces: list[str]) -> tuple[str, str]:
    parser = ReasoningParser(start)
    parts = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(("start", "text", "reasoning", "answer"), THOUGHTS)
def test_reasoning_is_separated_however_it_comes(start: ReasoningStart, text: str, reasoning: str, answer: str) -> None:
    rng = random.Random(13)
    for pieces in ([text], list(text), *(divided(rng, text) for _ in range(50))):
        assert split(start, pieces) == (reasoning, answer)
