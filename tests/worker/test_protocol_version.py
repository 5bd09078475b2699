"""Gateways and workers of different releases tell each other apart by the version of the protocol."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec

from penstock.worker import protocol

# Where this fails, messages have changed: raise `VERSION` in penstock/worker/protocol.py and write both here.
VERSION, DIGEST = 4, "19efc0c5927a3040"


def classes_in(annotation: Any) -> Iterator[type]:
    """Those that are messages, or parts of messages."""
    for part in get_args(annotation):
        yield from classes_in(part)
    if inspect.isclass(annotation) and (dataclasses.is_dataclass(annotation) or issubclass(annotation, msgspec.Struct)):
        yield annotation


def test_whoever_changes_a_message_raises_the_version() -> None:
    found: dict[type, list[str]] = {}
    left = list(classes_in(protocol.ToWorker | protocol.FromWorker))
    while left:
        if (one := left.pop()) not in found:
            hints = get_type_hints(one)
            found[one] = [f"{name}: {one.__annotations__.get(name)}" for name in hints]
            left += [inner for hint in hints.values() for inner in classes_in(hint)]
    text = "\n".join(sorted(f"{one.__name__} {fields}" for one, fields in found.items()))
    assert "GenerateRequest" in text
    assert (protocol.VERSION, hashlib.sha256(text.encode()).hexdigest()[:16]) == (VERSION, DIGEST)
