"""Work on long answers a little at a time, so that streams go on in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar, cast

import msgspec

SLICE = 64  # log-probabilities of so many tokens, or so many choices, take one or two milliseconds

T = TypeVar("T")
L = TypeVar("L")

_encode = msgspec.json.Encoder().encode


async def slices(items: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    for start in range(0, len(items), SLICE):
        if start:
            await asyncio.sleep(0)
        yield items[start : start + SLICE]


async def shaped(items: Sequence[T], shape: Callable[[Sequence[T]], L]) -> L:
    """The list that `shape` makes of all items, where more than a few already as JSON: encoding it takes as long."""
    if len(items) <= SLICE:
        return shape(items)
    return cast(L, joined([_encode(shape(some)) async for some in slices(items)]))


def joined(lists: list[bytes]) -> Any:
    """JSON lists as one, to put where a list of what they stand for belongs."""
    return msgspec.Raw(b"[" + b",".join([some[1:-1] for some in lists]) + b"]")
