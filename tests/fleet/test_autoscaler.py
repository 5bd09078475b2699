"""Fleets that are sized by their load on a clock of ours: from zero, up, down, and not while somebody else does it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from penstock.autoscaling.arrivals import Arrivals
from penstock.autoscaling.load import Load
from penstock.autoscaling.policy import Need
from penstock.autoscaling.settings import AutoscaleConfig
from penstock.core.engine import Health
from penstock.core.errors import DeadlineExceeded, InvalidRequest, StartupError, Unavailable
from penstock.core.ledger import Ledger
from penstock.core.request import Chunk, Objective
from penstock.fleet.autoscaler import Autoscaler
from penstock.fleet.control import FleetControl
from penstock.fleet.fleet import Fleet
from penstock.fleet.journal import Journal
from penstock.fleet.settings import FailoverConfig, ModelConfig
from penstock.observability.settings import LogConfig
from tests.fleet.simulated import SimulatedLauncher
from tests.fleet.test_fleet import answer, asking, expected, last_ledger, tokens_of, until

CONFIG = AutoscaleConfig(
    min_replicas=0, policy="tests.fleet.test_autoscaler:as_told", idle_seconds=10, down_cooldown_seconds=20
)
needed = 0.0  # by the policy below


def as_told(load: Load, arrivals: Arrivals, config: AutoscaleConfig) -> Need:
    if needed < 0:
        raise ValueError("a policy with a bug")
    return Need(max(needed, 1.0 if load.held else 0.0), f"{needed} told")


def need(replicas: float) -> None:
    global needed
    needed = replicas


class Scaled:
    """A fleet, its autoscaler, and the launchers that it has used."""

    def __init__(self, config: AutoscaleConfig, wait_seconds: float) -> None:
        need(0)
        self.now = 1000.0
        self.launchers = [SimulatedLauncher()]
        self.checkpoints: list[str] = []  # of all but the first
        self.failing = False
        self.fleet = Fleet("m", failover=FailoverConfig(wait_seconds=wait_seconds))
        self.control = FleetControl(
            {"m": self.fleet}, {"m": ModelConfig("m", autoscale=config)}, LogConfig(), self._new
        )
        self.autoscaler = Autoscaler(
            self.fleet, config, lambda: self.control.launcher("m"), drain_seconds=60, clock=lambda: self.now
        )
        self.control.autoscalers = {"m": self.autoscaler}

    def _new(self, checkpoint: str, config: ModelConfig, number: int, logs: LogConfig) -> SimulatedLauncher:
        launcher = SimulatedLauncher()
        self.checkpoints.append(checkpoint)
        launcher.failing = self.failing
        self.launchers.append(launcher)
        return launcher

    async def look(self, seconds: float = 2.0) -> int:
        """After so many seconds. The replicas that there are to be."""
        self.now += seconds
        await self.autoscaler.look()
        assert self.autoscaler.decision is not None
        return self.autoscaler.decision.replicas

    async def settled(self) -> int:
        """Replicas, once all that are there serve."""
        await until(lambda: all(replica.state == "ready" for replica in self.fleet.replicas))
        return len(self.fleet.replicas)


@asynccontextmanager
async def scaled(config: AutoscaleConfig = CONFIG, wait_seconds: float = 30.0) -> AsyncIterator[Scaled]:
    one = Scaled(config, wait_seconds)
    await one.fleet.start(one.launchers)
    try:
        yield one
    finally:
        await one.autoscaler.stop()
        await one.fleet.stop()
        for launcher in one.launchers:
            await launcher.close()


async def asleep(one: Scaled) -> None:
    await one.look()
    assert await one.look(30.0) == 0
    await until(lambda: not one.fleet.replicas)


async def test_zero_holds_requests_until_a_replica_serves() -> None:
    async with scaled() as one:
        revision = one.fleet.info.revision
        await asleep(one)
        assert one.fleet.health().ok
        assert one.fleet.info.revision == revision
        requests = [
            asking(str(number), [1, 2, number], waits="never" if number < 3 else "always") for number in range(5)
        ]
        asked = [asyncio.create_task(answer(one.fleet, request)) for request in requests]
        await until(lambda: one.fleet.held == 5)
        assert await one.look() == 1
        for request, chunks in zip(requests, await asyncio.gather(*asked), strict=True):
            assert tokens_of(chunks) == expected(request)
            ledger = last_ledger(chunks)
            assert ledger.held > 0
            assert ledger.accounted == pytest.approx(ledger.total)
        assert one.fleet.held == 0


async def test_the_loop_wakes_at_once_and_sleeps_between() -> None:
    """With a minute between looks."""
    async with scaled(replace(CONFIG, interval_seconds=60)) as one:
        await asleep(one)
        one.autoscaler.start()
        request = asking("r", [1])
        assert tokens_of(await answer(one.fleet, request)) == expected(request)


async def test_a_held_request_that_is_cancelled_is_dropped() -> None:
    async with scaled() as one:
        await asleep(one)
        asked = asyncio.create_task(answer(one.fleet, asking("r", [1])))
        await until(lambda: one.fleet.held == 1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert one.fleet.held == 0
        assert await one.look() == 0


async def test_a_deadline_passes_and_patience_ends_while_none_starts() -> None:
    async with scaled(wait_seconds=0.1) as one:
        await asleep(one)
        with pytest.raises(DeadlineExceeded):
            await answer(one.fleet, asking("late", [1], deadline=0.05))
        one.failing = True
        asked = asyncio.create_task(answer(one.fleet, asking("r", [1])))
        await until(lambda: one.fleet.held == 1)
        assert await one.look() == 1
        with pytest.raises(Unavailable, match="no replica of m is running"):
            await asked
        assert one.fleet.health() == Health(False, "no machine is free")


def test_the_time_held_is_taken_from_the_deadline_and_counts_for_the_promise() -> None:
    now = 0.0
    request = asking("r", [1], deadline=10.0, objective=Objective("interactive", ttft=2.0))
    journal = Journal(request, lambda: now)
    now = 3.0
    journal.waited()
    journal.resume("m-0", "the only replica")
    assert journal.next_request().deadline == 7.0
    now = 3.5
    journal.take(Chunk("r", [5]))
    ledger = Ledger("r", arrived=103.0, total=0.5, ttft=0.5, met_ttft=True, queued={"step": 0.5})
    journal.settle(ledger)
    assert (ledger.held, ledger.arrived, ledger.ttft, ledger.met_ttft) == (3.0, 100.0, 3.5, False)
    assert ledger.accounted == ledger.total == 3.5


async def test_up_and_down_without_a_failed_request() -> None:
    async with scaled(replace(CONFIG, min_replicas=1)) as one:
        assert await one.look() == 1
        need(3)
        assert await one.look() == 3
        assert await one.settled() == 3
        requests = [asking(str(number), [number], 200) for number in range(30)]
        begun: list[int] = []
        asked = [asyncio.create_task(answer(one.fleet, request, begun.append)) for request in requests]
        await until(lambda: bool(begun))
        need(0)
        await one.look()
        assert await one.look(30.0) == 1
        assert [replica.state for replica in one.fleet.replicas].count("ready") == 1
        for request, chunks in zip(requests, await asyncio.gather(*asked), strict=True):
            assert tokens_of(chunks) == expected(request)
        await until(lambda: len(one.fleet.replicas) == 1)


async def test_one_that_is_lost_while_it_drains_is_gone_and_counts_for_nothing() -> None:
    async with asyncio.timeout(30), scaled() as one:  # less than it may drain
        need(2)
        await one.look()
        await one.settled()
        held = [launcher.worker.hold(3) for launcher in one.launchers]
        requests = [asking(str(number), [number, 5, 6]) for number in range(8)]
        answers = [asyncio.create_task(answer(one.fleet, request)) for request in requests]
        await until(lambda: one.fleet.stats.running == len(requests))
        need(0.5)
        await one.look()
        assert await one.look(30.0) == 1
        (leaving,) = (at for at, replica in enumerate(one.fleet.replicas) if replica.state == "draining")
        replica = one.fleet.replicas[leaving]
        one.launchers[leaving].worker.die()
        await until(lambda: replica.state == "lost")
        assert replica not in one.autoscaler.current
        for executor in held:
            executor.released.set()
        for request, chunks in zip(requests, await asyncio.gather(*answers), strict=True):
            assert tokens_of(chunks) == expected(request)
        await until(lambda: len(one.fleet.replicas) == 1)
        need(2)
        assert await one.look() == 2
        assert await one.settled() == 2


async def test_those_that_do_not_serve_yet_go_first_and_numbers_are_used_again() -> None:
    async with scaled(replace(CONFIG, min_replicas=1)) as one:
        one.failing = True
        need(3)
        await one.look()
        assert [replica.number for replica in one.fleet.replicas] == [0, 1, 2]
        need(0)
        await one.look()
        await one.look(30.0)
        await until(lambda: len(one.fleet.replicas) == 1)
        assert one.fleet.replicas[0].state == "ready"
        one.failing = False
        need(2)
        await one.look()
        assert [replica.number for replica in one.fleet.replicas] == [0, 1]
        assert await one.settled() == 2


async def test_nobody_else_changes_the_number() -> None:
    async with scaled() as one:
        for change in (one.control.add("m", 1), one.control.remove("m-0", 0.0)):
            with pytest.raises(InvalidRequest, match=r"autoscale\.min_replicas"):
                await change
        await asleep(one)
        (view,) = await one.control.autoscaling()
        assert (view.wanted, view.ready, view.max_replicas) == (0, 0, 4)
        assert "nothing asked" in view.reason
        await one.control.replace("m", "other", 0.0)
        assert await one.settled() == 1  # which shows that the other one can be served
        async with one.fleet.resizing:
            need(3)
            await one.look()
            assert len(one.fleet.replicas) == 1


async def test_a_replacement_is_pinned_for_replicas_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.fleet.control.pinned", lambda model: f"{model}@commit")
    async with scaled() as one:
        await one.control.replace("m", "org/other", 0.0)
        need(2)
        await one.look()
        await one.settled()
        assert one.checkpoints == ["org/other@commit"] * 2


async def test_a_policy_that_fails_leaves_the_fleet_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    async with scaled(replace(CONFIG, interval_seconds=0.1)) as one:
        need(-1)
        one.autoscaler.start()
        await until(lambda: "could not be autoscaled" in caplog.text)
        need(2)
        await until(lambda: len(one.fleet.replicas) == 2)


def test_a_policy_must_exist() -> None:
    with pytest.raises(StartupError, match="cannot be imported"):
        Autoscaler(Fleet("m"), AutoscaleConfig(policy="penstock.core:nothing"), SimulatedLauncher)
