"""Replicas whose first token is late: a second one is asked, and the client sees one stream."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from penstock.core.request import Chunk, GenerateRequest
from penstock.engine.executor import Step, StepResult
from penstock.fleet.failover import BREAK_AFTER
from penstock.fleet.fleet import Fleet
from penstock.fleet.journal import Journal
from penstock.fleet.replica import Replica
from penstock.fleet.settings import FailoverConfig
from penstock.simulation.paged_executor import PagedExecutor
from tests.fleet.simulated import SimulatedLauncher, SimulatedUpstream, SimulatedWorker
from tests.fleet.test_fleet import answer, asking, expected, last_ledger, tokens_of, until

HEDGE_MS = 5.0


class HeldExecutor(PagedExecutor):
    """Computes nothing until it is let go."""

    def __init__(self, worker: SimulatedWorker) -> None:
        super().__init__(worker.executor.num_blocks, 4)
        self.go = threading.Event()

    def launch(self, step: Step) -> StepResult:
        self.go.wait(20)
        return super().launch(step)


class HeldLauncher(SimulatedLauncher):
    def __init__(self) -> None:
        super().__init__(self._hold)
        self.held: list[HeldExecutor] = []

    def _hold(self, worker: SimulatedWorker) -> None:
        self.held.append(HeldExecutor(worker))
        worker.engine._executor = self.held[-1]

    def let_go(self) -> None:
        for executor in self.held:
            executor.go.set()

    async def close(self) -> None:
        self.let_go()
        await super().close()


@asynccontextmanager
async def hedging(*launchers: SimulatedLauncher) -> AsyncIterator[Fleet]:
    fleet = Fleet("m", failover=FailoverConfig(hedge_ms=HEDGE_MS, wait_seconds=1.0))
    await fleet.start(launchers)
    await until(lambda: all(replica.state == "ready" for replica in fleet.replicas))
    try:
        yield fleet
    finally:
        for launcher in launchers:
            if isinstance(launcher, HeldLauncher):
                launcher.let_go()
        await fleet.stop()
        for launcher in launchers:
            await launcher.close()


def races(fleet: Fleet) -> tuple[int, int]:
    assert fleet.hedging is not None
    return fleet.hedging.won, fleet.hedging.lost


async def test_a_second_replica_answers_where_the_first_is_late() -> None:
    slow = HeldLauncher()
    async with hedging(slow, SimulatedLauncher()) as fleet:
        request = asking("r", [1, 2, 3])
        chunks = await answer(fleet, request)
        assert tokens_of(chunks) == expected(request)
        assert {chunk.request_id for chunk in chunks} == {"r"}
        assert chunks[0].replica == "m-1"
        ledger = last_ledger(chunks)
        assert (ledger.replica, ledger.request_id) == ("m-1", "r")
        assert ledger.accounted == pytest.approx(ledger.total)
        (failover,) = ledger.failovers
        assert (failover.replica, failover.lost >= HEDGE_MS / 1000) == ("m-0", True)
        assert "another replica was faster" in failover.cause
        assert races(fleet) == (1, 0)
        assert [fleet.streams(replica) for replica in fleet.replicas] == [0, 0]
        slow.let_go()
        await until(lambda: not slow.worker.scheduler.has_work)


async def test_a_replica_that_hangs_is_left_alone_after_a_few_requests() -> None:
    async with hedging(HeldLauncher(), SimulatedLauncher()) as fleet:
        for number in range(8):
            request = asking(str(number), [number, 2, 3])
            assert tokens_of(await answer(fleet, request)) == expected(request)
        assert fleet.replicas[0].breaker.open
        assert races(fleet)[0] >= BREAK_AFTER


async def test_the_first_replica_goes_on_if_its_token_comes_first_after_all() -> None:
    slow = [HeldLauncher(), HeldLauncher()]
    async with hedging(*slow) as fleet:
        request = asking("r", [1, 2, 3])
        task = asyncio.create_task(answer(fleet, request))
        await until(lambda: fleet.streams(fleet.replicas[1]) == 1)
        slow[0].let_go()
        chunks = await task
        assert tokens_of(chunks) == expected(request)
        assert (last_ledger(chunks).replica, last_ledger(chunks).failovers) == ("m-0", [])
        assert races(fleet) == (0, 1)


async def test_one_that_is_quick_enough_is_not_hedged() -> None:
    async with hedging(SimulatedLauncher(), SimulatedLauncher()) as fleet:
        assert fleet.hedging is not None
        fleet.hedging._seconds = 20.0
        request = asking("r", [1, 2, 3])
        assert tokens_of(await answer(fleet, request)) == expected(request)
        assert races(fleet) == (0, 0)


@pytest.mark.parametrize("leaves", [False, True])
async def test_an_upstream_that_could_not_compute_it_is_not_asked(leaves: bool) -> None:
    """Nor is the client told what it would have refused, whether the worker stays or finishes what it has and goes."""
    slow = HeldLauncher()
    async with hedging(slow, SimulatedUpstream()) as fleet:
        assert fleet.hedging is not None
        request, second, tried = asking("r", [1, 2, 3]), fleet.hedging._second, asyncio.Event()
        request = replace(request, params=replace(request.params, prompt_logprobs=0))

        def tell(journal: Journal, replica: Replica) -> Any:
            if leaves:
                replica.drain()
            tried.set()
            return second(journal, replica)

        fleet.hedging._second = tell  # type: ignore[method-assign]
        task = asyncio.create_task(answer(fleet, request))
        await tried.wait()
        slow.let_go()
        assert tokens_of(await task) == expected(request)
        assert races(fleet) == (0, 0)


async def test_few_are_hedged_at_a_time() -> None:
    slow = [HeldLauncher(), HeldLauncher()]
    async with hedging(*slow) as fleet:
        requests = [asking(str(number), [number, 2, 3]) for number in range(40)]
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(answer(fleet, request)) for request in requests]
            await until(lambda: sum(map(fleet.streams, fleet.replicas)) == 42)
            await asyncio.sleep(4 * HEDGE_MS / 1000)
            assert sum(map(fleet.streams, fleet.replicas)) == 42, "no more than a twentieth of forty"
            for launcher in slow:
                launcher.let_go()
        for request, task in zip(requests, answers, strict=True):
            assert tokens_of(task.result()) == expected(request)


@pytest.mark.parametrize("dies", [(0,), (1,), (0, 1)])
async def test_replicas_that_die_in_a_race_lose_nothing(dies: tuple[int, ...]) -> None:
    slow = [HeldLauncher(), HeldLauncher()]
    async with hedging(*slow) as fleet:
        request = asking("r", [1, 2, 3])
        task = asyncio.create_task(answer(fleet, request))
        await until(lambda: fleet.streams(fleet.replicas[1]) == 1)
        for number in dies:
            slow[number].worker.die()
        await until(lambda: all(fleet.replicas[number].restarts for number in dies))
        await until(lambda: all(replica.state == "ready" for replica in fleet.replicas))
        for launcher in slow:
            launcher.let_go()
        assert tokens_of(await task) == expected(request)
        assert [fleet.streams(replica) for replica in fleet.replicas] == [0, 0]


async def test_a_client_that_leaves_during_a_race_leaves_nothing_behind() -> None:
    slow = [HeldLauncher(), HeldLauncher()]
    async with hedging(*slow) as fleet:
        task = asyncio.create_task(answer(fleet, asking("r", [1, 2, 3])))
        await until(lambda: fleet.streams(fleet.replicas[1]) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [fleet.streams(replica) for replica in fleet.replicas] == [0, 0]
        for launcher in slow:
            launcher.let_go()
            await until(lambda launcher=launcher: not launcher.worker.scheduler.has_work)  # type: ignore[misc]


@pytest.mark.parametrize("times", [1, 2])
async def test_a_client_that_leaves_while_the_loser_is_aborted_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Also if it is cancelled once more, while all of it is aborted."""
    slow, quick = HeldLauncher(), SimulatedLauncher()
    async with hedging(slow, quick) as fleet:
        closing, closed = asyncio.Event(), asyncio.Event()
        engine = fleet.replicas[0].engine
        submit = engine.submit

        async def closed_slowly(request: GenerateRequest) -> AsyncIterator[Chunk]:
            try:
                async for chunk in submit(request):
                    yield chunk
            finally:
                closing.set()
                await closed.wait()

        monkeypatch.setattr(engine, "submit", closed_slowly)
        task = asyncio.create_task(answer(fleet, asking("r", [1, 2, 3], 3000)))
        await closing.wait()
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        closed.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: [fleet.streams(replica) for replica in fleet.replicas] == [0, 0])
        await until(lambda: not quick.worker.scheduler.has_work)
        assert fleet.hedging is not None
        assert fleet.hedging._racing == 0
