"""How the process that launches gateways keeps them running, with gateways that are scripted here."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from collections.abc import Callable
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, Counter

from penstock.cli.processes import Gateways, Lent, nothing_lent
from penstock.cli.requirements import check_requirements
from penstock.cli.serve import url_of
from penstock.core.errors import StartupError
from penstock.fleet.channel import Channel
from penstock.fleet.gateways import GatewayProcess, LaunchedGateway, LocalGateway, send_heartbeats
from penstock.observability.merging import snapshot
from penstock.settings import settings_from_mapping
from penstock.state.brokered import BrokeredStore, store_handlers
from penstock.state.memory import MemoryStore
from penstock.state.store import Claim


class Scripted:
    """A launcher, and what it launches: the other end of each channel is here."""

    place, host = "nowhere", "10.0.0.5"

    def __init__(self, script: Callable[[Channel], None] | None) -> None:
        """What a gateway does when it is started; None: it cannot be."""
        self.script = script
        self.launches: asyncio.Queue[Channel] = asyncio.Queue()
        self.signals: list[int] = []
        self.kills = 0
        self.code = 0  # that it ends with
        self.count: int | None = None  # of requests, as metrics say; None: it does not answer

    async def launch(self) -> LaunchedGateway:
        if self.script is None:
            raise StartupError("the node has no Penstock")
        self.connection, theirs = socket.socketpair()
        channel = Channel(theirs, {"signal": self._signal, "own_metrics": self._metrics})
        self.script(channel)
        self.launches.put_nowait(channel)
        return self

    async def _signal(self, number: int) -> None:
        self.signals.append(number)

    async def _metrics(self) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        while self.count is None:
            await asyncio.Event().wait()
        Counter("penstock_requests", "", registry=registry).inc(self.count)
        return snapshot(registry)

    async def end(self) -> int:
        return self.code

    def kill(self) -> None:
        self.kills += 1


def ready(channel: Channel) -> None:
    channel.tell("ready", {"m": "generate"}, True, 8000, 4711)


def port_taken(channel: Channel) -> None:
    channel.tell("failed", "cannot listen on 0.0.0.0:8000")
    channel.close()


async def replicas() -> list[object]:
    return []


def gateways(launcher: Scripted, monkeypatch: pytest.MonkeyPatch, lent: Lent = nothing_lent) -> Gateways:
    monkeypatch.setattr("penstock.cli.processes._RETRY_SECONDS", 0.0)
    url = lambda host, port: url_of(host, port, tls=False)  # noqa: E731
    return Gateways(launcher, 1, url, {}, {"replicas": replicas}, lent, CollectorRegistry())


async def test_the_first_gateway_that_cannot_start_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gateways(Scripted(port_taken), monkeypatch)
    found.start()
    with pytest.raises(StartupError, match=r"cannot listen on 0\.0\.0\.0:8000"):
        await found.all_ready
    await found.ended()


@pytest.mark.parametrize(("script", "said"), [(None, "has no Penstock"), (port_taken, "cannot listen")])
async def test_others_are_tried_again_and_say_why(
    script: Callable[[Channel], None] | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = gateways(Scripted(ready), monkeypatch)
    found.start()
    await found.all_ready
    found.start_elsewhere(Scripted(script), 1)
    while True:
        here, there = (gateway.view() for gateway in (*found._here, *found._elsewhere))
        if there.restarts >= 2:
            break
        await asyncio.sleep(0)
    assert (here.state, here.url, here.process) == ("ready", "http://10.0.0.5:8000", 4711)
    assert said in there.detail
    assert not there.url
    found.stop(signal.SIGTERM, -10.0)
    await found.ended()


async def test_one_that_is_lost_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Scripted(ready)
    found = gateways(launcher, monkeypatch)
    found.start()
    await found.all_ready
    first = await launcher.launches.get()
    first.close()
    await launcher.launches.get()
    assert found._here[0].restarts == 1
    found.stop(signal.SIGTERM, -10.0)
    await found.ended()


async def test_one_that_falls_silent_is_killed_and_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted from its first heartbeat: it may take any time to start."""
    monkeypatch.setattr("penstock.fleet.gateways.HEARTBEAT_SECONDS", 0.04)
    launcher = Scripted(ready)
    found = gateways(launcher, monkeypatch)
    found.start()
    await found.all_ready
    channel = await launcher.launches.get()
    await asyncio.sleep(0.6)  # longer than it may be silent
    heartbeats = asyncio.create_task(send_heartbeats(channel))
    await asyncio.sleep(0.6)
    assert (found._here[0].restarts, launcher.kills) == (0, 0)
    heartbeats.cancel()
    await launcher.launches.get()
    assert (found._here[0].restarts, launcher.kills) == (1, 1)
    assert "gateway-0 was lost: nothing heard from it for 0.4 s" in caplog.text
    found.stop(signal.SIGTERM, -10.0)
    await found.ended()


async def test_counters_outlive_the_process_that_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that does not answer."""
    launcher = Scripted(ready)
    found = gateways(launcher, monkeypatch)
    found.start()
    await found.all_ready

    async def counted(channel: Channel) -> str:
        text = bytes(await channel.call("metrics", False)).decode()
        found = re.search(r"^penstock_requests_total (\d+)", text, re.M)
        return "" if found is None else found[1]

    for number, sum in ((30, "30"), (4, "34")):
        channel = await launcher.launches.get()
        launcher.count = number
        assert await counted(channel) == sum
        launcher.count = None
        with monkeypatch.context() as patch:
            patch.setattr("penstock.cli.processes._ASK_SECONDS", -0.99)  # beside the second that all answers may take
            assert await counted(channel) == sum, "it does not answer"
        channel.close()
    launcher.count = 0
    assert await counted(await launcher.launches.get()) == "34"
    found.stop(signal.SIGTERM, -10.0)
    await found.ended()


async def test_one_that_is_lost_holds_nothing_of_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Scripted(ready)
    found = gateways(launcher, monkeypatch, partial(store_handlers, MemoryStore()))
    found.start()
    await found.all_ready
    for number in range(3):
        channel = await launcher.launches.get()
        grant = await BrokeredStore(channel).reserve(Claim(f"{number}", "acme", "m", 10, concurrent=1))
        assert grant.refused is None
        channel.close()
    await launcher.launches.get()
    found.stop(signal.SIGTERM, -10.0)
    await found.ended()


class EndsAsItIsCancelled(GatewayProcess):
    """The task that waits for it is cancelled as it ends, as at the end of a start that failed."""

    def __init__(self) -> None:
        self.killed, self.waiting = asyncio.Event(), asyncio.Event()
        self.keeper: asyncio.Task[None] | None = None

    async def ended(self) -> int:
        self.waiting.set()
        await self.killed.wait()
        assert self.keeper is not None
        asyncio.get_running_loop().call_soon(self.keeper.cancel)
        return 0


async def test_whoever_keeps_a_gateway_can_be_cancelled_as_it_ends() -> None:
    ours, theirs = socket.socketpair()
    process = EndsAsItIsCancelled()

    async def keep() -> None:
        while True:
            process.waiting.clear()
            process.killed.clear()
            await LocalGateway(process, ours, "0.0.0.0").end()

    with ours, theirs:
        process.keeper = asyncio.create_task(keep())
        await process.waiting.wait()
        process.killed.set()
        done, _ = await asyncio.wait([process.keeper], timeout=5)
        process.keeper.cancel()
    assert done
    assert process.keeper.cancelled()


async def test_a_gateway_that_does_not_end_is_left_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Scripted(ready)
    found = gateways(launcher, monkeypatch)
    found.start()
    await found.all_ready
    found.stop(signal.SIGTERM, -9.9)
    assert await found.ended() == 0
    assert launcher.signals == [signal.SIGTERM]


@pytest.mark.parametrize(("script", "status"), [(ready, 143), (lambda channel: None, 0)], ids=["ready", "starting"])
async def test_one_that_is_still_starting_does_not_decide_the_exit_status(
    script: Callable[[Channel], None], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first signal ends it at once."""
    launcher = Scripted(ready)
    found = gateways(launcher, monkeypatch)
    found.start()
    await found.all_ready
    launcher.script, launcher.code = script, 128 + signal.SIGTERM
    (await launcher.launches.get()).close()
    again = await launcher.launches.get()
    while script is ready and found._here[0].state != "ready":  # noqa: ASYNC110
        await asyncio.sleep(0)
    found.stop(signal.SIGTERM, 60.0)
    again.close()
    assert await found.ended() == status


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "ray.gateways is 2, .* set state to redis://HOST:PORT/DB"),
        ({"state": "sqlite:////tmp/x.db"}, "set state to redis"),
        ({"state": "unix:///run/redis.sock"}, "set state to redis"),
        ({"state": "redis://r:6379/0"}, "set server.host to 0.0.0.0 or ::, not 127.0.0.1"),
    ],
)
def test_gateways_on_several_nodes_need_what_they_share(settings: dict[str, object], said: str) -> None:
    asked = settings_from_mapping({**settings, "ray": {"gateways": 2}})
    with pytest.raises(StartupError, match=said):
        check_requirements(asked, "ray")
    check_requirements(asked, "local")  # there the section says nothing


def test_gateways_on_several_nodes_with_all_they_need() -> None:
    shared = {"state": "redis://r:6379/0", "server": {"host": "0.0.0.0"}, "ray": {"gateways": 2}}
    check_requirements(settings_from_mapping(shared), "ray")
