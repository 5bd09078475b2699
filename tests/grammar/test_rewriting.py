"""Schemas as libraries write them, put so that llguidance enforces them."""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress
from itertools import product
from typing import Any

import pytest

from penstock.grammar.compiler import LLGuidance
from penstock.grammar.rewriting import _WITHOUT_LOOK_AHEAD
from penstock.grammar.schema import checked_schema
from penstock.text.tokenizer import Tokenizer
from tests.grammar.masks import Validator, assert_enforced

INT = {"type": "integer"}
ENUM = {"$defs": {"key": {"enum": ["a", "b"], "type": "string", "title": "Key"}}}
CUID2 = {"type": "string", "format": "cuid2", "pattern": "^[0-9a-z]+$"}
UUID4 = "8c5b2a3e-7d1f-4c6a-9b0e-1f2a3b4c5d6e"
DECIMAL, EMAIL = _WITHOUT_LOOK_AHEAD


def listed(names: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "propertyNames": names, "additionalProperties": INT, **more}


@pytest.mark.parametrize(
    ("source", "yes", "no"),
    [
        # zod: z.record(), with any names and with listed ones; pydantic: dict[SomeEnum, int]
        (listed({}), ['{"a":1}', "{}"], ['{"a":"b"}']),
        (listed({"type": "string", "title": "Key"}), ['{"a":1}'], ['{"a":"b"}']),
        (listed(True), ['{"a":1}'], []),
        (listed({"enum": ["a", "b"]}), ["{}", '{"a":1}', '{"b":2}', '{"a":1,"b":2}'], ['{"c":1}', '{"a":"x"}']),
        (listed({"enum": ["a", "b"]}, required=["a"]), ['{"a":1}'], ["{}", '{"b":2}']),
        (listed({"const": "a"}), ['{"a":1}'], ['{"b":1}']),
        (listed({"$ref": "#/$defs/key"}, **ENUM), ['{"a":1,"b":2}'], ['{"c":1}']),
        ({"type": "object", "propertyNames": {"enum": ["a"]}}, ['{"a":[]}'], ['{"b":1}']),
        (listed({"enum": ["a", "b"]}, properties={"b": {"type": "null"}, "c": {}}), ['{"b":null,"a":1}'], ['{"c":1}']),
        # zod: z.never()
        (
            {"type": "object", "properties": {"a": INT, "b": {"not": {}}}},
            ['{"a":1}', "{}"],
            ['{"a":1,"b":1}', '{"b":1}'],
        ),
        ({"properties": {"b": {"not": {}}}, "additionalProperties": True}, ['{"a":1}'], ['{"b":1}']),
        ({"type": "array", "items": {"not": {}}}, ["[]"], ["[1]"]),
        ({"anyOf": [{"not": {}}, {"type": "null"}]}, ["null"], ["1"]),
        # draft 4
        ({**INT, "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
        ({**INT, "maximum": 3, "exclusiveMaximum": True}, ["2"], ["3"]),
        ({**INT, "minimum": 3, "exclusiveMinimum": False}, ["3"], ["2"]),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, ["0.25"], ["0", "0.0"]),
        # formats of the specification, and others, which are annotations
        (CUID2, ['"a1"'], ['"A"', '""']),
        ({"type": "string", "format": "password", "minLength": 3}, ['"abc"'], ['"a"']),
        ({"type": "integer", "format": "int32"}, ["1"], ['"1"']),
        ({"properties": {"format": {"enum": ["a"]}}}, ['{"format":"a"}'], ['{"format":"b"}']),
        ({"type": "string", "format": "uuid4"}, [f'"{UUID4}"'], [f'"{UUID4.replace("4c6a", "5c6a")}"', '"a"']),
        ({"type": "string", "format": "email", "pattern": "^a"}, ['"a@b.de"'], ['"b@b.de"', '"a"']),
        # pydantic: Decimal
        ({"type": "string", "pattern": DECIMAL}, ['"-12.50"', '".5"'], ['"."', '"1.2.3"', '""', '"1 "']),
    ],
    ids=str,
)
def test_what_libraries_write(
    grammars: LLGuidance, tokenizer: Tokenizer, source: Any, yes: list[str], no: list[str]
) -> None:
    assert_enforced(grammars, tokenizer, source, yes, no)
    if "true" not in json.dumps(source.get("exclusiveMinimum", source.get("exclusiveMaximum", 0))).lower():
        assert all(Validator(source).is_valid(json.loads(text)) for text in yes)


def test_patterns_without_look_ahead_match_the_same() -> None:
    numbers = ["".join(letters) for length in range(7) for letters in product("01.+- ", repeat=length)]
    names = ["".join(letters) for length in range(6) for letters in product("a.'-@", repeat=length)]
    mails = [f"{name}@{domain}" for name in names for domain in ("a.aa", "a-.a.aa", "a..aa", "-a.aa", "a.a")]
    for pattern, texts in ((DECIMAL, numbers), (EMAIL, [*mails, *names])):
        ours = _WITHOUT_LOOK_AHEAD[pattern]
        matched = [text for text in texts if re.fullmatch(pattern[1:-1] + r"\Z", text)]
        assert matched
        assert matched == [text for text in texts if re.fullmatch(ours[1:-1] + r"\Z", text)]


_VALUES: list[Any] = [
    None,
    True,
    False,
    1,
    -1,
    2.5,
    1e30,
    "x",
    "object",
    "#",
    "#/$defs/a",
    ["a"],
    ["object", "null"],
    {},
    {"a": {}},
]
_KEYWORDS = (
    *("type", "properties", "required", "oneOf", "anyOf", "allOf", "$ref", "$defs", "additionalProperties", "items"),
    *("patternProperties", "prefixItems", "const", "enum", "format", "pattern", "minimum", "exclusiveMinimum", "if"),
    *("minProperties", "propertyNames", "discriminator", "not", "unevaluatedProperties", "multipleOf", "title"),
)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_no_schema_is_refused_or_left_to_llguidance(seed: int) -> None:
    draw = random.Random(seed)

    def anything(depth: int) -> Any:
        kind = draw.random()
        if depth > 3 or kind < 0.6:
            return draw.choice(_VALUES)
        if kind < 0.8:
            return [anything(depth + 1) for _ in range(draw.randrange(3))]
        return {draw.choice(_KEYWORDS): anything(depth + 1) for _ in range(draw.randrange(4))}

    for _ in range(5000):
        source = json.dumps({draw.choice(_KEYWORDS): anything(0) for _ in range(draw.randrange(1, 5))})
        with suppress(ValueError):  # a 400 that says why
            checked_schema(source)
