"""Where subschemas stand in a JSON schema, and what a `$ref` points to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

DATA = {"const", "enum", "default", "examples"}  # keywords whose values are not schemas
NAMED = {"properties", "patternProperties", "$defs", "definitions"}  # whose values are schemas by name


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """This one and those in it, wherever they stand."""
    if isinstance(schema, list):
        for each in schema:
            yield from subschemas(each)
    elif isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            if key in NAMED and isinstance(value, dict):
                yield from subschemas(list(value.values()))
            elif key not in DATA:
                yield from subschemas(value)


def segments(reference: str) -> list[str]:
    return [unquote(part).replace("~1", "/").replace("~0", "~") for part in reference.split("/")[1:]]


def target(root: dict[str, Any], reference: Any) -> Any:
    """None: there is none, or not in this document by its path."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found: Any = root
    for part in segments(reference):
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, dict) and part in found:
            found = found[part]
        else:
            return None
    return found


def as_any_of(reference: str) -> str:
    """A reference that may go through `oneOf`, once these are `anyOf`."""
    parts, names = reference.split("/"), False
    for number, part in enumerate(parts):
        if part == "oneOf" and not names:
            parts[number] = "anyOf"
        names = part in NAMED and not names
    return "/".join(parts)
