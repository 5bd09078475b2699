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

# Compact JSON: a grammar that allows blanks lets a model write them until max_tokens. Not lenient: what cannot be
# enforced is refused.
JSON_OPTIONS: Any = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
MOST_MULTIPLE = 100_000  # states of the automaton that checks divisibility


def checked_schema(source: str) -> str:
    """The schema as llguidance takes it. Raises ValueError."""
    try:
        schema = _decoder.decode(source)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    if schema is True:
        return "{}"
    _check(schema)
    return source


def checked_lark(source: str) -> str:
    """A Lark grammar whose JSON schemas (`%json {…}`) are checked as well and have our options. Raises ValueError."""
    parts, end = list[str](), 0
    for place in re.finditer(r"%json\s*", source):
        if place.start() < end:
            continue  # inside a schema
        try:
            schema, after = _decoder.raw_decode(source, place.end())
        except RecursionError:
            raise ValueError("a schema is nested too deeply") from None
        _check(schema)
        options = json.dumps({"x-guidance": JSON_OPTIONS})[:-1] + (", " if schema else "")
        parts += [source[end : place.end()], options, source[place.end() + 1 : after]]
        end = after
    return "".join([*parts, source[end:]])


def _check(schema: Any) -> None:
    if not isinstance(schema, dict):
        raise ValueError(f"the schema must be an object, not {str(schema)[:40]}")
    if "x-guidance" in schema:
        raise ValueError("x-guidance is not supported")
    multiple = Fraction(1)
    for value in _multiples(schema):
        multiple = Fraction(
            math.lcm(multiple.numerator, value.numerator), math.gcd(multiple.denominator, value.denominator)
        )
        if multiple.numerator > MOST_MULTIPLE:
            raise ValueError(f"the least common multiple of all multipleOf must be at most {MOST_MULTIPLE:,}")


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
