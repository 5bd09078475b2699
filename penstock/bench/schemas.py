"""JSON schemas as applications send them, for tests and benchmarks of structured output."""

from __future__ import annotations

import json
import random
from typing import Any

Schema = dict[str, Any]


def record(properties: Schema, *optional: str, **more: Any) -> Schema:
    """An object with these properties and no others, all required but the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}


def array(items: Any, low: int = 0, high: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


STRING: Schema = {"type": "string"}
SMALL: Schema = {"type": "integer", "minimum": 0, "maximum": 99}
PERSON = record({"name": STRING, "age": {"type": "integer", "minimum": 0, "maximum": 150}})
COLOURS = {"enum": ["red", "green", "blue"]}

# Mostly keys and values from a small set: most of the output is forced by the schema.
INVOICE = record(
    {
        "invoice_number": {"type": "string", "pattern": "^INV-[0-9]{4}$"},
        "billing_currency": {"enum": ["EUR", "USD", "GBP"]},
        "payment_received": {"type": "boolean"},
        "shipping_address_country": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "line_items": array(
            record({"product_identifier": SMALL, "quantity_ordered": SMALL, "unit_price_in_cents": SMALL}), 2, 2
        ),
        "customer_relationship_status": {"enum": ["prospective_customer", "established_customer"]},
    }
)

# Short texts of limited length, whose masks are the slow ones.
CONTACT = record(
    {
        name: {"type": "string", "maxLength": most}
        for name, most in {"name": 24, "street": 40, "city": 24, "company": 32, "postcode": 10, "remark": 80}.items()
    }
)

_TREE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": record({"value": SMALL, "children": array({"$ref": "#/$defs/node"}, 0, 2)})},
}
_LIST = {
    "$ref": "#/$defs/cell",
    "$defs": {"cell": record({"head": SMALL, "tail": {"anyOf": [{"$ref": "#/$defs/cell"}, {"type": "null"}]}})},
}
_SHAPES = {
    "oneOf": [
        record({"kind": {"const": "circle"}, "radius": SMALL}),
        record({"kind": {"const": "square"}, "side": SMALL}),
        record({"kind": {"const": "label"}, "text": STRING}),
    ]
}


def _pattern(regex: str, **more: Any) -> Schema:
    return record({"value": {"type": "string", "pattern": regex, **more}})


def _number(**limits: Any) -> Schema:
    return record({"value": {"type": "number", **limits}})


def _integer(**limits: Any) -> Schema:
    return record({"value": {"type": "integer", **limits}})


def _format(name: str) -> Schema:
    return record({"value": {"type": "string", "format": name}})


SCHEMAS: dict[str, Schema] = {
    # objects
    "person": PERSON,
    "optional": record({"name": STRING, "nick": STRING, "age": SMALL}, "nick", "age"),
    "all_optional": record({"a": SMALL, "b": STRING, "c": {"type": "boolean"}}, "a", "b", "c"),
    "nested": record(
        {"person": PERSON, "address": record({"city": STRING, "zip": {"type": "string", "maxLength": 5}})}
    ),
    "deep": record({"a": record({"b": record({"c": record({"d": record({"e": SMALL})})})})}),
    "open": {"type": "object", "properties": {"id": SMALL}, "required": ["id"], "maxProperties": 2},
    "map": {"type": "object", "additionalProperties": SMALL, "maxProperties": 3},
    "pattern_properties": {
        "type": "object",
        "patternProperties": {"^n_[a-z]{1,3}$": SMALL, "^s_[a-z]{1,3}$": STRING},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "min_properties": {"type": "object", "additionalProperties": SMALL, "minProperties": 1, "maxProperties": 2},
    "all_of": {"allOf": [record({"a": SMALL, "b": SMALL}, "a", "b"), {"required": ["b"]}]},
    "unicode_keys": record({"größe": SMALL, "名前": COLOURS, "emoji 🙂": {"type": "boolean"}}),
    "quoted_keys": record({'with "quotes"': SMALL, "back\\slash": SMALL, "new\nline": SMALL, "": SMALL}),
    "many_keys": record({f"field_{i}": {"type": "boolean"} for i in range(20)}),
    "invoice": INVOICE,
    "wide": record({f"k{i}": [STRING, SMALL, COLOURS, {"type": "null"}][i % 4] for i in range(12)}),
    # arrays
    "numbers": array(SMALL, 0, 5),
    "exact_items": array(COLOURS, 3, 3),
    "people": array(PERSON, 1, 3),
    "matrix": array(array(SMALL, 2, 2), 2, 2),
    "tuple": {"type": "array", "prefixItems": [SMALL, COLOURS, {"type": "boolean"}], "items": False, "minItems": 3},
    "tuple_rest": {"type": "array", "prefixItems": [COLOURS], "items": SMALL, "minItems": 2, "maxItems": 4},
    "mixed_items": array({"anyOf": [SMALL, COLOURS, {"type": "null"}]}, 1, 4),
    "empty_array": array(SMALL, 0, 0),
    # enumerations and constants
    "colour": COLOURS,
    "mixed_enum": {"enum": ["a", 1, 2.5, None, True, ["x"], {"k": 1}]},
    "const_string": record({"version": {"const": "1.0"}, "ok": {"const": True}}),
    "const_object": record({"fixed": {"const": {"b": [1, 2, {"c": None}], "a": "x"}}}),
    "prefix_enum": record({"value": {"enum": ["a", "ab", "abc", "abcd", "b"]}}),
    "large_enum": record({"code": {"enum": [f"CODE_{i:04d}" for i in range(500)]}}),
    "quoted_enum": record({"value": {"enum": ['say "hi"', "tab\there", "ünï", "/slash/"]}}),
    # strings
    "date_pattern": _pattern("^[0-9]{4}-[0-9]{2}-[0-9]{2}$"),
    "alternatives": _pattern("^(cat|dog|bird)s?$"),
    "unanchored": _pattern("ab+c", maxLength=10),
    "sku": _pattern("^[A-Z]{3}-[0-9]{3,5}(-[a-z])?$"),
    "hex": _pattern("^#[0-9a-f]{6}$"),
    "phone": _pattern(r"^\+?[0-9]{1,3}( [0-9]{2,4}){2,3}$"),
    "word": _pattern(r"^\w{1,8}$"),
    "lengths": record({"value": {"type": "string", "minLength": 3, "maxLength": 6}}),
    "date": _format("date"),
    "time": _format("time"),
    "date_time": _format("date-time"),
    "uuid": _format("uuid"),
    "email": _format("email"),
    "ipv4": _format("ipv4"),
    # numbers
    "bounded": _integer(minimum=-5, maximum=5),
    "exclusive": _integer(exclusiveMinimum=0, exclusiveMaximum=10),
    "multiple": _integer(multipleOf=7, minimum=0, maximum=700),
    "large": _integer(minimum=10**9, maximum=10**10),
    "fraction": _number(minimum=0, maximum=1),
    "negative": _number(exclusiveMaximum=0, minimum=-1000),
    "quarters": _number(multipleOf=0.25, minimum=0, maximum=10),
    # unions and references
    "nullable": record({"value": {"type": ["string", "null"], "maxLength": 5}, "other": {"type": ["integer", "null"]}}),
    "any_of": {"anyOf": [PERSON, array(SMALL, 1, 2), COLOURS]},
    "shapes": _SHAPES,
    "shape_list": array(_SHAPES, 1, 2),
    "any_of_required": {
        **record({"a": SMALL, "b": SMALL}, "a", "b"),
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "definitions": {**record({"home": {"$ref": "#/$defs/p"}, "work": {"$ref": "#/$defs/p"}}), "$defs": {"p": PERSON}},
    "tree": _TREE,
    "linked_list": _LIST,
    "tool_call": record(
        {"name": {"enum": ["get_weather", "get_time"]}, "arguments": record({"city": STRING, "unit": COLOURS}, "unit")}
    ),
}


def instances_with_faults(valid: Any) -> list[Any]:
    """Changes of an instance, nearly all of which no schema above allows."""
    faults: list[Any] = [None, "", 1.5, [], {}, [valid], {"extra": valid}]
    if isinstance(valid, dict):
        faults.append({**valid, "unexpected": 1})
        for key, value in valid.items():
            faults.append({k: v for k, v in valid.items() if k != key})
            faults += [{**valid, key: fault} for fault in instances_with_faults(value)]
    elif isinstance(valid, list):
        faults += [valid + valid + valid + [None], valid[:-1]]
        faults += [[fault, *valid[1:]] for fault in instances_with_faults(valid[0])] if valid else []
    elif isinstance(valid, str):
        faults += [valid + "x", valid[1:], valid.upper(), "x" * 1000]
    elif isinstance(valid, int | float) and not isinstance(valid, bool):
        faults += [-valid - 1, valid + 10**12, str(valid), valid + 0.125]
    return faults


def compact(instance: Any) -> str:
    """JSON without blanks, as it is generated."""
    return json.dumps(instance, ensure_ascii=False, separators=(",", ":"))


def mixture(seed: int) -> Schema:
    """An object with an instance of each, in some order, without those whose references are to their own root."""
    names = [name for name, schema in SCHEMAS.items() if "$ref" not in json.dumps(schema)]
    random.Random(seed).shuffle(names)
    return record({name: SCHEMAS[name] for name in names})
