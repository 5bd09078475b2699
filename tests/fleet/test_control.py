"""What administrators tell a fleet about the same replica at the same time: each command does what it says, or says why
not, and the fleet's books are right after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.core.errors import Conflict, InvalidRequest, NotFound
from penstock.fleet.control import FleetControl
from penstock.fleet.fleet import Fleet
from penstock.fleet.launcher import Instance
from penstock.fleet.settings import ModelConfig
from penstock.fleet.snapshot import Stream
from penstock.observability.settings import LogConfig
from tests.fleet.simulated import SimulatedInstance, SimulatedLauncher
from tests.fleet.test_fleet import answer, asking, expected, tokens_of, until


class SlowLauncher(SimulatedLauncher):
    """Launches when it is told to."""

    def __init__(self, go: asyncio.Event) -> None:
        super().__init__()
        self._go = go

    async def launch(self) -> Instance:
        await self._go.wait()
        return await super().launch()


class Controlled:
    """A fleet of some replicas with an idle stream on each, and its administrator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("penstock.fleet.control.pinned", lambda checkpoint: checkpoint)
        self.fleet = Fleet("m")
        self.control = FleetControl({"m": self.fleet}, {"m": ModelConfig("v1")}, LogConfig(), self._new)
        self.launchers: list[SimulatedLauncher] = []
        self.checkpoints: list[str] = []  # of replicas that were added
        self.go = asyncio.Event()  # may be cleared, so that replicas start later
        self.go.set()
        self._streams: dict[str, Stream] = {}

    def _new(self, checkpoint: str, *_: object) -> SimulatedLauncher:
        self.checkpoints.append(checkpoint)
        return self.launcher()

    def launcher(self) -> SimulatedLauncher:
        self.launchers.append(SlowLauncher(self.go))
        return self.launchers[-1]

    def busy(self, *names: str) -> None:
        """Replicas that have a stream from now on."""
        for replica in self.fleet.replicas:
            if replica.name in names:
                self._streams[replica.name] = self.fleet._router.snapshot(replica).sent(3, 0, 0.0)

    def idle(self, name: str) -> None:
        self._streams[name].ended(0.0)
        self.fleet._tell()

    def states(self) -> dict[str, str]:
        return {replica.name: replica.state for replica in self.fleet.replicas}

    async def become(self, **states: str) -> None:
        expected = {name.replace("_", "-"): state for name, state in states.items()}
        while self.states() != expected:
            await self.fleet._changed.wait()


@asynccontextmanager
async def controlled(monkeypatch: pytest.MonkeyPatch, replicas: int = 2) -> AsyncIterator[Controlled]:
    one = Controlled(monkeypatch)
    await one.fleet.start([one.launcher() for _ in range(replicas)])
    await until(lambda: set(one.states().values()) == {"ready"})
    try:
        async with asyncio.timeout(60):  # nothing here takes long: one that waits for ever has failed
            yield one
    finally:
        one.go.set()
        await one.fleet.stop()
        for launcher in one.launchers:
            await launcher.close()


async def test_a_drain_is_answered_whether_or_not_there_is_anything_to_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with controlled(monkeypatch, 3) as one:
        assert (await one.control.remove("m-0", 3600)).state == "draining"
        await one.become(m_1="ready", m_2="ready")
        with pytest.raises(NotFound):
            await one.control.remove("m-0", 3600)
        one.busy("m-1")
        assert (await one.control.remove("m-1", 3600)).state == "draining"
        assert one.states() == {"m-1": "draining", "m-2": "ready"}
        with pytest.raises(InvalidRequest, match="m-2 is the only replica"):
            await one.control.remove("m-2", 3600)
        assert (await one.control.remove("m-1", 0)).state == "draining"  # less patient
        await one.become(m_2="ready")
        await until(lambda: not one.fleet._removals.running)


async def test_a_removal_goes_on_without_whoever_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with controlled(monkeypatch) as one:
        one.busy("m-0")
        removals = [asyncio.create_task(one.fleet.remove(one.fleet.replicas[0], 3600)) for _ in range(3)]
        await one.become(m_0="draining", m_1="ready")
        removals[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await removals[0]
        one.idle("m-0")
        await asyncio.gather(*removals[1:])
        assert one.states() == {"m-1": "ready"}


async def test_one_that_does_not_stop_as_it_should_is_gone_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stop(self: SimulatedInstance) -> None:
        raise OSError("its machine has gone")

    async with controlled(monkeypatch) as one:
        with monkeypatch.context() as patched:
            patched.setattr(SimulatedInstance, "stop", stop)
            with pytest.raises(OSError, match="its machine has gone"):
                await one.fleet.remove(one.fleet.replicas[0], 0)
        assert one.states() == {"m-1": "ready"}
        assert tokens_of(await answer(one.fleet, asking("r", [1, 2, 3]))) == expected(asking("r", [1, 2, 3]))


async def test_one_that_is_restarted_twice_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with controlled(monkeypatch) as one:
        one.busy("m-0")
        restarts = [asyncio.create_task(one.control.restart("m-0", 3600)) for _ in range(2)]
        await one.become(m_0="draining", m_1="ready", m_2="ready")
        one.idle("m-0")
        assert [view.id for view in await restarts[0]] == ["m-1", "m-2"]
        with pytest.raises(Conflict, match="m-0 is being removed, or has been"):
            await restarts[1]
        assert one.states() == {"m-1": "ready", "m-2": "ready"}


async def test_a_replacement_leaves_out_what_is_being_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with controlled(monkeypatch, 4) as one:
        one.busy("m-0", "m-1")
        await one.control.remove("m-0", 3600)
        replacing = asyncio.create_task(one.control.replace("m", "v2", 3600))
        await one.become(m_0="draining", m_1="draining", m_2="ready", m_3="ready", m_4="ready")
        await one.control.remove("m-2", 3600)  # that was to be replaced
        one.idle("m-0")
        one.idle("m-1")
        assert {view.id for view in await replacing} == {"m-4", "m-5"}
        assert one.checkpoints == ["v2", "v2"]
        await one.control.add("m")
        assert one.checkpoints[-1] == "v2"


async def test_one_that_is_removed_before_it_serves_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with controlled(monkeypatch) as one:
        one.go.clear()
        restart = asyncio.create_task(one.control.restart("m-0", 0))
        await until(lambda: "m-2" in one.states())
        await one.control.remove("m-2", 3600)
        await one.become(m_0="ready", m_1="ready")
        one.go.set()
        with pytest.raises(InvalidRequest, match="replica m-2 was stopped before it served"):
            await restart
        assert one.states() == {"m-0": "ready", "m-1": "ready"}
        await until(lambda: not one.launchers[-1].worker.server._gateways)


async def test_a_replica_that_is_lost_has_no_process_to_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have got the id of the one that it had."""
    monkeypatch.setattr(SimulatedInstance, "process", 2**22 + 1)  # more than there are
    async with controlled(monkeypatch) as one:
        one.go.clear()
        one.launchers[0].worker.die()
        await one.become(m_0="lost", m_1="ready")
        assert [view.process is None for view in await one.control.replicas()] == [True, False]
        for fault in ("kill", "slow", "cut"):
            with pytest.raises(Conflict, match="m-0 does not run: it is lost"):
                await one.control.fault("m-0", fault, 1.0)
        one.go.set()
