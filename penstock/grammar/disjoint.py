"""Which branches of a `oneOf` exclude each other.

A mask can allow what one branch allows, not forbid what two of them do. So `oneOf` becomes `anyOf` where no instance
matches two branches, which shows by types, by constants, and by a property that must be there and has different ones.

Branches may be made stricter than their author wrote them: the property that tells them apart is required. What comes
out of a stricter branch must not match another one as it was written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from penstock.grammar.pointers import subschemas, target

Schema = dict[str, Any]

_TYPES = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
_MOST_WORK = 50_000  # schemas compared
_MOST_DEEP = 12
ADDED = "\0required"  # names that a schema has to require, and does not as it was written


class Disjoint:
    """Of one document. Writes into it that discriminators are required."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._work = 0
        schemas = list(subschemas(root))
        self._own_references = not any("$id" in each for each in schemas if each is not root)
        for each in schemas:
            discriminator = each.get("discriminator")
            name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
            for tag in [name, *self._tags(each)]:
                if isinstance(tag, str):
                    self._require(tag, each, set())

    def are(self, base: Schema, branches: Sequence[Any]) -> bool:
        """Whether nothing that `base` allows is in two of the branches."""
        around = self._parts(base)
        parts = [[*around, *self._parts(branch)] for branch in branches]
        return self._differ_in_one(parts) or all(self._exclude(*pair, 0) for pair in combinations(parts, 2))

    def _differ_in_one(self, branches: Sequence[Sequence[Any]]) -> bool:
        """Whether a property that all require has other values in each: hundreds of branches are too many for pairs."""
        if any(False in parts or _types(parts) != {"object"} for parts in branches):
            return False
        for name in sorted(set.intersection(*(_required(parts, ADDED) for parts in branches))):
            values = [_wanted_of_all(self._values(parts, name)) for parts in branches]
            known = [each for each in values if each is not None]
            if len(known) == len(branches) and sum(map(len, known)) == len(set.union(*known)):
                return True
        return False

    def _tags(self, union: Schema) -> list[str]:
        """What has another constant in each object of the union: a discriminator, whether or not the schema says so."""
        branches = [self._parts(branch) for branch in [*_list(union, "oneOf"), *_list(union, "anyOf")]]
        objects = [parts for parts in branches if False not in parts and any(map(_named, parts))]
        if len(objects) < 2:
            return []
        found = list[str]()
        for name in sorted(set.intersection(*({name for part in parts for name in _named(part)} for parts in objects))):
            values = [_wanted_of_all(self._values(parts, name)) for parts in objects]
            known = [each for each in values if each is not None and len(each) == 1]
            if len(known) == len(objects) == len(set.union(set(), *known)):
                found.append(name)
        return found

    def _require(self, name: str, union: Schema, seen: set[int]) -> None:
        """In all branches."""
        for branch in [*_list(union, "oneOf"), *_list(union, "anyOf")]:
            for part in self._parts(branch):
                if not isinstance(part, dict) or id(part) in seen:
                    continue
                seen.add(id(part))
                if name in _named(part) and name not in _list(part, "required"):
                    part.setdefault(ADDED, []).append(name)
                self._require(name, part, seen)

    def _exclude(self, mine: Sequence[Any], others: Sequence[Any], depth: int) -> bool:
        """Whether no instance matches all of `mine` and all of `others`."""
        self._work += 1
        if depth > _MOST_DEEP or self._work > _MOST_WORK:
            return False
        if False in mine or False in others:
            return True
        types = _types(mine) & _types(others)
        if not types:
            return True
        ours, theirs = _wanted_of_all(mine), _wanted_of_all(others)
        if ours is not None and theirs is not None and not ours & theirs:
            return True
        if types == {"object"} and self._properties_differ(mine, others, depth):
            return True
        for these, those in ((mine, others), (others, mine)):
            for number, part in enumerate(these):
                for key in ("anyOf", "oneOf"):
                    if not (branches := _list(part, key)):
                        continue
                    rest = [*these[:number], _without(part, key), *these[number + 1 :]]
                    if all(self._exclude([*rest, *self._parts(branch)], those, depth + 1) for branch in branches):
                        return True
        return False

    def _properties_differ(self, mine: Sequence[Schema], others: Sequence[Schema], depth: int) -> bool:
        certain = _required(mine) | _required(others)
        certain |= _required(mine, ADDED) & _required(others, ADDED)
        return any(
            self._exclude(self._values(mine, name), self._values(others, name), depth + 1) for name in sorted(certain)
        )

    def _values(self, parts: Sequence[Schema], name: str) -> list[Any]:
        """What the property of this name must match."""
        found = list[Any]()
        for part in parts:
            if name in _named(part):
                found += self._parts(_named(part)[name])
            elif "additionalProperties" in part and not part.get("patternProperties"):
                found += self._parts(part["additionalProperties"])
        return found

    def _parts(self, schema: Any, seen: tuple[str, ...] = ()) -> list[Any]:
        """It and all that holds where it does, by `allOf` and `$ref`. False: nothing can match."""
        self._work += 1
        if not isinstance(schema, dict) or self._work > _MOST_WORK:
            return [False] if schema is False else []
        found = [schema]
        for each in _list(schema, "allOf"):
            found += self._parts(each, seen)
        reference = schema.get("$ref")
        if self._own_references and isinstance(reference, str) and reference not in seen and len(seen) < _MOST_DEEP:
            found += self._parts(target(self._root, reference), (*seen, reference))
        return found


def _required(parts: Sequence[Schema], *more: str) -> set[str]:
    return {name for part in parts for key in ("required", *more) for name in _list(part, key) if isinstance(name, str)}


def _list(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _named(part: Schema) -> Schema:
    value = part.get("properties")
    return value if isinstance(value, dict) else {}


def _without(schema: Schema, key: str) -> Schema:
    return {name: value for name, value in schema.items() if name != key}


def _types(parts: Sequence[Schema]) -> frozenset[str]:
    found = _TYPES
    for part in parts:
        if "type" in part:
            named = {str(each) for each in (part["type"] if isinstance(part["type"], list) else [part["type"]])}
            found &= named | ({"integer", "fraction"} if "number" in named else set())
        if (wanted := _wanted(part)) is not None:
            found &= {_type(value) for value in wanted}
    return found


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "fraction"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object" if isinstance(value, dict) else "null"


def _wanted(part: Schema) -> list[Any] | None:
    return [part["const"]] if "const" in part else part["enum"] if isinstance(part.get("enum"), list) else None


def _wanted_of_all(parts: Sequence[Schema]) -> set[str] | None:
    found = [{_key(value) for value in wanted} for part in parts if (wanted := _wanted(part)) is not None]
    return set.intersection(*found) if found else None


def _key(value: Any) -> str:
    """The same for what JSON Schema holds equal: 1 and 1.0, but not 1 and true; objects in any order."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value == int(value) else value
