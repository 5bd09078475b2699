"""A warm pool: worker processes with their code imported and their weights mapped, which a start takes."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine

from penstock.core.errors import StartupError
from penstock.fleet.launcher import Launcher, LocalLauncher, WorkerProcess
from penstock.worker.protocol import Standby, Start

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # between looks whether it is a time to prepare one
_RETRY_SECONDS = 30.0  # after one that could not be prepared


class StandbyPool:
    """Keeps `size` processes prepared for replicas of one model, as they were last started."""

    def __init__(self, size: int, is_busy: Callable[[], bool]) -> None:
        """None is prepared while `is_busy`: it would take CPU from replicas that start and requests that wait."""
        self._standby: Standby | None = None  # what to prepare for
        self.size = size
        self._is_busy = is_busy
        self._prepared: deque[WorkerProcess] = deque()
        self._fewer = asyncio.Event()  # there is one less
        self._tasks: set[asyncio.Task[None]] = set()
        self.taken = self.missed = 0  # starts that took one, and that found none

    @property
    def prepared(self) -> int:
        return len(self._prepared)

    def start(self) -> None:
        self._in_background(self._keep())

    def warm(self, launcher: Launcher) -> None:
        """Let it take processes from here, if it launches processes of this machine."""
        if isinstance(launcher, LocalLauncher):
            launcher.spawn = self.spawn

    async def spawn(self, start: Start) -> WorkerProcess:
        """A prepared process that is told to load, or else a new one."""
        self._standby = Standby(start.model, start.engine, start.logs)
        while self._prepared:
            worker = self._prepared.popleft()
            self._fewer.set()
            if worker.begin(start):
                self.taken += 1
                return worker
            worker.close()
        self.missed += 1
        return await WorkerProcess.spawn(start)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._prepared:
            await _end(worker)
        self._prepared.clear()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if len(self._prepared) >= self.size:
                self._fewer.clear()
                await self._fewer.wait()
            elif self._standby is not None and not self._is_busy():
                try:
                    await self._prepare(self._standby)
                except (StartupError, OSError) as error:
                    log.warning("a standby of %s could not be prepared: %s", self._standby.model, error)
                    await asyncio.sleep(_RETRY_SECONDS)

    async def _prepare(self, standby: Standby) -> None:
        worker = await WorkerProcess.spawn(standby)
        try:
            await worker.prepared()
        except BaseException:
            await _end(worker)
            raise
        log.info("a standby of %s is prepared: process %d", standby.model, worker.pid)
        self._prepared.append(worker)
        self._in_background(self._watch(worker))

    async def _watch(self, worker: WorkerProcess) -> None:
        """Forget one that ends before it is taken."""
        await worker.ended()
        if worker in self._prepared:
            log.warning("standby process %d ended; another one is prepared", worker.pid)
            self._prepared.remove(worker)
            worker.close()
            self._fewer.set()

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _end(worker: WorkerProcess) -> None:
    worker.kill()
    await worker.ended()
    worker.close()
