"""One replica of a model: an engine that is launched, watched, and launched again when it is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Literal

from penstock.core.engine import EngineStats, HostStats, ServedEngine
from penstock.core.errors import PenstockError, StartupError
from penstock.core.request import GenerateRequest
from penstock.core.start_times import listed
from penstock.fleet.failover import CircuitBreaker
from penstock.fleet.launcher import Instance, Launcher, Loss
from penstock.worker.client import WorkerClient

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "draining", "lost", "stopped"]

_FIRST_RETRY_SECONDS = 1.0
_LAST_RETRY_SECONDS = 30.0
_NO_READING = EngineStats()


class Replica:
    """`on_change` is called whenever its state changes, before anybody else can act on it."""

    def __init__(self, name: str, launcher: Launcher, on_change: Callable[[Replica], None], number: int = 0) -> None:
        """`number` among the replicas of its model: decides its device."""
        self.name = name
        self.number = number
        self.state: State = "starting"
        self.since = time.time()  # in this state
        self.detail = ""  # for people: why it is in this state
        self.restarts = 0
        self.useful = False  # whether this instance has given a token
        self.launch_seconds = 0.0  # that its last start took
        self.start_seconds: dict[str, float] = {}  # phases of that, as far as they are known, and the first token
        self.breaker = CircuitBreaker()
        self.loss: asyncio.Future[Loss]  # of this instance
        self._leaving = False
        self._launcher = launcher
        self._instance: Instance | None = None
        self._gone = False  # whether it has: until another one is launched
        self._on_change = on_change
        self._keeper: asyncio.Task[None] | None = None

    @property
    def place(self) -> str:
        return self._launcher.place

    @property
    def engine(self) -> ServedEngine:
        assert self._instance is not None, "a replica that is ready has an instance"
        return self._instance.engine

    @property
    def instance(self) -> Instance | None:
        return self._instance

    @property
    def is_owned(self) -> bool:
        """Whether its process is started and ended by this server."""
        return self._launcher.owns

    @property
    def comes_back(self) -> bool:
        """Whether it serves now or will be launched again."""
        return not self._leaving and self.state != "stopped"

    @property
    def process(self) -> int | None:
        """None as well once it is lost: another process may have its id."""
        return None if self._instance is None or self._gone else self._instance.process

    @property
    def stats(self) -> EngineStats:
        """Of an instance that is lost or stopped nothing more is read, once `on_change` has been told, so that nobody
        counts it twice."""
        return _NO_READING if self._instance is None or self._gone else self._instance.engine.stats

    @property
    def host(self) -> HostStats | None:
        """What its process uses of its machine. None: another server, which does not say."""
        engine = None if self._instance is None else self._instance.engine
        return engine.host if isinstance(engine, WorkerClient) else None

    def refusal(self, request: GenerateRequest) -> PenstockError | None:
        return None if self._instance is None else self._instance.refusal(request)

    async def start(self) -> None:
        """Launch it and wait until it serves. Raises StartupError or Unavailable with the engine's own words."""
        instance = await self._launch()
        if self.state == "stopped":
            await instance.stop()
            raise StartupError(f"replica {self.name} was stopped before it served")
        self._began(instance)
        self._keeper = asyncio.create_task(self._keep())

    def start_soon(self, failed: str = "") -> None:
        """Launch it, now or as soon as that is possible. `failed`: why a first try has failed, so the next waits."""
        self.detail = failed
        self._keeper = asyncio.create_task(self._launch_and_keep(_FIRST_RETRY_SECONDS if failed else 0.0))

    async def _launch_and_keep(self, delay: float) -> None:
        self._began(await self._relaunch(delay))
        await self._keep()

    async def _keep(self) -> None:
        """Launch it again whenever it is lost: at once, but ever later while it is of no use."""
        useless = 0
        while True:
            assert self._instance is not None
            try:
                loss = await self._instance.lost()
            except Exception as error:  # whatever it is, there must be a replica again
                log.exception("replica %s can no longer be watched", self.name)
                self._instance.kill()
                loss = Loss(f"it could not be watched: {error}")
            self.loss.set_result(loss)
            useless = 0 if self.useful or loss.from_outside else useless + 1
            delay = 0.0 if useless < 2 else min(_LAST_RETRY_SECONDS, _FIRST_RETRY_SECONDS * 2 ** (useless - 2))
            log.error("replica %s was lost: %s; starting another", self.name, loss.reason)
            self.lose(loss.reason)
            if self._leaving:
                return
            self.restarts += 1
            self._began(await self._relaunch(delay))

    async def _relaunch(self, delay: float) -> Instance:
        while True:
            await asyncio.sleep(delay)
            try:
                return await self._launch()
            except Exception as error:
                delay = min(_LAST_RETRY_SECONDS, 2 * delay or _FIRST_RETRY_SECONDS)
                self.detail = str(error)
                unexpected = not isinstance(error, PenstockError | OSError)
                message = "replica %s did not start: %s; next try in %.0f s"
                log.error(message, self.name, error, delay, exc_info=unexpected)

    async def _launch(self) -> Instance:
        began = time.monotonic()
        instance = await self._launcher.launch()
        phases, total = instance.start_seconds, time.monotonic() - began
        self.launch_seconds, self.start_seconds = total, {}
        if phases:
            self.start_seconds = {"process": max(0.0, total - sum(phases.values())), **phases}
            log.info("replica %s started in %.2f s: %s", self.name, total, listed(self.start_seconds))
        return instance

    def gave_first_token(self, seconds: float) -> None:
        """`seconds` after its first request was sent there."""
        self.useful = True
        self.start_seconds["first_token"] = seconds

    def _began(self, instance: Instance) -> None:
        self._instance = instance
        self._gone = self.useful = False
        self.loss = asyncio.get_running_loop().create_future()
        self._become("draining" if self._leaving else "ready", "")
        if isinstance(instance.engine, WorkerClient):
            instance.engine.leaving.add_done_callback(lambda _: self._worker_leaves(instance))

    def _worker_leaves(self, instance: Instance) -> None:
        """Somebody has told the worker to stop. It finishes what it has; when it has gone, another is launched."""
        if self._instance is instance and self.state == "ready":
            self._become("draining", "its worker is stopping")

    def lose(self, reason: str) -> None:
        """It cannot be used until it is launched again. Whoever notices first says so."""
        if self.state in ("ready", "draining"):
            self._become("lost", reason)
            self._gone = True

    def _become(self, state: State, detail: str) -> None:
        self.state, self.detail, self.since = state, detail, time.time()
        self._on_change(self)

    def drain(self) -> None:
        """It takes no more requests, and is not launched again."""
        self._leaving = True
        self._become("draining", "")

    async def stop(self) -> None:
        """Requests in flight go on elsewhere."""
        if self._keeper is not None:
            self._keeper.cancel()
        self._become("stopped", "")
        self._gone = True
        if self._instance is not None:
            if not self.loss.done():
                self.loss.set_result(Loss("stopped", from_outside=True))
            await self._instance.stop()

    def cut(self) -> None:
        """As if its network had gone: nothing comes from there any more, and nothing arrives."""
        if isinstance(self.engine, WorkerClient):
            self.engine.cut()

    def kill(self) -> None:
        """End its engine at once, whatever that is doing."""
        if self._instance is not None:
            self._instance.kill()


def able(replicas: Collection[Replica], request: GenerateRequest, others: Iterable[Replica]) -> list[Replica]:
    """Those whose kind can compute the request. Raises what they refuse it for if none can, nor any of the others:
    those may be busy, on their way, or at it already."""
    refusals = {replica: replica.refusal(request) for replica in replicas}
    found = [replica for replica, error in refusals.items() if error is None]
    if replicas and not found and all(other.refusal(request) for other in others):
        raise next(error for error in refusals.values() if error is not None)
    return found
