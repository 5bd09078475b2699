"""`oneOf` whose branches exclude each other."""

from __future__ import annotations

import json
import random
from itertools import product
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, TypeAdapter

from penstock.core.errors import InvalidRequest
from penstock.grammar.compiler import LLGuidance
from penstock.text.tokenizer import Tokenizer
from tests.grammar.masks import Validator, accepts, schema, walk


def kind(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}, **more}, "required": ["kind"]}


CAT, DOG = kind("cat"), kind("dog", tail={"type": "integer"})
DEFS = {"cat": CAT, "dog": DOG, "colour": {"enum": ["red", "green"]}, "loop": {"$ref": "#/$defs/loop"}}
CAT_REF, DOG_REF, COLOUR_REF = ({"$ref": f"#/$defs/{name}"} for name in ("cat", "dog", "colour"))
TREE = {
    "$defs": {
        "leaf": kind("leaf"),
        "node": kind("node", of={"type": "array", "items": {"$ref": "#/$defs/tree"}}),
        "tree": {"oneOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/node"}]},
    },
    "$ref": "#/$defs/tree",
}


@pytest.mark.parametrize(
    ("source", "yes", "no"),
    [
        ({"oneOf": [CAT_REF, DOG_REF]}, ['{"kind":"cat"}', '{"kind":"dog","tail":1}'], ['{"kind":"cat","tail":1}']),
        ({"oneOf": [{"allOf": [CAT_REF]}, {**DOG_REF, "title": "Dog"}]}, ['{"kind":"cat"}'], ['{"kind":"cow"}']),
        ({"oneOf": [CAT_REF, DOG]}, ['{"kind":"cat"}'], []),
        ({"oneOf": [COLOUR_REF, {"type": "null"}]}, ['"red"', "null"], ['"blue"']),
        ({"oneOf": [COLOUR_REF, {"type": "null"}], "title": "Colour", "default": None}, ['"red"', "null"], []),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}, CAT_REF]}, ["1", '"a"', '{"kind":"cat"}'], []),
        ({"oneOf": [{"oneOf": [CAT_REF, {"type": "null"}]}, DOG_REF]}, ["null", '{"kind":"dog"}'], []),
        ({"oneOf": [{"anyOf": [CAT_REF, CAT_REF]}, DOG_REF]}, ['{"kind":"cat"}'], []),
        ({"oneOf": [{"enum": ["a", 1]}, {"enum": [True, "b"]}]}, ["true", "1", '"b"'], []),
        ({"oneOf": [CAT | {"required": []}, DOG | {"required": []}]}, ['{"kind":"cat"}'], ["{}"]),
        ({"oneOf": [CAT_REF]}, ['{"kind":"cat"}'], []),
        (
            {
                "type": "object",
                "required": ["kind"],
                "oneOf": [{"properties": {"kind": {"const": name}, name: {}}} for name in ("cat", "dog")],
            },
            ['{"kind":"cat","cat":1}'],
            ['{"kind":"cat","dog":1}'],
        ),
        ({"oneOf": [kind("cat", at=CAT_REF), DOG_REF]}, ['{"kind":"cat","at":{"kind":"cat"}}'], []),
        (
            {"anyOf": [{"type": "string"}, {"type": "integer"}], "oneOf": [{"type": "string"}, {"type": "null"}]},
            ['"a"'],
            ["null", "1"],
        ),
        (
            {"properties": {"oneOf": {"oneOf": [CAT, DOG]}, "b": {"$ref": "#/properties/oneOf/oneOf/1"}}},
            ['{"oneOf":{"kind":"cat"},"b":{"kind":"dog"}}'],
            ['{"b":{"kind":"cat"}}'],
        ),
        (
            TREE,
            ['{"kind":"leaf"}', '{"kind":"node","of":[{"kind":"leaf"},{"kind":"node"}]}'],
            ['{"kind":"leaf","of":[]}'],
        ),
    ],
    ids=str,
)
def test_branches_that_exclude_each_other(
    grammars: LLGuidance, tokenizer: Tokenizer, source: Any, yes: list[str], no: list[str]
) -> None:
    source = {"$defs": DEFS, **source}
    assert [text for text in yes if not accepts(grammars, schema(source), tokenizer, text)] == []
    assert [text for text in no if accepts(grammars, schema(source), tokenizer, text)] == []
    assert all(Validator(source).is_valid(json.loads(text)) for text in yes)


@pytest.mark.parametrize(
    "branches",
    [
        ({"type": "integer"}, {"type": "number"}),
        ({"type": "string"}, {"type": "string", "maxLength": 3}),
        (CAT_REF, CAT_REF),
        ({"const": 1}, {"const": 1.0}),
        ({"const": {"a": 1, "b": 2}}, {"const": {"b": 2, "a": 1}}),
        # an array matches both, and so does an object without the property
        (CAT | {"type": ["object", "array"]}, DOG | {"type": ["object", "array"]}),
        (CAT | {"required": []}, kind("cat") | {"required": []}),
        # not for the open objects that these are for their author
        ({"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}),
        ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, {"type": "object", "properties": {"b": {}}}),
        ({"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}),
        (CAT_REF, {"$ref": "#/$defs/nowhere"}),
        (True, {"type": "null"}),
    ],
    ids=str,
)
def test_branches_that_may_overlap(grammars: LLGuidance, branches: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"branches of a oneOf that may overlap.*anyOf") as caught:
        grammars.compile(schema({"$defs": DEFS, "oneOf": list(branches)}))
    assert "coerce" not in caught.value.message


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Literal[7, 9]


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    friends: list[Pet] = Field(max_length=1)


class Zoo(BaseModel):
    first: Pet
    colour: Literal["red"] | None = None


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
Dog.model_rebuild()
Zoo.model_rebuild()


@pytest.mark.parametrize("of", [Zoo, Pet, list[Pet]])
def test_unions_of_pydantic(grammars: LLGuidance, tokenizer: Tokenizer, of: Any) -> None:
    """Whose discriminator has a default: pydantic does not list it as required, and needs it."""
    adapter, draw = TypeAdapter(of), random.Random(1)
    source = adapter.json_schema()
    texts = [text for _ in range(20) if (text := walk(grammars, schema(source), tokenizer, draw)) is not None]
    for text in texts:
        adapter.validate_json(text)
        Validator(source).validate(json.loads(text))
    assert len(set(texts)) > 5 or of is Pet


def test_a_union_of_hundreds(grammars: LLGuidance, tokenizer: Tokenizer) -> None:
    names = [f"k{number}" for number in range(300)]
    source = {"$defs": {name: kind(name) for name in names}, "oneOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    assert accepts(grammars, schema(source), tokenizer, '{"kind":"k299"}')


def test_a_discriminator_that_one_branch_does_not_have(grammars: LLGuidance) -> None:
    """It is required in the other one alone, so that what comes out of the one may match the other as written."""
    loose = {"type": "object", "properties": {"tail": {"type": "integer"}}}
    discriminator = {"discriminator": {"propertyName": "kind"}}
    closed = {**loose, "additionalProperties": False}
    with pytest.raises(InvalidRequest, match="overlap"):
        grammars.compile(schema({**discriminator, "oneOf": [CAT | {"required": []}, closed]}))
    grammars.compile(schema({**discriminator, "oneOf": [CAT, closed]}))


def _random_branch(draw: random.Random, depth: int = 2) -> Any:
    pick = draw.randrange(8 if depth else 4)
    if pick < 2:
        return {"type": draw.choice(["null", "integer", "number", "string", "boolean", ["string", "object"]])}
    if pick == 2:
        return {"enum": draw.sample(["a", "b", 1, 1.0, True, None, 2.5], 2)}
    if pick == 3:
        return {"const": draw.choice(["a", "b", 1, {"k": "a"}])}
    if pick == 4:
        return {draw.choice(["anyOf", "oneOf", "allOf"]): [_random_branch(draw, depth - 1) for _ in range(2)]}
    names = draw.sample("kab", draw.randrange(1, 3))
    found: dict[str, Any] = {"properties": {name: _random_branch(draw, depth - 1) for name in names}}
    if draw.random() < 0.8:
        found["type"] = "object"
    found["required"] = draw.sample("kab", draw.randrange(3))
    if draw.random() < 0.3:
        found["additionalProperties"] = draw.choice([False, {"type": "string"}])
    return found


def test_random_unions(grammars: LLGuidance, tokenizer: Tokenizer) -> None:
    """What is accepted comes out valid, although branches are closed, and discriminators required."""
    draw = random.Random(5)
    values: list[Any] = ["a", "b", 1, 2.5, None, True, {"k": "a"}]
    instances = [*values, {}, *({"k": k, "a": a} for k, a in product(values[:4], repeat=2))]
    enforced = 0
    for _ in range(250):
        source = {"oneOf": [_random_branch(draw) for _ in range(draw.randrange(2, 4))]}
        if draw.random() < 0.5:
            source["discriminator"] = {"propertyName": "k"}  # type: ignore[assignment]
        try:
            grammars.compile(schema(source))
        except InvalidRequest:
            continue
        enforced += 1
        texts = [walk(grammars, schema(source), tokenizer, draw) for _ in range(2)]
        for instance in [*instances, *(json.loads(text) for text in texts if text is not None)]:
            text = json.dumps(instance, separators=(",", ":"))
            if accepts(grammars, schema(source), tokenizer, text):
                Validator(source).validate(instance)
    assert enforced > 40
