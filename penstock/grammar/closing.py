"""Objects that name their properties have no others, unless the schema asks for others.

JSON Schema allows any further property where `additionalProperties` is absent. A model that may invent keys does so,
often until `max_tokens`, and hardly anybody who leaves the keyword out wants that. What a closed schema allows is valid
for the open one, too.

Several schemas may describe one object (`allOf`, `$ref` beside other keywords, `anyOf` beside `properties`). It is
closed to the names of all of them: each closed by itself would forbid the names of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

from penstock.grammar.pointers import DATA, NAMED, subschemas, target

Schema = dict[str, Any]

# Objects with one of these are left as they are.
_DECIDED = {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}
_REFUSED = {"oneOf", "not", "if", "then", "else", "contains", "dependencies", "dependentRequired", "dependentSchemas"}
_REFUSED |= {"unevaluatedItems", "$dynamicRef", "$recursiveRef"}
_OF_ITEMS = ("items", "prefixItems", "additionalItems")
_SHAPING = {"properties", "required", "minProperties", "maxProperties", *_DECIDED, *_REFUSED, *_OF_ITEMS}
_COMBINING = ("$ref", "allOf", "anyOf")
_OF_DOCUMENTS = {"$defs", "definitions", "$schema", "$id"}
_KINDS = {"properties": dict, "patternProperties": dict, "required": list, "allOf": list, "anyOf": list}
_MOST_WORK = 20_000  # subschemas and names: schemas that refer twice to ones that refer twice would become huge


class _Entangled(Exception):
    """An object inside another one is described in several places as well, or by itself."""


def closed(schema: Schema) -> Schema:
    for each in subschemas(schema):
        if "$id" in each and each is not schema:
            return schema  # what its references point to depends on where they stand
        if any(key in each and not isinstance(each[key], kind) for key, kind in _KINDS.items()):
            return schema  # which is no schema, as llguidance will say
        if not all(isinstance(name, str) for name in each.get("required", ())):
            return schema
    try:
        found: Schema = _Closing(schema).whole(schema)
    except _Entangled:
        return schema
    return found


class _Closing:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._inside: list[str] = []  # references whose targets stand in their place, around the current schema
        self._work = 0
        self._has_objects: dict[int, bool] = {}

    def whole(self, schema: Any, around: Sequence[Schema] = ()) -> Any:
        """`schema` describes an instance, with those `around` it and nothing else."""
        if schema is True and around:
            schema = {}
        if not isinstance(schema, dict):
            return schema
        self._count(1)
        combining = [key for key in _COMBINING if key in schema]
        if not around and not _SHAPING & schema.keys():
            if not combining or combining == ["$ref"]:
                return self._with_closed_values(schema)
            (key, *more) = combining
            if not more and (key == "anyOf" or len(schema[key]) == 1):
                return self._with_closed_values(schema) | {key: [self.whole(each) for each in schema[key]]}
        parts = [*around, *self._parts(schema)]
        self._check(parts)
        if _is_decided(parts):
            return self._open(schema)
        if "anyOf" in schema and not any("anyOf" in part for part in parts[len(around) + 1 :]):
            own = [_without(part, {"anyOf"}) for part in parts]
            return self._open(_without(schema, {"anyOf"})) | {"anyOf": [self.whole(e, own) for e in schema["anyOf"]]}
        parts += [inner for part in parts for each in part.get("anyOf", ()) for inner in self._parts(each, True)]
        self._check(parts)
        found, names = self._open(schema), _names(parts)
        self._count(len(names))
        describes = bool(names) or any("properties" in part for part in parts)
        if not describes or _is_decided(parts) or _least(parts) > _possible(parts, names) or not _may_be_object(schema):
            return found
        properties = found.get("properties", {})
        return found | {"properties": {name: properties.get(name, {}) for name in names}, "additionalProperties": False}

    def _open(self, schema: Any) -> Any:
        """One of several that describe an instance, with what its `$ref` points to in it."""
        if not isinstance(schema, dict):
            return schema
        self._count(1)
        found = self._with_closed_values(schema)
        for key in ("allOf", "anyOf"):
            if key in schema:
                found[key] = [self._open(each) for each in schema[key]]
        if (reference := found.pop("$ref", None)) is not None:
            if reference in self._inside:
                raise _Entangled
            self._inside.append(reference)
            found["allOf"] = [self._open(self._target(reference)), *found.get("allOf", ())]
            self._inside.pop()
        return found

    def _with_closed_values(self, schema: Schema) -> Schema:
        """What describes its properties and items, and what stands in `$defs`."""
        found: Schema = {}
        for key, value in schema.items():
            if key in NAMED and isinstance(value, dict):
                found[key] = {name: self.whole(each) for name, each in value.items()}
            elif key in DATA or key in _REFUSED or key in _COMBINING:
                found[key] = value
            else:
                found[key] = [self.whole(each) for each in value] if isinstance(value, list) else self.whole(value)
        return found

    def _parts(self, schema: Any, of_alternatives: bool = False, inside: tuple[str, ...] = ()) -> list[Schema]:
        """It and all that holds as well where it does, or may hold."""
        if not isinstance(schema, dict):
            return []
        self._count(1)
        found = [schema]
        for each in [*schema.get("allOf", ()), *(schema.get("anyOf", ()) if of_alternatives else ())]:
            found += self._parts(each, of_alternatives, inside)
        if (reference := schema.get("$ref")) is not None:
            if reference in inside:
                raise _Entangled
            found += self._parts(self._target(reference), of_alternatives, (*inside, reference))
        return found

    def _target(self, reference: Any) -> Any:
        found = target(self._root, reference)
        if not isinstance(found, dict | bool):
            raise _Entangled
        return _without(found, _OF_DOCUMENTS) if isinstance(found, dict) else found

    def _check(self, parts: Sequence[Schema]) -> None:
        """Objects inside of this one have one description each. Else closing one would forbid the names of another."""
        for part in parts:
            patterns = [each for each in part.get("patternProperties", {}).values() if self._describes_objects(each)]
            if patterns and (len(patterns) > 1 or any(map(self._describes_objects, _named(part).values()))):
                raise _Entangled
        for one, other in combinations(parts, 2):
            self._count(1 + len(_named(one)))
            pairs = [(value, _named(other)[name]) for name, value in _named(one).items() if name in _named(other)]
            pairs += product(_rest(one), [*_named(other).values(), *_rest(other)])
            pairs += product(_rest(other), _named(one).values())
            pairs += product(*([each[key] for key in _OF_ITEMS if key in each] for each in (one, other)))
            if any(all(map(self._describes_objects, pair)) for pair in pairs):
                raise _Entangled

    def _describes_objects(self, schema: Any) -> bool:
        if (known := self._has_objects.get(id(schema))) is None:
            found = subschemas(schema)
            known = any("properties" in each or "required" in each or "$ref" in each for each in found)
            self._has_objects[id(schema)] = known
        return known

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > _MOST_WORK:
            raise _Entangled


def _without(schema: Schema, keys: set[str]) -> Schema:
    return {key: value for key, value in schema.items() if key not in keys}


def _named(part: Schema) -> Schema:
    found: Schema = part.get("properties", {})
    return found


def _rest(part: Schema) -> list[Any]:
    """What describes properties by other means than their names."""
    return [part.get("additionalProperties"), *part.get("patternProperties", {}).values()]


def _names(parts: Sequence[Schema]) -> list[str]:
    """Each once, in the order of the schema."""
    return list(dict.fromkeys(name for part in parts for name in (*_named(part), *part.get("required", ()))))


def _least(parts: Sequence[Schema]) -> float:
    return max([0, *(least for part in parts if isinstance(least := part.get("minProperties"), int | float))])


def _possible(parts: Sequence[Schema], names: Sequence[str]) -> int:
    return sum(all(_named(part).get(name) is not False for part in parts) for name in names)


def _is_decided(parts: Sequence[Schema]) -> bool:
    return any((_DECIDED | _REFUSED) & part.keys() for part in parts)


def _may_be_object(schema: Schema) -> bool:
    types = schema.get("type", "object")
    return "object" in (types if isinstance(types, list) else [types]) and not {"const", "enum"} & schema.keys()
