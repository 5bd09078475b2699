"""Keeps one worker process alive: starts it, notices its death, starts it again. Itself an `Engine`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import AsyncGenerator
from dataclasses import asdict

from penstock.core.config import Settings
from penstock.core.engine import EngineInfo, EngineStats, Health
from penstock.core.errors import StartupError, Unavailable
from penstock.core.ledger import Ledger
from penstock.core.request import Chunk, GenerateRequest
from penstock.worker.client import WorkerClient

log = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS = 1.0
_LAST_RETRY_SECONDS = 30.0
_STOP_SECONDS = 10.0


class SupervisedWorker:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-")
        self._process: asyncio.subprocess.Process | None = None
        self._client: WorkerClient | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._launches = 0

    async def start(self) -> None:
        """Start the worker and wait until it serves. Raises StartupError with the worker's own words."""
        self._client = await self._launch()
        self._keeper = asyncio.create_task(self._keep(self._client))

    async def _launch(self) -> WorkerClient:
        self._launches += 1
        address = f"{self._folder.name}/worker-{self._launches}.sock"
        ready_read, ready_write = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "penstock.worker.main",
                json.dumps(asdict(self._settings)),
                address,
                str(ready_write),
                stdin=asyncio.subprocess.PIPE,
                stdout=sys.stderr,
                pass_fds=(ready_write,),
                start_new_session=True,
            )
        finally:
            os.close(ready_write)
        word = await _first_words(ready_read)
        if word != "ready":
            code = await self._process.wait()
            raise StartupError(word.removeprefix("error ") or f"the worker ended with exit code {code} while starting")
        return await WorkerClient.connect(address)

    async def _keep(self, client: WorkerClient) -> None:
        while True:
            await client.closed
            log.error("the worker died; starting another")
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
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._folder.cleanup()

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


async def _first_words(fd: int) -> str:
    """What the worker says about its start: one line, or nothing if it died."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    pipe = os.fdopen(fd, "rb", 0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        line = await reader.readline()
        if line.startswith(b"error"):
            line += await reader.read()
        return line.decode().strip()
    finally:
        transport.close()
