"""Paths in a settings file, which begin at the file's folder unless they are absolute.

A field that holds one says by its metadata how it is read: `PATH`, `MODEL`, `STATE` or `PROMPTS`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from penstock.core.built_in import BUILT_IN, BUILT_IN_ENCODER
from penstock.core.settings import section_fields, section_type


def _path(text: str, folder: str) -> str:
    return text if not text or text.startswith("~") else os.path.join(folder, text.removeprefix("./"))


def _model(text: str, folder: str) -> str:
    """What is not there, and does not look like a path, is a name."""
    if text in (BUILT_IN, BUILT_IN_ENCODER):
        return text
    rest = text.removeprefix("dummy:")
    found = _path(rest, folder)
    is_path = rest.startswith(("./", "../")) or rest.endswith(".gguf") or os.path.exists(found)
    return text.removesuffix(rest) + found if is_path else text


def _state(text: str, folder: str) -> str:
    scheme = "sqlite:///"
    return scheme + _path(text.removeprefix(scheme), folder) if text.startswith(scheme) else text


def _prompt(text: str, folder: str) -> str:
    return f"@{_path(text[1:], folder)}" if text.startswith("@") else text


PATH: Mapping[str, Any] = {"located": _path}
MODEL: Mapping[str, Any] = {"located": _model, "expected": "a name or a path"}
STATE: Mapping[str, Any] = {"located": _state}
PROMPTS: Mapping[str, Any] = {"located": _prompt}


def with_absolute_paths(cls: type, values: Any, folder: str) -> Any:
    """`values` of a section, as a file in this folder holds them. What has a wrong type is left to the validation."""
    if not isinstance(values, dict):
        return values
    known = section_fields(cls)
    return {name: _located(*known[name], value, folder) if name in known else value for name, value in values.items()}


def _located(field: Any, kind: Any, value: Any, folder: str) -> Any:
    if (located := field.metadata.get("located")) is not None:
        if isinstance(value, list):
            return [located(one, folder) if isinstance(one, str) else one for one in value]
        return located(value, folder) if isinstance(value, str) else value
    if (section := section_type(kind)) is not None:
        return with_absolute_paths(section, value, folder)
    origin, of = get_origin(kind), get_args(kind)
    if origin is Mapping and section_type(of[1]) and isinstance(value, dict):
        return {name: with_absolute_paths(of[1], one, folder) for name, one in value.items()}
    if origin is tuple and section_type(of[0]) and isinstance(value, list):
        return [with_absolute_paths(of[0], one, folder) for one in value]
    return value
