"""Run as a program: a gateway over the settings given as JSON, before a scripted engine. Prints its port."""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

from penstock.gateway.api.models import ServedModel
from penstock.gateway.app import create_app
from penstock.gateway.http.listener import bind
from penstock.gateway.http.server import serve
from penstock.gateway.tenancy.tenants import open_directory
from penstock.observability.logging import configure_logging
from penstock.settings import Settings, settings_from_mapping
from penstock.simulation.scripted_engine import MODEL, ScriptedEngine, says
from penstock.state import redis
from penstock.state.open import open_store
from tests.gateway.scripted_server import load_built_in_tokenizer


async def main(settings: Settings) -> int:
    tokenizer = load_built_in_tokenizer()
    (script,) = says(tokenizer, "Hello there, friend!")
    engine = ScriptedEngine(tokenizer, lambda request: [[token] for token in script])
    async with open_store(settings.state) as store, open_directory(settings, store) as directory:
        app = create_app([ServedModel([MODEL], tokenizer, engine)], settings, directory=directory)
        return await serve(app, bind("127.0.0.1", 0), lambda host, port: print(port, flush=True), 0.0)


if __name__ == "__main__":
    configure_logging()
    redis.TIMEOUT_SECONDS = redis.CLOSE_SECONDS = 60.0  # a slow machine must not pass for a lost Redis
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(settings_from_mapping(json.loads(sys.argv[1])))))
