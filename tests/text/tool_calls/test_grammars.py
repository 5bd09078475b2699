"""The grammars of all formats, compiled by llguidance: what a parser reads as a call matches, and little else does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from penstock.core.errors import InvalidRequest
from penstock.core.request import Grammar, SamplingParams
from penstock.grammar.compiler import LLGuidance
from penstock.text.output import OutputForm
from penstock.text.tokenizer import Tokenizer
from penstock.text.tool_calls.formats import FORMATS, ToolFormatName
from penstock.text.tool_calls.parser import Function
from tests.families import family

WEATHER = Function(
    "weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer", "minimum": 1}},
    },
    strict=True,
)
ADD = Function("add", {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]})
PING = Function("ping")
FUNCTIONS = (WEATHER, ADD, PING)

# By format: the family whose vocabulary it is tried with, two calls (good), and one with arguments that do not match.
GOOD_ARGUMENTS, BAD_ARGUMENTS = '{"city":"Bonn","days":3}', '{"city":7}'


def hermes(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


def llama3(arguments: str) -> str:
    return f'{{"name": "weather", "parameters": {arguments}}}'


def mistral(arguments: str) -> str:
    return f'[TOOL_CALLS][{{"name": "weather", "arguments": {arguments}}}]'


def mistral_v11(arguments: str) -> str:
    return f"[TOOL_CALLS]weather[ARGS]{arguments}"


def deepseek(arguments: str) -> str:
    call = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def deepseek_v31(arguments: str) -> str:
    call = f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def qwen3_coder(arguments: str) -> str:
    given = json.loads(arguments)
    days = f"<parameter=days>\n{given.get('days', 'many')}\n</parameter>\n"
    city = f"<parameter=city>\n{given['city']}\n</parameter>\n"
    return f"<tool_call>\n<function=weather>\n{city}{days}</function>\n</tool_call>"


CALLS: dict[ToolFormatName, tuple[str, Any]] = {
    "hermes": ("hermes", hermes),
    "llama3": ("llama3", llama3),
    "mistral": ("mistral", mistral),
    "mistral_v11": ("mistral", mistral_v11),
    "qwen3_coder": ("qwen3_coder", qwen3_coder),
    "deepseek": ("deepseek", deepseek),
    "deepseek_v31": ("deepseek", deepseek_v31),
}


def test_every_format_is_tried() -> None:
    assert CALLS.keys() == FORMATS.keys()


class Matcher:
    """Whether texts in the tokens of one vocabulary match grammars, as the engine has them compiled."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pytest.importorskip("llguidance")
        self._tokenizer = tokenizer
        self._grammars = LLGuidance(lambda: tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)

    def accepts(self, grammar: Grammar, text: str) -> bool:
        state = self._grammars.matcher(replace(grammar, after=())).state
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return bool(state.try_consume_tokens(ids) == len(ids) and state.is_accepting())


@pytest.fixture(scope="module", params=list(CALLS))
def case(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> tuple[ToolFormatName, Tokenizer, Matcher, Any]:
    name, call = CALLS[request.param]
    vocabulary = family(tokenizer, name)
    return request.param, vocabulary, Matcher(vocabulary), call


def grammar(name: ToolFormatName, tokenizer: Tokenizer, content: Grammar | None = None, **form: Any) -> Grammar:
    constrained = OutputForm(name, **{"functions": FUNCTIONS, **form}).constrain(
        SamplingParams(grammar=content), tokenizer
    )
    assert constrained.grammar is not None
    return constrained.grammar


def test_forced_calls_match_their_schemas(case: tuple[ToolFormatName, Tokenizer, Matcher, Any]) -> None:
    name, tokenizer, matcher, call = case
    forced = grammar(name, tokenizer, choice="forced")
    assert matcher.accepts(forced, call(GOOD_ARGUMENTS))
    assert not matcher.accepts(forced, call(GOOD_ARGUMENTS)[:-1])
    assert not matcher.accepts(forced, call('{"city":"Bonn","days":0}'))
    assert not matcher.accepts(forced, call(GOOD_ARGUMENTS).replace("weather", "other"))
    assert not matcher.accepts(forced, "Hello")
    named = grammar(name, tokenizer, choice="forced", functions=(PING,), one_call=True)
    assert not matcher.accepts(named, call(GOOD_ARGUMENTS))


def test_free_text_may_hold_calls_that_match(case: tuple[ToolFormatName, Tokenizer, Matcher, Any]) -> None:
    name, tokenizer, matcher, call = case
    free = grammar(name, tokenizer)
    before = "" if name == "llama3" else "Let me < look.\n"
    assert matcher.accepts(free, "Hello, there is nothing to call. 1 < 2")
    assert matcher.accepts(free, before + call(GOOD_ARGUMENTS))
    assert not matcher.accepts(free, before + call('{"city":"Bonn","days":"many"}'))
    assert not matcher.accepts(free, before + call(GOOD_ARGUMENTS).replace("weather", "other"))


def test_content_of_a_schema_beside_calls(case: tuple[ToolFormatName, Tokenizer, Matcher, Any]) -> None:
    name, tokenizer, matcher, call = case
    schema = Grammar(
        "json_schema", '{"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}'
    )
    if name == "llama3":
        with pytest.raises(InvalidRequest, match="JSON without a mark"):
            grammar(name, tokenizer, schema)
        return
    either = grammar(name, tokenizer, schema)
    assert matcher.accepts(either, '{"answer":"yes"}')
    assert matcher.accepts(either, call(GOOD_ARGUMENTS))
    assert not matcher.accepts(either, "Hello")
    with pytest.raises(InvalidRequest, match="JSON schema only"):
        grammar(name, tokenizer, Grammar("regex", "a+"))


def test_a_schema_that_cannot_be_enforced_is_named_by_its_function(
    case: tuple[ToolFormatName, Tokenizer, Matcher, Any],
) -> None:
    name, tokenizer, matcher, _ = case
    for bad, problem in (
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"minProperties": 3}, "minProperties"),
        ({"items": {"type": "string", "pattern": "a\n(?=b)"}}, "look-around, including .* not supported$"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "branches of a oneOf that may overlap"),
    ):
        unlike = Function("my.tool-2", {"type": "object", "properties": {"tags": bad}})
        with pytest.raises(InvalidRequest, match=rf"tools.*arguments of my\.tool-2: .*{problem}") as caught:
            matcher.accepts(grammar(name, tokenizer, choice="forced", functions=(ADD, unlike, PING)), "")
        assert "%json" not in caught.value.message


def test_one_call_or_several(tokenizer: Tokenizer) -> None:
    matcher = Matcher(tokenizer)  # which spells the markers
    twice = f"{hermes(GOOD_ARGUMENTS)}\n{hermes(GOOD_ARGUMENTS)}"
    assert matcher.accepts(grammar("hermes", tokenizer, choice="forced"), twice)
    one = grammar("hermes", tokenizer, choice="forced", one_call=True)
    assert matcher.accepts(one, hermes(GOOD_ARGUMENTS))
    assert not matcher.accepts(one, twice)
    free = grammar("hermes", tokenizer)
    assert matcher.accepts(free, f"One:\n{twice}\nDone.")
    assert not matcher.accepts(free, f"One:\n{hermes(BAD_ARGUMENTS)}\nDone.")


def test_grammar_begins_after_the_reasoning(tokenizer: Tokenizer) -> None:
    thinker = family(tokenizer, "hermes")
    forced = grammar("hermes", thinker, choice="forced", reasoning="open")
    assert forced.after == (thinker.token_id("</think>"),)
    assert Matcher(thinker).accepts(forced, f"\n\n{hermes(GOOD_ARGUMENTS)}")
    for start in ("closed", "free"):
        assert grammar("hermes", thinker, choice="forced", reasoning=start).after == ()
    with pytest.raises(InvalidRequest, match="no token </think>"):
        grammar("hermes", tokenizer, choice="forced", reasoning="open")


def test_functions_that_are_not_strict_take_any_object(tokenizer: Tokenizer) -> None:
    matcher, free = Matcher(tokenizer), grammar("hermes", tokenizer)
    assert matcher.accepts(free, '<tool_call>\n{"name": "add", "arguments": {"y":[]}}\n</tool_call>')
    assert not matcher.accepts(free, '<tool_call>\n{"name": "add", "arguments": 7}\n</tool_call>')
    plain: Sequence[Function] = (ADD, PING)
    assert OutputForm("hermes", tuple(plain)).constrain(SamplingParams(), tokenizer).grammar is None


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({}, "any 'text'", None),
        ({"enum": ["a", "b", None]}, "b", "c"),
        ({"const": "a"}, "a", "b"),
        ({"pattern": "^[0-9]+$"}, '"12"', '"x"'),
        ({"maxLength": 2}, '"ab"', '"abc"'),
        ({"format": "date"}, '"2024-02-29"', '"soon"'),
    ],
)
def test_bare_strings_match_their_schemas(tokenizer: Tokenizer, schema: Any, good: str, bad: str | None) -> None:
    vocabulary = family(tokenizer, "qwen3_coder")
    matcher = Matcher(vocabulary)
    properties = {"key": {"type": "string", **schema}}
    function = Function("f", {"type": "object", "properties": properties, "required": ["key"]})
    forced = grammar("qwen3_coder", vocabulary, choice="forced", functions=(function,))
    call = "<tool_call>\n<function=f>\n<parameter=key>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert matcher.accepts(forced, call.format(good))
    assert bad is None or not matcher.accepts(forced, call.format(bad))
    pieces = FORMATS["qwen3_coder"].parser([function]).feed(call.format(good))
    arguments = "".join(piece.arguments for piece in pieces if not isinstance(piece, str))
    assert json.loads(arguments) == {"key": good.strip('"')}
