"""The seam to another process of this machine that holds what several gateway processes share."""

from __future__ import annotations

from typing import Any, Protocol


class Caller(Protocol):
    async def call(self, method: str, *arguments: Any) -> Any:
        """Raises Unavailable where the other process has gone."""
        ...

    def tell(self, method: str, *arguments: Any) -> None:
        """A call without an answer."""
        ...
