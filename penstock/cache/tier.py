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
    shared: bool  # with other gateways, which may compute the same answer at the same time

    async def get(self, key: bytes) -> bytes | None: ...

    async def put(self, key: bytes, value: bytes, ttl: float) -> None: ...

    async def claim(self, key: bytes, seconds: float) -> bool:
        """Whether the caller is the one to compute this answer. Others then wait for it, for so long at most."""
        ...

    async def release(self, key: bytes) -> None:
        """The answer has been put, or there is none."""
        ...

    async def clear(self) -> None:
        """Forget every answer."""
        ...

    def reading(self) -> Reading: ...

    async def close(self) -> None: ...
