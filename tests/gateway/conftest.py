from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import httpx
import openai
import pytest
import uvloop

from penstock.core.config import ServerConfig
from penstock.core.request import GenerateRequest
from penstock.gateway.app import create_app
from penstock.gateway.server import serve
from penstock.text.tokenizer import Tokenizer
from tests.gateway.scripted_engine import MODEL, ScriptedEngine, Step, load_built_in_tokenizer, says


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_built_in_tokenizer()


@dataclass
class Gateway:
    """The real app on a real port, before a scripted engine."""

    engine: ScriptedEngine
    tokenizer: Tokenizer
    host: str = ""
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20)

    def answers(self, *texts: str) -> None:
        """Choice i says text i, a token a chunk, then the end token."""
        scripts = says(self.tokenizer, *texts)
        self.runs(lambda request: [[i] for i in scripts[min(int(request.id.split("-")[1]), len(scripts) - 1)]])

    def runs(self, script: Callable[[GenerateRequest], list[Step]]) -> None:
        self.engine.script = script


@contextmanager
def serving(tokenizer: Tokenizer) -> Iterator[Gateway]:
    engine = ScriptedEngine(tokenizer, lambda request: [])
    app = create_app(engine, tokenizer, ServerConfig(max_body_mib=0.25), model_names=[MODEL, "org/alias"])
    gateway = Gateway(engine, tokenizer)
    gateway.answers("Hello there, friend!")
    ready = threading.Event()
    stop: list[Callable[[], object]] = []

    def on_ready(host: str, port: int) -> None:
        gateway.host, gateway.port = host, port
        ready.set()

    async def run() -> None:
        task = asyncio.ensure_future(serve(app, "127.0.0.1", 0, on_ready, 0.0))
        stop.append(lambda: task.get_loop().call_soon_threadsafe(task.cancel))
        with suppress(asyncio.CancelledError):
            await task

    def main() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())

    thread = threading.Thread(target=main)
    thread.start()
    assert ready.wait(20)
    yield gateway
    stop[0]()
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def gateway(tokenizer: Tokenizer) -> Iterator[Gateway]:
    with serving(tokenizer) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def shared_gateway(tokenizer: Tokenizer) -> Iterator[Gateway]:
    """For requests that must not reach the engine and so leave nothing behind."""
    with serving(tokenizer) as gateway:
        yield gateway
