"""Penstock's gateway before a worker that is running already: `python -m peers.run_gateway SOCKET SETTINGS_JSON`.

What `penstock serve` does, without starting a worker with a model. Prints its port and a key of the tenant `bench`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from contextlib import AsyncExitStack

import uvloop

from penstock.cache.build import open_cache
from penstock.checkpoint.source import BUILT_IN, resolve
from penstock.fleet.fleet import Fleet
from penstock.fleet.launcher import Instance, RemoteInstance
from penstock.gateway.api.models import ServedModel
from penstock.gateway.app import create_app
from penstock.gateway.http.listener import bind
from penstock.gateway.http.server import serve, tune_interpreter
from penstock.gateway.tenancy.keys import create_key
from penstock.gateway.tenancy.tenants import open_directory
from penstock.observability.logging import configure_logging
from penstock.settings import Settings, settings_from_mapping
from penstock.state.open import open_store
from penstock.text.tokenizer import load_tokenizer
from penstock.worker.client import WorkerClient


class SocketLauncher:
    owns = False

    def __init__(self, address: str) -> None:
        self.place = address

    async def launch(self) -> Instance:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.place)
        return RemoteInstance(await WorkerClient.connect(connection))


async def main(address: str, settings: Settings) -> int:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(settings.state))
        key, _ = await create_key(store, "bench")
        directory = await stack.enter_async_context(open_directory(settings, store))
        tokenizer = load_tokenizer(resolve(BUILT_IN))
        fleet = Fleet("trivial")
        await fleet.start([SocketLauncher(address)])
        cache = await stack.enter_async_context(open_cache(settings.cache, settings.state))
        model = ServedModel(["trivial"], tokenizer, cache.before(fleet, tokenizer))
        app = create_app([model], settings, directory=directory, collectors=cache.collectors)
        tune_interpreter()
        return await serve(app, bind("127.0.0.1", 0), lambda host, port: print(port, key, flush=True), 1.0)


if __name__ == "__main__":
    configure_logging()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(sys.argv[1], settings_from_mapping(json.loads(sys.argv[2])))))
