"""The replicas of one model as one `Engine`: each request goes to the replica that serves it soonest, and goes on at
another one if that is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from itertools import chain, repeat

from penstock.core.engine import ChunkStream, EngineInfo, EngineStats, Health
from penstock.core.errors import DeadlineExceeded, EngineFailure, Overloaded, PenstockError, StartupError, Unavailable
from penstock.core.ledger import Ledger
from penstock.core.request import GenerateRequest
from penstock.fleet.failover import SUSPECT_AFTER, Quarantine, RetryBudget, Trial
from penstock.fleet.hedging import Hedging
from penstock.fleet.journal import Journal
from penstock.fleet.launcher import Launcher, Loss, WorkerInstance
from penstock.fleet.removal import Removals
from penstock.fleet.replica import Replica, able
from penstock.fleet.router import Placement, Router
from penstock.fleet.settings import FailoverConfig, RoutingConfig
from penstock.fleet.standby import StandbyPool
from penstock.fleet.stats import Readings, combined_info
from penstock.fleet.stream import RequestStream
from penstock.worker.client import GONE, LOST

log = logging.getLogger(__name__)

MAX_HELD = 4096  # requests that wait for a replica
LOOK_SECONDS = 0.5  # between looks for one at the latest
MAX_FRUITLESS = 2  # retries of a request whose replica lives and yet fails it
KEPT_SECONDS = 60.0  # how long the ledger of an aborted request can be asked for


class Fleet:
    info: EngineInfo  # known once a replica has been ready

    def __init__(
        self,
        model: str,
        routing: RoutingConfig | None = None,
        failover: FailoverConfig | None = None,
        standby: int = 0,
    ) -> None:
        """`standby`: processes of a warm pool for its replicas."""
        self.model = model
        self.pool = StandbyPool(standby, lambda: self.is_starting) if standby else None
        self.replicas: list[Replica] = []
        self.failovers = 0
        self._router = Router(routing or RoutingConfig())
        self._config = failover or FailoverConfig()
        self._started = 0
        self.held = 0  # requests that wait for a replica
        # Starts one when it is called. None: nobody does if there is none, so that requests need not wait.
        self.wake: Callable[[], None] | None = None
        self.resizing = asyncio.Lock()  # while replicas are replaced, and while the autoscaler acts
        self._background: list[asyncio.Task[None]] = []
        self._removals = Removals(self._drained, self._forget)
        self._changed = asyncio.Event()  # set, and replaced, when a replica changes its state
        self.journals: dict[str, Journal] = {}  # of requests in flight, and of those aborted lately
        self._quarantine = Quarantine()
        self._budget = RetryBudget()
        self.hedging: Hedging | None = None
        if self._config.hedge_ms is not None:
            self.hedging = Hedging(self._config.hedge_ms / 1000, self.choose, self.left)
        self._trial = Trial()
        self._court: Replica | None = None  # that the suspect has to itself until then, but for streams that run
        self._has_upstreams = False
        self._readings = Readings()

    # -- replicas ------------------------------------------------------------------------------------------------------

    async def start(
        self, launchers: Sequence[Launcher], names: Sequence[str] = (), expected: EngineInfo | None = None
    ) -> str:
        """Returns when the first replica serves; the others follow. Raises StartupError if the first one cannot. Where
        `info` is known, as the model has been served by other processes, none is waited for or needed at all.

        `expected`: with this in place of `info`, a first replica that is unavailable for now need not be waited for.
        Returns why it is, and launches it as soon as that is possible."""
        named = zip(launchers, chain(names, repeat(None)), strict=False)
        replicas = [self._new(launcher, name) for launcher, name in named]
        unavailable, following = "", replicas
        if replicas and not hasattr(self, "info"):
            first, *following = replicas
            unavailable = await self._start_first(first, expected)
        for replica in following:
            replica.start_soon()
        if self.pool is not None:
            self.pool.start()
        return unavailable

    async def _start_first(self, replica: Replica, expected: EngineInfo | None) -> str:
        try:
            await replica.start()
        except Unavailable as error:
            if expected is None:
                raise StartupError(f"{self.model}: {error.message}") from error
            self.info = expected
            replica.start_soon(error.message)
            return f"{self.model}: {error.message}"
        return ""

    def keep_doing(self, work: Coroutine[None, None, None]) -> None:
        """Until the fleet stops."""
        self._background.append(asyncio.create_task(work))

    async def until_ready(self) -> None:
        """Wait until a replica serves."""
        while not any(replica.state == "ready" for replica in self.replicas):
            await self._changed.wait()

    def add(self, launcher: Launcher, name: str | None = None) -> Replica:
        replica = self._new(launcher, name)
        replica.start_soon()
        return replica

    async def add_ready(self, launcher: Launcher, number: int | None = None) -> Replica:
        """Returns when it serves. Raises StartupError if it cannot, and then it is not in the fleet."""
        replica = self._new(launcher, number=number)
        try:
            await replica.start()
        except BaseException:
            self._forget(replica)
            raise
        return replica

    @property
    def free_number(self) -> int:
        """The least that no replica has."""
        used = {replica.number for replica in self.replicas}
        return next(number for number in range(len(used) + 1) if number not in used)

    def _new(self, launcher: Launcher, name: str | None = None, number: int | None = None) -> Replica:
        if self.pool is not None:
            self.pool.warm(launcher)
        number = self.free_number if number is None else number
        replica = Replica(name or f"{self.model}-{self._started}", launcher, self._on_change, number)
        self._started += 1
        self.replicas.append(replica)
        self._router.add(replica)
        return replica

    @property
    def is_starting(self) -> bool:
        """Whether a replica is on its way, or requests wait for one."""
        return self.held > 0 or any(replica.state in ("starting", "lost") for replica in self.replicas)

    async def refresh(self) -> None:
        """Find out what `held` and `streams` are, where others know."""

    def streams(self, replica: Replica) -> int:
        """Requests in flight there."""
        return self._router.snapshot(replica).streams if replica in self.replicas else 0

    async def remove(self, replica: Replica, drain_seconds: float) -> None:
        """Let it finish what it has; what is not done in time goes on elsewhere. Returns when it has gone, and goes on
        if whoever waits for that is cancelled."""
        await asyncio.shield(self.remove_soon(replica, drain_seconds))

    def remove_soon(self, replica: Replica, drain_seconds: float) -> asyncio.Task[None]:
        """It takes no more requests from now on."""
        return self._removals.start(replica, drain_seconds)

    def _forget(self, replica: Replica) -> None:
        if replica in self.replicas:
            self.replicas.remove(replica)
            self._router.remove(replica)
            self._tell()

    async def _drained(self, replica: Replica, seconds: float) -> None:
        """Wait until it has no requests any more, but no longer than this. Those of one that is lost go on elsewhere at
        once."""
        try:
            async with asyncio.timeout(seconds):
                while replica.state != "lost" and self.streams(replica):
                    await self._changed.wait()
        except TimeoutError:
            left = self.streams(replica)
            log.warning("replica %s stops with %d requests, which go on elsewhere", replica.name, left)

    def cut(self, replica: Replica) -> None:
        replica.cut()

    async def stop(self) -> None:
        for task in (*self._background, *self._removals.running):
            task.cancel()
        if self.pool is not None:
            await self.pool.stop()
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    def kill(self) -> None:
        for replica in self.replicas:
            replica.kill()

    def _on_change(self, replica: Replica) -> None:
        if replica.state == "ready":
            self._has_upstreams = any(not isinstance(each.instance, WorkerInstance) for each in self.replicas)
            self._combine_infos()
            self._router.restarted(replica)
        elif replica.state in ("lost", "stopped"):
            self._combine_infos()
            self._readings.retire(replica.stats)
        self._tell()

    def _combine_infos(self) -> None:
        serving = [each for each in self.replicas if each.state in ("ready", "draining") and each.instance is not None]
        infos = [each.engine.info for each in serving]
        if infos:  # else what was known stays true of the replicas that are started again
            self.info = combined_info(infos)

    def _tell(self) -> None:
        """Let those who wait for a replica, or for one to be idle, look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> ChunkStream:
        return RequestStream(self, Journal(request))

    def begin(self, journal: Journal) -> None:
        """Its first chunk is asked for. Raises what a request in quarantine is refused with."""
        self._quarantine.check(journal.request, time.monotonic())
        self.journals[journal.request.id] = journal

    def completed(self, journal: Journal, placed: Placement) -> None:
        """Its last chunk has come."""
        self.left(placed, journal)
        if journal.on_trial:
            self._acquit(journal)
        del self.journals[journal.request.id]

    def abandoned(self, journal: Journal) -> None:
        """It has failed, or nobody reads it any more; its ledger may yet be asked for."""
        if journal.on_trial:
            self._acquit(journal)
        if journal.request.id in self.journals:
            asyncio.get_running_loop().call_later(KEPT_SECONDS, self.journals.pop, journal.request.id, None)

    async def place(self, journal: Journal) -> Placement:
        """Wait for a replica, and for a suspect for one that has no other suspects."""
        if journal.suspected >= SUSPECT_AFTER and not journal.on_trial:
            await self._trial.begin(journal)
        placed = self.choose(journal) or await self._wait_for_replica(journal)
        while journal.on_trial and not self._to_itself(journal, placed):
            self.left(placed)
            placed = await self._wait_for_replica(journal)
        return placed

    def choose(self, journal: Journal, beside: Replica | None = None) -> Placement | None:
        """Raises what the request is refused for if it cannot be computed here. `beside`: the replica that it is at
        already, where it can."""
        now = time.monotonic()
        found = [
            replica
            for replica in self.replicas
            if replica.state == "ready"
            and replica is not beside
            and replica.name not in journal.refused
            and replica.breaker.allows(now)
            and (not journal.output or replica.engine.info.continues)
            and (replica is not self._court or journal.on_trial)
        ]
        if self._has_upstreams:
            others = (each for each in self.replicas if each not in found and (each.comes_back or each is beside))
            found = able(found, journal.request, others)
        placed = self._router.place(journal.request, journal.output, found) if found else None
        if placed is not None:
            placed.replica.breaker.try_again(now)
        return placed

    def _to_itself(self, journal: Journal, placed: Placement) -> bool:
        """Keep other requests from the replica of a suspect. Those that have had a token there are above suspicion."""
        self._court = placed.replica
        return self._router.snapshot(placed.replica).prefilling == 1

    def _acquit(self, journal: Journal) -> None:
        self._court = None
        self._trial.end(journal)
        self._tell()

    async def _wait_for_replica(self, journal: Journal) -> Placement:
        """Of those that have refused it none will do; for one that starts, or starts again, it pays to wait."""
        if journal.refused:
            raise journal.first_to_end()
        if self.held >= MAX_HELD:
            raise Overloaded(f"{self.held} requests wait for a replica already", retry_after=5.0)
        self.held += 1
        remaining = journal.remaining()
        try:
            async with asyncio.timeout(min(self._config.wait_seconds, remaining)):
                while True:
                    if not (journal.waits or self._is_waking()):
                        raise Unavailable(f"no replica of {self.model} can take it now")
                    if not any(replica.comes_back for replica in self.replicas):
                        if self.wake is None:
                            raise Unavailable(f"no replica of {self.model} is left; try again in a few seconds")
                        self.wake()
                    with suppress(TimeoutError):  # circuit breakers close by themselves
                        async with asyncio.timeout(LOOK_SECONDS):
                            await self._changed.wait()
                    if (placed := self.choose(journal)) is not None:
                        journal.waited()
                        return placed
        except TimeoutError:
            if remaining <= self._config.wait_seconds:
                raise DeadlineExceeded("the deadline passed while no replica was running") from None
            raise Unavailable(f"no replica of {self.model} is running; try again in a few seconds") from None
        finally:
            self.held -= 1

    def _is_waking(self) -> bool:
        """Whether it was scaled to zero and requests start it, as far as that does not fail."""
        return self.wake is not None and not any(replica.detail for replica in self.replicas)

    def proved(self, journal: Journal, placed: Placement) -> None:
        """The first token of an attempt."""
        now = time.monotonic()
        placed.stream.emitted(1, now)
        if not placed.replica.useful:
            placed.replica.gave_first_token(now - placed.stream.began)
        placed.replica.breaker.succeeded()
        if journal.attempt > 1:
            self._budget.refund()
        journal.fruitless = journal.suspected = 0
        if journal.on_trial:
            self._acquit(journal)
        elif self._court is placed.replica:
            self._tell()

    def left(self, placed: Placement, completed: Journal | None = None) -> None:
        """A request is no longer at its replica."""
        self._router.ended(placed, completed)
        if placed.replica is self._court or placed.replica.state == "draining":
            self._tell()

    def refused(self, journal: Journal, replica: Replica, error: Overloaded | EngineFailure) -> None:
        """Another replica may have room for it, or may be able to start it. Neither says anything about the engine of
        this one: its circuit breaker stays as it is."""
        if len(self.replicas) == 1 or (journal.output and isinstance(error, Overloaded)):
            raise error
        journal.fruitless -= 1
        journal.refused[replica.name] = error

    async def failed(
        self, journal: Journal, replica: Replica, loss: asyncio.Future[Loss], error: PenstockError
    ) -> None:
        """Its replica is lost, or failed to compute it: note the loss, or raise if it is not to be tried again."""
        now, cause, from_outside = time.monotonic(), error.message, False
        if error.code == GONE:
            replica.lose("")
        elif error.code == LOST:
            if replica.state == "ready" and replica.loss is loss:
                replica.lose("")
            known = await asyncio.shield(loss)
            cause, from_outside = known.reason, known.from_outside
            if journal.on_trial and not from_outside:
                raise self._quarantine.convict(journal.request, now)
            journal.suspected += not from_outside
        else:
            replica.breaker.failed(now)
            if journal.fruitless > MAX_FRUITLESS:
                raise error
        if not from_outside and not self._budget.spend(len(self.journals), now):
            raise error
        self.failovers += 1
        journal.lose(cause)

    async def aborted(self, request_id: str) -> Ledger | None:
        journal = self.journals.get(request_id)
        if journal is None or journal.engine is None:
            return None
        ledger = await journal.engine.aborted(journal.engine_id)
        if ledger is not None:
            journal.settle(ledger)
        return ledger

    # -- readings ------------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> EngineStats:
        """Read for every request, and changed by heartbeats only."""
        return self._readings.of([each.stats for each in self.replicas if each.state in ("ready", "draining")])

    def health(self) -> Health:
        ready = [replica for replica in self.replicas if replica.state == "ready"]
        if not ready and self.wake is not None:
            problem = next((replica.detail for replica in self.replicas if replica.detail), "")
            return Health(not problem, problem or "no replica; the next request starts one")
        if len(self.replicas) == 1:
            return ready[0].engine.health() if ready else Health(False, "no replica is running")
        return Health(bool(ready), f"{len(ready)} of {len(self.replicas)} replicas ready")
