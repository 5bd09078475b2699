"""The protocol of a cache tier below memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reading:
    """Size and evictions of a tier, for the metrics. None means that the tier does not know."""

    name: str
    bytes: int | None = None
    evictions: int | None = None
    errors: int | None = None
    up: bool = True


class Tier(Protocol):
    """A tier reports any failure as a miss, never as an exception."""

    name: str

    async def get(self, key: bytes) -> bytes | None: ...

    async def put(self, key: bytes, value: bytes, ttl: float) -> None: ...

    def reading(self) -> Reading: ...

    async def close(self) -> None: ...
