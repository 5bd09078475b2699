"""What llguidance does not enforce as it is written, or lets through although it is not valid, put so that it does not.

Every change is exact or stricter: what the new schema allows is valid for the old one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from penstock.grammar.disjoint import ADDED, Disjoint
from penstock.grammar.pointers import DATA, NAMED, as_any_of, subschemas, target

Schema = dict[str, Any]

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
# What the specification defines (JSON Schema validation, 7.3). Other formats are annotations.
_DEFINED = {"date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"}
_DEFINED |= {"uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "regex"}
_DEFINED |= {"relative-json-pointer"}
_VERSION_OF_UUID = re.compile("uuid([1-8])")  # as pydantic has it
# Patterns with look-ahead, as libraries write them, and the same without.
_WITHOUT_LOOK_AHEAD = {
    # pydantic: Decimal
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)$",
    # zod: z.email()
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    ),
}
_ANNOTATIONS = {"title", "description", "default", "examples", "readOnly", "writeOnly", "$comment"}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_HEX = "[0-9a-fA-F]"
_MOST_REFERENCES = 8  # one to the next
_WITHIN = 1e-6  # by how much a bound is moved that would otherwise be let through
# Of OpenAPI and others. llguidance would take them for conditions beside a `$ref` or `anyOf`, and refuse recursion.
_UNKNOWN = {"discriminator", "deprecated", "nullable", "example", "externalDocs", "xml", "contentSchema"}
# Branches of a `oneOf` that llguidance refuses where the schema can be reached.
_NEVER_ENFORCED: list[Schema] = [{}, {}]


def rewritten(schema: Schema, exact: Any) -> Schema:
    """`exact`: the same, with exact numbers."""
    limits = [each.get(key) for each in subschemas(exact) for key in _BOUNDS]
    bounds = [Fraction(value) for value in limits if isinstance(value, int | Fraction) and not isinstance(value, bool)]
    found: Schema = _Rewriting(schema, bounds).schema(schema)
    return found


class _Rewriting:
    def __init__(self, root: Schema, bounds: Sequence[Fraction]) -> None:
        self._root = root
        self._disjoint = Disjoint(root)
        self._bounds = bounds

    def schema(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.schema(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        if schema is not self._root and (schema.get("not") == {} or schema.get("not") is True):
            return False
        found: Schema = {}
        for key, value in schema.items():
            if key in NAMED and isinstance(value, dict):
                found[key] = {name: self.schema(each) for name, each in value.items()}
            elif key not in _UNKNOWN and key != ADDED and not key.startswith("x-"):
                found[key] = value if key in DATA else self.schema(value)
        if ADDED in schema:
            found["required"] = [*schema.get("required", ()), *schema[ADDED]]
        if isinstance(reference := found.get("$ref"), str):
            found["$ref"] = as_any_of(reference)
        self._put_one_of(schema, found)
        self._put_names(schema, found)
        self._put_format(found)
        self._put_draft_4(found)
        self._put_bounds(found)
        return found

    def _put_one_of(self, schema: Schema, found: Schema) -> None:
        if not isinstance(branches := schema.get("oneOf"), list):
            return
        base = {key: value for key, value in schema.items() if key != "oneOf"}
        if branches and not self._disjoint.are(base, branches):
            found["oneOf"] = _NEVER_ENFORCED
        elif "anyOf" in found:
            found["allOf"] = [*found.get("allOf", ()), {"anyOf": found.pop("oneOf")}]
        else:
            found["anyOf"] = found.pop("oneOf")

    def _put_names(self, schema: Schema, found: Schema) -> None:
        """Names of further properties that are any, or listed."""
        if (names := schema.get("propertyNames")) is None:
            return
        for _ in range(_MOST_REFERENCES):
            if isinstance(names, dict) and names.keys() - _ANNOTATIONS == {"$ref"}:
                names = target(self._root, names["$ref"])
        says = {key: each for key, each in names.items() if key not in _ANNOTATIONS} if isinstance(names, dict) else {}
        if names is True or (isinstance(names, dict) and says in ({}, {"type": "string"})):
            del found["propertyNames"]
            return
        listed = [says["const"]] if "const" in says else says.get("enum")
        if not isinstance(listed, list) or says.keys() - {"type", "const", "enum"} or len(says.keys() - {"type"}) > 1:
            return
        if says.get("type", "string") == "string" and not found.get("patternProperties"):
            del found["propertyNames"]
            named, further = found.get("properties", {}), found.get("additionalProperties", {})
            texts = [name for name in listed if isinstance(name, str)]
            known = dict.fromkeys([*(name for name in named if name in texts), *texts])
            found["properties"] = {name: named.get(name, further) for name in known}
            found["additionalProperties"] = False

    def _put_format(self, found: Schema) -> None:
        pattern, name = found.get("pattern"), found.get("format")
        if isinstance(pattern, str):
            found["pattern"] = _WITHOUT_LOOK_AHEAD.get(pattern, pattern)
        if not isinstance(name, str):
            return
        wanted = _FORMATS.get(name)
        if version := _VERSION_OF_UUID.fullmatch(name):
            wanted = f"^{_HEX}{{8}}-{_HEX}{{4}}-{version[1]}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}$"
        if wanted is not None:
            found["allOf"] = [*found.get("allOf", ()), {"pattern": wanted}]
        if wanted is not None or name not in _DEFINED:
            del found["format"]

    def _put_draft_4(self, found: Schema) -> None:
        """`exclusiveMinimum: true` says that `minimum` is not allowed itself."""
        for inclusive, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if found.get(exclusive) is True and inclusive in found:
                found[exclusive] = found.pop(inclusive)
            elif found.get(exclusive) is True:
                found[exclusive] = "true"  # which llguidance refuses where the schema can be reached
            elif found.get(exclusive) is False:
                del found[exclusive]

    def _put_bounds(self, found: Schema) -> None:
        """Exclusive bounds that are integers, of numbers that end before the next integer."""
        for inclusive, exclusive, way in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
            bound = found.get(exclusive)
            if not isinstance(bound, int | float) or bound % 1 != 0:
                continue
            if gaps := [gap for b in self._bounds if 0 < (gap := way * (b - int(bound))) < 1]:
                del found[exclusive]
                inside = bound + way * min(_WITHIN, float(min(gaps)) / 1000)
                found[inclusive] = max(inside, found.get(inclusive, inside), key=lambda limit: way * limit)
