"""Other gateway processes of the same server: what one of them is asked for may be known to another."""

from __future__ import annotations

from typing import Protocol


class Siblings(Protocol):
    async def metrics(self, openmetrics: bool) -> bytes | None:
        """Of all processes together, in the format of OpenMetrics or in that of Prometheus; None: this one is alone."""
        ...

    async def account(self, tenant: str, id: str) -> bytes | None:
        """Of a request that another process has answered."""
        ...

    async def slowest(self, tenant: str, limit: int) -> list[bytes] | None:
        """Of all processes, the slowest first; None: this one is alone."""
        ...

    async def flush(self) -> bool:
        """Forget the cached answers of all processes; False: this one is alone."""
        ...


class Alone:
    async def metrics(self, openmetrics: bool) -> bytes | None:
        return None

    async def account(self, tenant: str, id: str) -> bytes | None:
        return None

    async def slowest(self, tenant: str, limit: int) -> list[bytes] | None:
        return None

    async def flush(self) -> bool:
        return False
