"""Objects that name their properties have no others."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher

from penstock.grammar.compiler import LLGuidance
from penstock.text.tokenizer import Tokenizer
from tests.grammar.masks import Validator, accepts, assert_enforced, schema, walk

INT = {"type": "integer"}
POINT: dict[str, Any] = {"type": "object", "properties": {"x": INT, "y": INT}, "required": ["x"]}
DEFS = {"$defs": {"point": POINT, "list": {"properties": {"next": {"$ref": "#/$defs/list"}}, "required": []}}}
REF = {"$ref": "#/$defs/point"}
NAMED_Z = {"properties": {"z": INT}}


@pytest.mark.parametrize(
    ("source", "yes", "no"),
    [
        (POINT, ['{"x":1}', '{"x":1,"y":2}'], ['{"x":1,"z":2}', "{}"]),
        ({"type": "object", "properties": {}}, ["{}"], ['{"a":1}']),
        ({"type": "object", "required": ["x"]}, ['{"x":[]}'], ['{"x":1,"z":2}']),
        ({"type": "object"}, ["{}", '{"a":1}'], []),
        ({**POINT, "additionalProperties": True}, ['{"x":1,"z":2}'], []),
        ({**POINT, "additionalProperties": INT}, ['{"x":1,"z":2}'], ['{"x":1,"z":"a"}']),
        ({**POINT, "patternProperties": {"^z": INT}}, ['{"x":1,"z":2}'], []),
        ({**POINT, "minProperties": 2}, ['{"x":1,"y":2}'], ['{"x":1}', '{"x":1,"z":2}']),
        ({"properties": {"x": INT}, "required": ["x"], "minProperties": 2}, ['{"x":1,"z":2}'], ['{"x":1}']),
        ({"type": "array", "items": POINT}, ['[{"x":1}]'], ['[{"x":1,"z":2}]']),
        # by reference, alone or with what says nothing of an object's names
        ({**DEFS, **REF, "type": "object", "title": "P"}, ['{"x":1}'], ['{"x":1,"z":2}']),
        ({**DEFS, "allOf": [REF], "description": "P"}, ['{"x":1}'], ['{"x":1,"z":2}']),
        ({**DEFS, "anyOf": [REF, {"type": "null"}]}, ['{"x":1}', "null"], ['{"x":1,"z":2}']),
        ({**DEFS, "$ref": "#/$defs/list"}, ['{"next":{"next":{}}}'], ['{"next":{"more":{}}}']),
        # several schemas describe one object
        ({**DEFS, "allOf": [REF, NAMED_Z]}, ['{"x":1,"y":2,"z":3}'], ['{"x":1,"w":2}']),
        ({**DEFS, **REF, **NAMED_Z}, ['{"z":3,"x":1}'], ['{"x":1,"w":2}']),
        ({**DEFS, "allOf": [REF, NAMED_Z], "additionalProperties": True}, ['{"x":1,"w":2}'], []),
        ({**DEFS, "allOf": [REF, {**NAMED_Z, "additionalProperties": True}]}, ['{"x":1,"w":2}'], []),
        (
            {**DEFS, "allOf": [REF, {"properties": {"at": REF}}]},
            ['{"x":1,"at":{"x":2}}'],
            ['{"x":1,"at":{"x":2,"z":3}}', '{"x":1,"z":{}}'],
        ),
        (
            {**POINT, "required": [], "anyOf": [{"required": ["x"]}, {"required": ["y"]}]},
            ['{"x":1}', '{"y":1}', '{"x":1,"y":2}'],
            ["{}", '{"x":1,"z":2}'],
        ),
        (
            {**POINT, "anyOf": [NAMED_Z, {"properties": {"w": INT}, "required": ["w"]}]},
            ['{"x":1,"z":2}', '{"x":1,"w":2}'],
            ['{"x":1,"z":2,"w":3}', '{"x":1,"v":2}'],
        ),
        (
            {"allOf": [{"anyOf": [POINT, NAMED_Z]}, {"anyOf": [{"required": ["w"]}, {"type": "object"}]}]},
            ['{"z":1}', '{"x":1,"y":2,"w":3}'],
            ['{"z":1,"v":2}'],
        ),
        # the inner object has several descriptions: left open, rather than closed to one of them
        (
            {"allOf": [{"properties": {"at": POINT}}, {"properties": {"at": {**NAMED_Z, "required": ["z"]}}}]},
            ['{"at":{"x":1,"z":2}}'],
            ['{"at":{"x":1}}'],
        ),
    ],
    ids=str,
)
def test_names_that_nobody_gave(
    grammars: LLGuidance, tokenizer: Tokenizer, source: Any, yes: list[str], no: list[str]
) -> None:
    assert_enforced(grammars, tokenizer, source, yes, no)
    assert all(Validator(source).is_valid(json.loads(text)) for text in yes)


def test_properties_come_in_the_order_of_the_schema(grammars: LLGuidance, tokenizer: Tokenizer) -> None:
    merged = schema({**POINT, "allOf": [{"properties": {"w": INT}}], "anyOf": [NAMED_Z, {"properties": {"a": INT}}]})
    assert accepts(grammars, merged, tokenizer, '{"x":1,"y":2,"w":3,"z":4}')
    assert not accepts(grammars, merged, tokenizer, '{"w":3,"x":1}')


def test_control_characters_in_an_object_that_is_closed(grammars: LLGuidance, tokenizer: Tokenizer) -> None:
    escapes = schema({"type": "object", "properties": {"a": {"type": "string"}, "b": {"const": "\x1b"}}})
    assert accepts(grammars, escapes, tokenizer, r'{"a":"\u001b[1m","b":"\u001b"}')


def _random_schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    if depth == 0 or draw.random() < 0.25:
        scalars: list[dict[str, Any]] = [INT, {"enum": ["p", "q"]}, {"type": "null"}, {"$ref": "#/$defs/s"}, REF]
        return draw.choice(scalars)
    found: dict[str, Any] = {"type": "object"} if draw.random() < 0.8 else {}
    names = draw.sample("abxyz", draw.randrange(4))
    if draw.random() < 0.8:
        found["properties"] = {name: _random_schema(draw, depth - 1) for name in names}
        found["required"] = draw.sample(names, draw.randrange(len(names) + 1))
    for key in draw.choices(
        ("", "allOf", "anyOf", "$ref", "additionalProperties", "minProperties"), (8, 3, 3, 2, 1, 1)
    ):
        if key in ("allOf", "anyOf"):
            found[key] = [_random_schema(draw, depth - 1) for _ in range(draw.randrange(1, 4))]
        elif key == "$ref":
            found |= draw.choice([REF, {"$ref": "#/$defs/s"}])
        elif key == "additionalProperties":
            found[key] = draw.choice([True, False, INT])
        elif key:
            found[key] = 1
    return found


@pytest.mark.parametrize("seed", range(150))
def test_random_schemas_stay_satisfiable(grammars: LLGuidance, tokenizer: Tokenizer, seed: int) -> None:
    """Whatever llguidance can satisfy while it is open, and what comes out is valid as its author wrote it."""
    draw = random.Random(seed)
    source = _random_schema(draw)
    source = {**source, "$defs": {"point": POINT, "s": _random_schema(draw, 2)}}
    if source["$defs"]["s"].get("$ref") == "#/$defs/s":
        return
    options = {"x-guidance": {"whitespace_flexible": False}}
    if LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps({**source, **options}))):
        return
    for _ in range(3):
        if (text := walk(grammars, schema(source), tokenizer, draw)) is not None:
            Validator(source).validate(json.loads(text))
