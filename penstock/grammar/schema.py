"""What is checked of a JSON schema before it is compiled, beyond what llguidance checks itself.

llguidance refuses every keyword that it knows and cannot enforce, so that nothing has to be listed here. What JSON
Schema calls an annotation, and keywords that nobody knows, are ignored, as the specification says.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from penstock.grammar.closing import closed
from penstock.grammar.pointers import NAMED, subschemas
from penstock.grammar.rewriting import rewritten

# Compact JSON: a grammar that allows blanks lets a model write them until max_tokens. Not lenient: what cannot be
# enforced is refused.
_OPTIONS: Any = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
# Without \uXXXX, by which a further property could have the name of one that the schema describes: llguidance does not
# compare what an escape stands for.
_OPTIONS_OF_OPEN_OBJECTS: Any = {**_OPTIONS, "json_allowed_escapes": 'nrbtf\\"'}
OWNER = re.compile(r"// (?P<owner>arguments of [\w.-]+)\n")  # ends a line of a Lark grammar

MOST_EXACT = 2**53  # integers up to this are exact as doubles, which llguidance reads numbers as
MOST_MULTIPLE = 100_000  # states of the automaton that checks divisibility

# Characters that JSON writes as \uXXXX: themselves, and as patterns write them outside of classes. Not \n and the like.
_CONTROLS = re.compile("[\0-\7\v\x0e-\x1f\x7f]")
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]")
_CONTROLS_IN_PATTERN = re.compile(
    _CONTROLS.pattern + r"|\\(?:x|u00)(?:[01][0-9a-fA-F]|7[fF])|\\[xu]\{0*(?:1?[0-9a-fA-F]|7[fF])\}|\\[0-7acev]"
)


def checked_schema(source: str) -> str:
    """The schema as llguidance takes it. Raises ValueError."""
    try:
        schema = _decoder.decode(source)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    return _as_taken({}, "{}") if schema is True else _as_taken(schema, source)


def checked_lark(source: str) -> str:
    """A Lark grammar whose JSON schemas (`%json {…}`) are checked as well. Raises ValueError."""
    parts, end = list[str](), 0
    for place in re.finditer(r"%json\s*", source):
        if place.start() < end:
            continue  # inside a schema
        try:
            schema, after = _decoder.raw_decode(source, place.end())
        except RecursionError:
            raise ValueError("a schema is nested too deeply") from None
        try:
            taken = _as_taken(schema, source[place.end() : after])
        except ValueError as error:
            owner = OWNER.search(f"{source[after:]}\n".partition("\n")[0] + "\n")
            raise ValueError(f"{owner['owner']}: {error}" if owner else str(error)) from None
        parts += [source[end : place.end()], taken]
        end = after
    return "".join([*parts, source[end:]])


def _as_taken(schema: Any, source: str) -> str:
    """`schema` is what `source` says, with exact numbers."""
    try:
        _check(schema)
        taken = closed(rewritten(json.loads(source), schema))
        _check_least(taken)
        is_open = any(map(_is_open, subschemas(taken)))
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    if is_open:
        _check_characters(taken)
    return json.dumps({"x-guidance": _OPTIONS_OF_OPEN_OBJECTS if is_open else _OPTIONS, **taken}, allow_nan=False)


def _check(schema: Any) -> None:
    if not isinstance(schema, dict):
        raise ValueError(f"the schema must be an object, not {str(schema)[:40]}")
    if "x-guidance" in schema:
        raise ValueError("x-guidance is not supported")
    for number in _wanted_numbers(schema):
        if abs(number) > MOST_EXACT:
            raise ValueError(f"{number} in const or enum is beyond 2**53; write such a number as a string")
    multiple = Fraction(1)
    for value in _multiples(schema):
        multiple = Fraction(
            math.lcm(multiple.numerator, value.numerator), math.gcd(multiple.denominator, value.denominator)
        )
        if multiple.numerator > MOST_MULTIPLE:
            raise ValueError(f"the least common multiple of all multipleOf must be at most {MOST_MULTIPLE:,}")


def _check_least(schema: Any) -> None:
    for each in subschemas(schema):
        least, required = each.get("minProperties"), each.get("required")
        certain = 1 + (len(required) if isinstance(required, list) else 0)
        if isinstance(least, int | float) and least > certain and not _is_closed(each):
            raise ValueError(
                f"minProperties {least} cannot be enforced: a key may come twice, so only those in required and one "
                "more are sure to be different"
            )


def _is_closed(schema: dict[str, Any]) -> bool:
    """Whether it has no properties but those that it names, which come once."""
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


def _is_open(schema: dict[str, Any]) -> bool:
    """Whether it describes properties by name and allows others."""
    names = schema.get("properties") or schema.get("patternProperties")
    return bool(names) and schema.get("additionalProperties") is not False


def _check_characters(schema: Any) -> None:
    """llguidance leaves out of a text what it has no escape for."""
    for each in subschemas(schema):
        texts = _strings([each.get("const"), each.get("enum")])
        named = each.get("patternProperties")
        patterns = _strings([each.get("pattern"), list(named) if isinstance(named, dict) else None])
        if any(map(_CONTROLS.search, texts)) or any(_CONTROLS_IN_PATTERN.search(_CLASS.sub("", p)) for p in patterns):
            raise ValueError(
                "control characters in const, enum or pattern cannot be enforced where an object names properties and "
                "allows others (additionalProperties)"
            )


def _strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    for each in [*data.keys(), *data.values()] if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from _strings(each)


def _wanted_numbers(schema: Any, wanted: bool = False) -> Iterator[int]:
    """Integers in the values of const and enum, wherever they stand."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            below = list(value.values()) if key in NAMED and isinstance(value, dict) else value
            yield from _wanted_numbers(below, wanted or key in ("const", "enum"))
    elif isinstance(schema, list):
        for each in schema:
            yield from _wanted_numbers(each, wanted)
    elif wanted and isinstance(schema, int):
        yield schema


def _multiples(schema: Any) -> Iterator[Fraction]:
    """The values of multipleOf, wherever they stand."""
    if isinstance(schema, dict):
        value = schema.get("multipleOf")
        if isinstance(value, int | Fraction) and value > 0:
            yield Fraction(value)
        for each in schema.values():
            yield from _multiples(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _multiples(each)


def _decimal(text: str) -> Fraction:
    mantissa, _, exponent = text.lower().partition("e")
    if abs(int(exponent or 0)) > 400:
        raise ValueError(f"{text} is no double-precision number")
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_decoder = json.JSONDecoder(parse_float=_decimal, parse_constant=_no_number)
