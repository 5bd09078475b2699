"""Records when an event loop was held up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic_ns

from penstock.profiling.recorder import Event, Recorder

_TICK_SECONDS = 0.005
_STALL_SECONDS = 0.005  # that a callback is late


@asynccontextmanager
async def recording_stalls(recorder: Recorder) -> AsyncIterator[None]:
    async def watch() -> None:
        while True:
            due = monotonic_ns() + int(_TICK_SECONDS * 1e9)
            await asyncio.sleep(_TICK_SECONDS)
            if (now := monotonic_ns()) - due > _STALL_SECONDS * 1e9:
                recorder.add(Event("event loop stalled", "event loop", due, now, "event loop stalls"))

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
