"""What is left out where settings are shown: passwords in URLs, and fields that are `repr=False`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

HIDDEN = "…"

# Up to the last @: a password may have an unescaped / or @ of its own. In scheme:///PATH an @ is part of the path.
_CREDENTIALS = re.compile(r"(?s)://(?!/)(?P<user>[^:@/]*:)?.*@")
_SECRET_OPTION = re.compile(r"(?i)(?P<name>[?&][^=&#]*(?:pass|secret|token|key|sig)[^=&#]*=)[^&#]+")


def without_credentials(text: str) -> str:
    """A URL without its password, or the token in the place of one, and without those among its options."""
    text = _CREDENTIALS.sub(lambda found: f"://{found['user'] or ''}{HIDDEN}@", text)
    return _SECRET_OPTION.sub(rf"\g<name>{HIDDEN}", text)


def shown(value: Any) -> Any:
    """Settings as mappings, lists and plain values, without secrets."""
    if is_dataclass(value):
        return {f.name: _of_field(f.repr, getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: shown(below) for key, below in value.items()}
    if isinstance(value, tuple | list):
        return [shown(below) for below in value]
    return without_credentials(value) if isinstance(value, str) else value


def _of_field(public: bool, value: Any) -> Any:
    if public:
        return shown(value)
    return dict.fromkeys(value, HIDDEN) if isinstance(value, Mapping) else HIDDEN
