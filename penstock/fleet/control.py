"""What an administrator can do with a running fleet: look at it, resize it, replace a model, break a replica."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Coroutine, Mapping
from typing import Literal, get_args

import msgspec

from penstock.checkpoint.source import pinned
from penstock.core.errors import Conflict, InvalidRequest, NotFound, StartupError
from penstock.fleet.autoscaler import Autoscaler
from penstock.fleet.build import NewLauncher
from penstock.fleet.fleet import Fleet
from penstock.fleet.gateways import GatewayView
from penstock.fleet.launcher import Launcher
from penstock.fleet.profiling import FleetProfiler
from penstock.fleet.replica import Replica, State
from penstock.fleet.settings import ModelConfig
from penstock.observability.settings import LogConfig

log = logging.getLogger(__name__)

Fault = Literal["kill", "freeze", "slow", "cut"]
SLOW_PERIOD = 0.2  # seconds: a slowed replica is stopped for most of each
SLOW_SHARE = 0.8


class ReplicaView(msgspec.Struct, kw_only=True):
    id: str
    model: str
    place: str  # where it runs
    process: int | None
    state: State
    detail: str
    seconds: float  # in this state
    restarts: int
    streams: int
    running: int  # these five: as the replica last said
    waiting: int
    output_tokens: int  # since it was started
    kv_blocks: int
    kv_blocks_used: int
    open_circuit: bool


class AutoscaleView(msgspec.Struct, kw_only=True):
    model: str
    min_replicas: int
    max_replicas: int  # that are allowed, also by what may be spent
    ready: int
    starting: int
    wanted: int  # by the latest decision
    need: float  # of the load, in replicas
    arriving: float  # seconds of one replica's work a second
    reason: str  # of the latest decision, for people
    held: int  # requests that wait for a replica, as there is none
    standby: int  # processes of the warm pool that are prepared
    replica_per_hour: float | None  # price of a replica


class FleetControl:
    def __init__(
        self,
        fleets: Mapping[str, Fleet],
        configs: Mapping[str, ModelConfig],
        logs: LogConfig,
        new_launcher: NewLauncher,
    ) -> None:
        """`fleets` and `configs` by the name of the model. `new_launcher` makes those of replicas that are added."""
        self._fleets = fleets
        self._configs = configs
        self._logs = logs
        self._new_launcher = new_launcher
        self._checkpoints = {name: config.model or name for name, config in configs.items()}
        self.autoscalers: Mapping[str, Autoscaler] = {}  # by the name of the model
        self.profiler = FleetProfiler(fleets.values())
        self._tasks: set[asyncio.Task[None]] = set()

    async def replicas(self) -> list[ReplicaView]:
        return [self._view(name, replica) for name, fleet in self._fleets.items() for replica in fleet.replicas]

    def _view(self, model: str, replica: Replica) -> ReplicaView:
        stats = replica.stats
        return ReplicaView(
            id=replica.name,
            model=model,
            place=replica.place,
            process=replica.process,
            state=replica.state,
            detail=replica.detail,
            seconds=time.time() - replica.since,
            restarts=replica.restarts,
            streams=self._fleets[model].streams(replica),
            running=stats.running,
            waiting=stats.waiting,
            output_tokens=stats.output_tokens,
            kv_blocks=stats.kv_blocks,
            kv_blocks_used=stats.kv_blocks_used,
            open_circuit=replica.breaker.open,
        )

    async def gateways(self) -> list[GatewayView]:
        """Where there are several: the process that launches them knows."""
        return []

    async def autoscaling(self) -> list[AutoscaleView]:
        return [_autoscale_view(autoscaler) for autoscaler in self.autoscalers.values()]

    def launcher(self, model: str) -> Launcher:
        """Of one more replica."""
        number = self._fleets[model].free_number
        return self._new_launcher(self._checkpoints[model], self._configs[model], number, self._logs)

    async def add(self, model: str, count: int = 1) -> list[ReplicaView]:
        """Start more workers; they serve as soon as they are ready."""
        fleet, _ = self._find(model)
        self._refuse_if_autoscaled(model)
        return [self._view(model, fleet.add(self.launcher(model))) for _ in range(count)]

    def _refuse_if_autoscaled(self, model: str) -> None:
        if (config := self._configs[model].autoscale) is not None:
            raise InvalidRequest(
                f"{model} has as many replicas as its load needs, from {config.min_replicas} to {config.ceiling}; to "
                "have others change autoscale.min_replicas and autoscale.max_replicas",
                param="model",
                code="autoscaled",
            )

    async def remove(self, name: str, drain_seconds: float) -> ReplicaView:
        """Take no more requests there; it stops when it is idle or the time is over. One that drains already can be
        given less time."""
        model, replica = self._find_replica(name)
        fleet = self._fleets[model]
        self._refuse_if_autoscaled(model)
        others = (other for other in fleet.replicas if other is not replica)
        if replica.comes_back and not any(other.state == "ready" for other in others):
            raise InvalidRequest(f"{name} is the only replica of {model} that is ready: add another one first")
        fleet.remove_soon(replica, drain_seconds)
        return self._view(model, replica)

    async def replace(self, model: str, checkpoint: str, drain_seconds: float) -> list[ReplicaView]:
        """Replace the workers of a model by those of another checkpoint, one after the other. Returns when all
        are new; if one does not start, those that were replaced before stay and the others are left as they are. Those
        that are being removed are not replaced. Where there is none at all, one is started, so that it is known that it
        can be."""
        fleet, _ = self._find(model)
        checkpoint = await self._pinned(checkpoint)
        async with fleet.resizing:
            old = [replica for replica in fleet.replicas if replica.is_owned and replica.comes_back]
            if not old and self._configs[model].autoscale is not None:
                await self._add_version(model, checkpoint, 0)
            for replica in old:
                if replica.comes_back:
                    await self._add_version(model, checkpoint, replica.number)
                    await fleet.remove(replica, drain_seconds)
            self._checkpoints[model] = checkpoint
        return [self._view(model, replica) for replica in fleet.replicas]

    async def _pinned(self, checkpoint: str) -> str:
        """So that all replicas have the same commit of it, if it is on the Hugging Face hub."""
        try:
            return await asyncio.to_thread(pinned, checkpoint)
        except StartupError as error:
            raise InvalidRequest(f"{checkpoint} does not start: {error.message}", param="checkpoint") from error

    async def restart(self, name: str, drain_seconds: float) -> list[ReplicaView]:
        """Replace one worker by a new one of the same checkpoint, which is ready before the old one drains."""
        model, replica = self._find_replica(name)
        fleet = self._fleets[model]
        if not replica.is_owned:
            raise InvalidRequest(f"{name} was not started from here: restart it where it runs", param="replica")
        async with fleet.resizing:
            if not replica.comes_back:  # since then, too
                raise Conflict(f"{name} is being removed, or has been", param="replica", code="replica_leaving")
            await self._add_version(model, self._checkpoints[model], replica.number)
            await fleet.remove(replica, drain_seconds)
        return [self._view(model, replica) for replica in fleet.replicas]

    async def _add_version(self, model: str, checkpoint: str, number: int) -> None:
        fleet = self._fleets[model]
        launcher = self._new_launcher(checkpoint, self._configs[model], number, self._logs)
        try:
            new = await fleet.add_ready(launcher, number)
        except StartupError as error:
            raise InvalidRequest(f"{checkpoint} does not start: {error.message}", param="checkpoint") from error
        if new.engine.info.vocab_size != fleet.info.vocab_size:
            await fleet.remove(new, 0)
            raise InvalidRequest(f"{checkpoint} has another vocabulary than {model}", param="checkpoint")

    async def fault(self, name: str, fault: str, seconds: float) -> ReplicaView:
        """Break a replica on purpose, to see what its clients notice."""
        model, replica = self._find_replica(name)
        if fault not in get_args(Fault):
            raise InvalidRequest(f"fault must be one of {', '.join(get_args(Fault))}", param="fault")
        if replica.state not in ("ready", "draining"):
            raise Conflict(f"{name} does not run: it is {replica.state}", param="replica", code="replica_not_running")
        if fault == "cut":
            self._fleets[model].cut(replica)
        elif replica.process is None:
            raise InvalidRequest(f"{name} is no process of this machine: it can only be cut off", param="fault")
        elif fault == "slow":
            self._in_background(_slow_down(replica.process, seconds))
        else:
            os.kill(replica.process, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        return self._view(model, replica)

    def _find(self, model: str) -> tuple[Fleet, ModelConfig]:
        if model not in self._fleets:
            raise NotFound(f"no model {model!r}; there are {', '.join(self._fleets)}", param="model")
        return self._fleets[model], self._configs[model]

    def _find_replica(self, name: str) -> tuple[str, Replica]:
        for model, fleet in self._fleets.items():
            for replica in fleet.replicas:
                if replica.name == name:
                    return model, replica
        raise NotFound(f"no replica {name!r}", param="replica", code="replica_not_found")

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _autoscale_view(autoscaler: Autoscaler) -> AutoscaleView:
    fleet, config, decision = autoscaler.fleet, autoscaler.config, autoscaler.decision
    current = autoscaler.current
    ready = sum(replica.state == "ready" for replica in current)
    return AutoscaleView(
        model=fleet.model,
        min_replicas=config.min_replicas,
        max_replicas=config.ceiling,
        ready=ready,
        starting=len(current) - ready,
        wanted=decision.replicas if decision is not None else len(current),
        need=decision.need if decision is not None else 0.0,
        arriving=decision.arriving if decision is not None else 0.0,
        reason=decision.reason if decision is not None else "not looked at yet",
        held=fleet.held,
        standby=fleet.pool.prepared if fleet.pool is not None else 0,
        replica_per_hour=config.replica_per_hour,
    )


async def _slow_down(process: int, seconds: float) -> None:
    """Stop and continue it in turn, as a machine with a noisy neighbour does."""
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            os.kill(process, signal.SIGSTOP)
            await asyncio.sleep(SLOW_PERIOD * SLOW_SHARE)
            os.kill(process, signal.SIGCONT)
            await asyncio.sleep(SLOW_PERIOD * (1 - SLOW_SHARE))
    except ProcessLookupError:
        pass
