"""Upstreams as replicas: nothing is started, the server is probed and watched."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.errors import PenstockError, Unavailable
from penstock.core.request import GenerateRequest
from penstock.fleet.launcher import Instance, Loss
from penstock.fleet.upstream.engine import Upstream
from penstock.fleet.upstream.settings import UpstreamConfig
from penstock.text.tokenizer import Tokenizer


class UpstreamLauncher:
    owns = False

    def __init__(self, config: UpstreamConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self.place = config.url

    async def launch(self) -> Instance:
        try:
            return UpstreamInstance(await Upstream.connect(self._config, self._tokenizer))
        except Unavailable as error:
            raise Unavailable(f"{self.place}: {error.message}") from error


class UpstreamInstance:
    process = None
    start_seconds: Mapping[str, float] = {}

    def __init__(self, engine: Upstream) -> None:
        self.engine = engine

    def refusal(self, request: GenerateRequest) -> PenstockError | None:
        return self.engine.refusal(request)

    async def lost(self) -> Loss:
        """A server that cannot be asked is probed again until it can: it may have come back as another one."""
        reason = await self.engine.unhealthy()
        await self.engine.close()
        return Loss(reason)

    async def stop(self) -> None:
        await self.engine.close()

    def kill(self) -> None:
        """It is not ours to kill."""
