"""Replicas in this process, to be lost at will. Loop, scheduler, sockets and client are real; the model is not."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from penstock.core.engine import EngineInfo
from penstock.core.errors import PenstockError, StartupError
from penstock.core.request import GenerateRequest
from penstock.engine.executor import Step, StepResult
from penstock.engine.limits import SchedulerLimits
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.fleet.launcher import Instance, Loss, RemoteInstance
from penstock.fleet.upstream.capabilities import Capabilities
from penstock.simulation.paged_executor import VOCAB, PagedExecutor
from penstock.worker.client import WorkerClient
from penstock.worker.server import GatewayConnection, WorkerServer

LIMITS = SchedulerLimits(
    num_blocks=2000, block_size=4, max_seqs=64, max_step_tokens=64, max_model_len=4000, vocab_size=VOCAB + 1
)

CAPABILITIES = Capabilities(
    token_ids_in=True,
    token_ids_out=True,
    logprobs=False,
    seed=True,
    continuation=True,
    params=frozenset({"ignore_eos"}),
)


class HeldExecutor(PagedExecutor):
    """Stands still after so many steps, so that requests are under way when something happens to their worker."""

    def __init__(self, num_blocks: int, block_size: int, steps: int) -> None:
        super().__init__(num_blocks, block_size)
        self._steps = steps
        self.released = threading.Event()

    def launch(self, step: Step) -> StepResult:
        if self._steps == 0:
            self.released.wait()
        else:
            self._steps -= 1
        return super().launch(step)


class SimulatedWorker:
    """A worker without a process of its own."""

    def __init__(self, limits: SchedulerLimits = LIMITS) -> None:
        self.server = WorkerServer()
        self.server.info = EngineInfo("m", limits.max_model_len, limits.vocab_size)
        self.executor: PagedExecutor = PagedExecutor(limits.num_blocks, limits.block_size)
        self.scheduler = Scheduler(limits)
        self.engine = self.server.engine = EngineLoop(self.scheduler, self.executor, self.server.emit)
        self.thread = threading.Thread(target=self.engine.run, daemon=True)
        self.thread.start()

    async def connect(self) -> WorkerClient:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: GatewayConnection(self.server), sock=theirs)
        return await WorkerClient.connect(ours)

    def hold(self, steps: int) -> HeldExecutor:
        """Before it has computed anything."""
        held = HeldExecutor(self.executor.num_blocks, 4, steps)
        self.executor = self.engine._executor = held
        return held

    def die(self) -> None:
        """On the thread of the event loop, as its sockets belong to it."""
        self.server.close()
        self.engine.stop()
        if isinstance(self.executor, HeldExecutor):
            self.executor.released.set()


class SimulatedInstance(RemoteInstance):
    def __init__(self, client: WorkerClient, launcher: SimulatedLauncher) -> None:
        super().__init__(client)
        self._launcher = launcher

    async def lost(self) -> Loss:
        return replace(await super().lost(), from_outside=self._launcher.killed_from_outside)


class UpstreamInstance:
    """A worker that refuses what an upstream cannot do."""

    process = None
    start_seconds: Mapping[str, float] = {}

    def __init__(self, worker: Instance) -> None:
        self.engine = worker.engine
        self.lost, self.kill = worker.lost, worker.kill

    async def stop(self) -> None:
        """Streams that run go on."""

    def refusal(self, request: GenerateRequest) -> PenstockError | None:
        return CAPABILITIES.refusal(request)


class SimulatedLauncher:
    """`crash` is told of every worker that is launched, before it serves."""

    place = "simulated"
    owns = True

    def __init__(self, crash: Callable[[SimulatedWorker], None] = lambda worker: None) -> None:
        self.workers: list[SimulatedWorker] = []
        self.failing = False
        self.killed_from_outside = False  # whether its workers do not die by themselves
        self._crash = crash

    async def launch(self) -> Instance:
        if self.failing:
            raise StartupError("no machine is free")
        worker = SimulatedWorker()
        self.workers.append(worker)
        self._crash(worker)
        return SimulatedInstance(await worker.connect(), self)

    @property
    def worker(self) -> SimulatedWorker:
        return self.workers[-1]

    async def close(self) -> None:
        for worker in self.workers:
            worker.die()
            await asyncio.to_thread(worker.thread.join)


class SimulatedUpstream(SimulatedLauncher):
    place = "simulated upstream"
    owns = False

    async def launch(self) -> Instance:
        return UpstreamInstance(await super().launch())
