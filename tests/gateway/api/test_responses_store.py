"""How a stored response ends, whoever ends it: all interleavings of those who want to at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import NotFound
from penstock.gateway.api import responses_types as types
from penstock.gateway.api.responses_store import LEASE, RUNNING, ResponseStore
from penstock.gateway.settings import ResponsesConfig
from penstock.state.memory import MemoryStore

ID, TENANT = "resp_a", "acme"


def response(status: types.Status) -> types.ResponseObject:
    given = dict.fromkeys(("instructions", "max_output_tokens", "metadata", "previous_response_id"))
    given |= dict.fromkeys(("prompt_cache_key", "reasoning", "safety_identifier", "temperature", "text"))
    given |= dict.fromkeys(("tool_choice", "tools", "top_p", "user"))
    said = {"id": ID, "created_at": 1, "model": "m", "output": [], "status": status, "truncation": "disabled"}
    flags = dict.fromkeys(("background", "parallel_tool_calls", "store"), True)
    return msgspec.json.decode(msgspec.json.encode(given | said | flags), type=types.ResponseObject)


class Stepwise(MemoryStore):
    """Every operation waits until the test lets the next one of its task go."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[str, asyncio.Future[None]] = {}

    async def _wait(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        gate = self.gates[task.get_name()] = asyncio.get_running_loop().create_future()
        await gate

    async def save(self, *given: Any, **more: Any) -> bool:
        await self._wait()
        return await super().save(*given, **more)

    async def load(self, *given: Any) -> bytes | None:
        await self._wait()
        return await super().load(*given)

    async def discard(self, *given: Any) -> bool:
        await self._wait()
        return await super().discard(*given)


async def interleaved(
    gated: Stepwise, work: dict[str, Callable[[], Awaitable[Any]]], choose: Callable[[int], int]
) -> dict[str, Any]:
    """Run all, one operation of the store at a time, of whichever task is chosen."""

    async def one(name: str) -> Any:
        return await work[name]()

    tasks = {name: asyncio.create_task(one(name), name=name) for name in work}
    while running := [name for name, task in tasks.items() if not task.done()]:
        await asyncio.sleep(0)
        if ready := [name for name in running if name in gated.gates]:
            gated.gates.pop(ready[choose(len(ready))]).set_result(None)
            await asyncio.sleep(0)
    return {name: task.result() for name, task in tasks.items()}


@given(data=st.data(), lost=st.booleans(), deleted=st.booleans())
def test_a_response_that_has_ended_stays_what_it_is(data: st.DataObject, lost: bool, deleted: bool) -> None:
    gated = Stepwise()
    store = ResponseStore(gated, ResponsesConfig())
    seen: list[types.Status] = []

    async def end(status: types.Status) -> types.ResponseObject | None:
        return await store.end(TENANT, ID, lambda before: msgspec.structs.replace(before, status=status))

    async def look() -> None:
        for _ in range(3):
            try:
                seen.append((await store.response(TENANT, ID)).status)
            except NotFound:
                assert deleted

    async def begin() -> None:
        await store.save(TENANT, response("in_progress"), b"[]")
        await store.hold(TENANT, ID)

    async def run() -> dict[str, Any]:
        await interleaved(gated, {"begin": begin}, lambda _: 0)
        if lost:
            await MemoryStore.discard(gated, LEASE, TENANT, ID)
        work: dict[str, Callable[[], Awaitable[Any]]] = {
            "worker": lambda: end("completed"),
            "client": lambda: end("cancelled"),
            "reader": look,
        }
        if deleted:
            work["delete"] = lambda: store.delete(TENANT, ID)
        return await interleaved(gated, work, lambda count: data.draw(st.integers(0, count - 1)))

    ended = asyncio.run(run())
    statuses = {found.status for name in ("worker", "client") if (found := ended[name]) is not None}
    after = [status for status in seen if status not in RUNNING]
    assert len(statuses | set(after)) <= 1, (statuses, seen)
    assert seen[len(seen) - len(after) :] == after, "what has ended does not run again"
    assert deleted or lost or statuses


async def test_what_is_too_large_to_be_kept_has_failed() -> None:
    store = ResponseStore(MemoryStore(), ResponsesConfig(max_mib=0.002))
    await store.save(TENANT, response("in_progress"), b"[]")
    text = types.OutputMessage("msg_a_0", "completed", [types.OutputText("x" * 3000)])
    await store.end(TENANT, ID, lambda before: msgspec.structs.replace(before, status="completed", output=[text]))
    found = await store.response(TENANT, ID)
    assert found.error is not None
    assert (found.status, "max_mib" in found.error.message) == ("failed", True)


@pytest.mark.parametrize("status", ["completed", "cancelled"])
async def test_only_one_that_runs_is_held(status: types.Status) -> None:
    store = ResponseStore(MemoryStore(), ResponsesConfig())
    await store.save(TENANT, response(status), b"[]")
    assert not await store.hold(TENANT, ID)
