"""What the output of a request must match, from the fields that OpenAI and vLLM have for it.

`response_format` is OpenAI's; `structured_outputs` and `guided_*` are vLLM's. They are not checked further here:
whoever compiles the grammar, beside the engine, refuses what cannot be enforced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from penstock.core.errors import InvalidRequest
from penstock.core.request import Grammar
from penstock.gateway.api.openai_types import ResponseFormat, SamplingFields
from penstock.gateway.errors import require

ANY_OBJECT = '{"type":"object"}'

_ESCAPED = {character: f"\\{character}" for character in r"\.+*?()|[]{}^$/"} | {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def grammar_of(body: SamplingFields) -> Grammar | None:
    """The one that the request asks for. More than one is refused."""
    found = [*_asked(body)]
    if len(found) > 1:
        names = " and ".join(dict.fromkeys(grammar.param for grammar in found))
        raise InvalidRequest(f"only one thing can be what the output must match, not {names}", param=found[1].param)
    return found[0] if found else None


def _asked(body: SamplingFields) -> Iterator[Grammar]:
    if body.response_format is not None:
        yield from _of_format(body.response_format)
    wanted = body.structured_outputs
    if wanted is not None:
        asked = (wanted.json, wanted.regex, wanted.choice, wanted.grammar, wanted.json_object)
        given = sum(value is not None and value is not False for value in asked)
        require(given == 1, "structured_outputs", "must have one of json, regex, choice, grammar and json_object")
        yield from _of_fields("structured_outputs.", wanted.json, wanted.regex, wanted.choice, wanted.grammar)
        if wanted.json_object:
            yield Grammar("json_schema", ANY_OBJECT, param="structured_outputs.json_object")
    yield from _of_fields("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)


def _of_format(wanted: ResponseFormat) -> Iterator[Grammar]:
    fields = {"response_format.schema": wanted.schema, "response_format.value": wanted.value}
    schemas = [(param, schema) for param, schema in fields.items() if schema is not None]
    for param, _ in schemas[1 if wanted.type == "json_object" else 0 :]:
        raise InvalidRequest(f"{param} is for the type json_object, which has one schema", param=param)
    if wanted.type == "json_object":
        param, schema = schemas[0] if schemas else ("response_format", ANY_OBJECT)
        yield Grammar("json_schema", _source(schema), param=param)
    elif wanted.type == "json_schema":
        given = wanted.json_schema
        if given is None or given.schema is None:
            raise InvalidRequest("response_format.json_schema.schema is required", param="response_format.json_schema")
        yield Grammar("json_schema", _source(given.schema), param="response_format.json_schema.schema")


def _of_fields(
    prefix: str, schema: Any, regex: str | None, choices: list[str] | None, grammar: str | None
) -> Iterator[Grammar]:
    """The fields that vLLM calls by the same names in both of its ways to ask."""
    if schema is not None:
        yield Grammar("json_schema", _source(schema), param=f"{prefix}json")
    if regex is not None:
        yield Grammar("regex", regex, param=f"{prefix}regex")
    if choices is not None:
        yield Grammar("regex", _alternatives(choices), param=f"{prefix}choice")
    if grammar is not None:
        yield Grammar("lark", grammar, param=f"{prefix}grammar")


def _source(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _alternatives(choices: list[str]) -> str:
    """A regular expression: a grammar of as many rules would be far slower."""
    return "|".join("".join(_ESCAPED.get(c, c) for c in choice) for choice in choices)
