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
# RFC 3339, without the year 0000 and without leap seconds, which most parsers do not take. llguidance allows 29
# February of every year and a leap second in every minute.
_DAYS = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTHS = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = f"(?:{_YEAR}-(?:{_DAYS})|(?:[0-9]{{2}}{_FOURTHS}|{_FOURTHS}00)-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_CLOCK})"
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}
_DATA = {"const", "enum", "default", "examples"}  # keywords whose values are not schemas
_NAMED = {"properties", "patternProperties", "$defs", "definitions"}  # whose values are schemas by name

MOST_EXACT = 2**53  # integers up to this are exact as doubles, which llguidance reads numbers as
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
    return _exact_formats(source)


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
        parts += [source[end : place.end()], options, _exact_formats(source[place.end() : after])[1:]]
        end = after
    return "".join([*parts, source[end:]])


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


def _exact_formats(source: str) -> str:
    """The schema with the formats of dates and times as patterns."""
    if '"format"' not in source or not any(f'"{name}"' in source for name in _FORMATS):
        return source
    return json.dumps(_with_patterns(json.loads(source)), allow_nan=False)


def _with_patterns(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_patterns(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            found[key] = {name: _with_patterns(each) for name, each in value.items()}
        else:
            found[key] = value if key in _DATA else _with_patterns(value)
    name = found.get("format")
    if isinstance(name, str) and name in _FORMATS:
        del found["format"]
        found["allOf"] = [*found.get("allOf", ()), {"pattern": _FORMATS[name]}]
    return found


def _wanted_numbers(schema: Any, wanted: bool = False) -> Iterator[int]:
    """Integers in the values of const and enum, wherever they stand."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            below = list(value.values()) if key in _NAMED and isinstance(value, dict) else value
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
