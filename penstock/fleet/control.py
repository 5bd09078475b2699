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

from penstock.core.errors import InvalidRequest, NotFound, StartupError
from penstock.fleet.build import local_launcher
from penstock.fleet.fleet import Fleet
from penstock.fleet.replica import Replica, State
from penstock.fleet.settings import ModelConfig

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


class FleetControl:
    def __init__(self, fleets: Mapping[str, Fleet], configs: Mapping[str, ModelConfig], log_level: str) -> None:
        """Both by the name of the model."""
        self._fleets = fleets
        self._configs = configs
        self._log_level = log_level
        self._checkpoints = {name: config.model or name for name, config in configs.items()}
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

    async def add(self, model: str, count: int = 1) -> list[ReplicaView]:
        """Start more worker processes; they serve as soon as they are ready."""
        fleet, config = self._find(model)
        added = []
        for _ in range(count):
            launcher = local_launcher(self._checkpoints[model], config, len(fleet.replicas), self._log_level)
            added.append(self._view(model, fleet.add(launcher)))
        return added

    async def remove(self, name: str, drain_seconds: float) -> ReplicaView:
        """Take no more requests there; it stops when it is idle or the time is over."""
        model, replica = self._find_replica(name)
        fleet = self._fleets[model]
        if not any(other.state == "ready" for other in fleet.replicas if other is not replica):
            raise InvalidRequest(f"{name} is the only replica of {model} that is ready: add another one first")
        self._in_background(fleet.remove(replica, drain_seconds))
        await asyncio.sleep(0)
        return self._view(model, replica)

    async def replace(self, model: str, checkpoint: str, drain_seconds: float) -> list[ReplicaView]:
        """Replace the worker processes of a model by those of another checkpoint, one after the other. Returns when all
        are new; if one does not start, those that were replaced before stay and the others are left as they are."""
        fleet, config = self._find(model)
        old = [replica for replica in fleet.replicas if replica.is_local]
        for number, replica in enumerate(old):
            launcher = local_launcher(checkpoint, config, number, self._log_level)
            try:
                new = await fleet.add_ready(launcher)
            except StartupError as error:
                raise InvalidRequest(f"{checkpoint} does not start: {error.message}", param="checkpoint") from error
            if new.engine.info.vocab_size != fleet.info.vocab_size:
                await fleet.remove(new, 0)
                raise InvalidRequest(f"{checkpoint} has another vocabulary than {model}", param="checkpoint")
            await fleet.remove(replica, drain_seconds)
        self._checkpoints[model] = checkpoint
        return [self._view(model, replica) for replica in fleet.replicas]

    async def fault(self, name: str, fault: str, seconds: float) -> ReplicaView:
        """Break a replica on purpose, to see what its clients notice."""
        model, replica = self._find_replica(name)
        if fault not in get_args(Fault):
            raise InvalidRequest(f"fault must be one of {', '.join(get_args(Fault))}", param="fault")
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
