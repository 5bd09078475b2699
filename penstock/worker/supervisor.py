"""Keeps one worker process alive: starts it, notices that it died or froze, starts it again. Itself an `Engine`."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncGenerator

from penstock.core.engine import EngineInfo, EngineStats, Health
from penstock.core.errors import StartupError, Unavailable
from penstock.core.ledger import Ledger
from penstock.core.request import Chunk, GenerateRequest
from penstock.worker.client import WorkerClient
from penstock.worker.protocol import Start

log = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS = 1.0
_LAST_RETRY_SECONDS = 30.0
_STOP_SECONDS = 10.0
_EXIT_SECONDS = 1.0  # for a process whose socket has ended


class SupervisedWorker:
    def __init__(self, start: Start) -> None:
        self._start = start
        self._process: asyncio.subprocess.Process | None = None
        self._client: WorkerClient | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the worker and wait until it serves. Raises StartupError with the worker's own words."""
        self._client = await self._launch()
        self._keeper = asyncio.create_task(self._keep(self._client))

    async def _launch(self) -> WorkerClient:
        """There is no limit to the time a model may take to load; it ends with its process."""
        ours, theirs = socket.socketpair()
        with theirs:  # the process has its own of it
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "penstock.worker.main",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=(theirs.fileno(),),
                env={name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
                start_new_session=True,
            )
        try:
            return await WorkerClient.connect(ours, self._start)
        except ConnectionError as error:
            code = await self._reap(_EXIT_SECONDS)
            raise StartupError(f"the worker ended with exit code {code} while starting") from error
        except StartupError:
            await self._reap(_EXIT_SECONDS)
            raise

    async def _reap(self, patience: float) -> int:
        """The exit code of the process, which is killed if it does not end in time."""
        assert self._process is not None
        try:
            return await asyncio.wait_for(self._process.wait(), patience)
        except TimeoutError:
            self.kill()
            return await self._process.wait()

    async def _keep(self, client: WorkerClient) -> None:
        while True:
            silence = await client.closed
            code = await self._reap(0 if silence else _EXIT_SECONDS)
            log.error("the worker died: %s; starting another", silence or f"exit code {code}")
            client = self._client = await self._relaunch()

    async def _relaunch(self) -> WorkerClient:
        delay = _FIRST_RETRY_SECONDS
        while True:
            try:
                return await self._launch()
            except (StartupError, OSError) as error:
                log.error("the worker did not start: %s; next try in %.0f s", error, delay)
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LAST_RETRY_SECONDS)

    async def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._reap(_STOP_SECONDS)

    def kill(self) -> None:
        """At once, whatever it is doing."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    @property
    def client(self) -> WorkerClient:
        if self._client is None:
            raise Unavailable("the worker has not started yet; try again in a few seconds")
        return self._client

    def submit(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        return self.client.submit(request)

    async def aborted(self, request_id: str) -> Ledger | None:
        return await self.client.aborted(request_id)

    @property
    def info(self) -> EngineInfo:
        return self.client.info

    @property
    def stats(self) -> EngineStats:
        return self.client.stats

    def health(self) -> Health:
        return self.client.health()
