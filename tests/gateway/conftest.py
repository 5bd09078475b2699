from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx
import openai
import pytest
import uvloop

from penstock.batches.place import open_batches
from penstock.batches.settings import BatchesConfig
from penstock.cache.build import open_cache
from penstock.cache.settings import CacheConfig
from penstock.core.request import GenerateRequest
from penstock.gateway.api.adapters import AdapterBase, NamedAdapter
from penstock.gateway.api.models import ServedModel
from penstock.gateway.app import create_app
from penstock.gateway.edge import Edge
from penstock.gateway.http.listener import bind
from penstock.gateway.http.server import serve
from penstock.gateway.queue_consumer import background_work
from penstock.gateway.settings import ServerConfig
from penstock.gateway.tenancy.keys import create_key
from penstock.gateway.tenancy.tenants import Directory, open_directory
from penstock.profiling.recorder import Recorder
from penstock.profiling.summary import StepSummary
from penstock.settings import Settings
from penstock.simulation.scripted_engine import MAX_MODEL_LEN, MODEL, Action, ScriptedEngine, says
from penstock.state.open import open_store
from penstock.text.tokenizer import Tokenizer
from tests.gateway.scripted_server import load_built_in_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_built_in_tokenizer()


class NothingToProfile:
    """Replicas whose profile takes no time and is empty."""

    def watch(self, recorder: Recorder) -> None:
        pass

    async def take(self, seconds: float) -> tuple[list[StepSummary], list[bytes], list[str]]:
        return [], [], []


@dataclass
class Gateway:
    """The real app on a real port, before a scripted engine."""

    engine: ScriptedEngine
    tokenizer: Tokenizer
    host: str = ""
    port: int = 0
    loop: asyncio.AbstractEventLoop = field(init=False)
    directory: Directory = field(init=False)
    edge: Edge = field(init=False)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)

    def key(self, tenant: str) -> str:
        """A new one of a tenant; of the administrator for ""."""

        async def create() -> str:
            key, _ = await create_key(self.directory.store, tenant)
            await self.directory.reload()
            return key

        return asyncio.run_coroutine_threadsafe(create(), self.loop).result(20)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, headers={"content-type": "application/json"})

    def answers(self, *texts: str) -> None:
        """Choice i says text i, a token a chunk, then the end token, as often as a request wants that ignores it."""
        scripts = says(self.tokenizer, *texts)
        more: list[Action] = [[self.tokenizer.eos_ids[0]]] * MAX_MODEL_LEN

        def script(request: GenerateRequest) -> list[Action]:
            choice = min(int(request.id.split("-")[1].removesuffix(".small")), len(scripts) - 1)
            return [*([token] for token in scripts[choice]), *more]

        self.runs(script)

    def runs(self, script: Callable[[GenerateRequest], list[Action]]) -> None:
        self.engine.script = script


@contextmanager
def serving(
    tokenizer: Tokenizer,
    settings: Settings | None = None,
    *,
    cached: bool = False,
    beside: Sequence[ServedModel] = (),
    adapter_base: AdapterBase | None = None,
    adapters: Sequence[NamedAdapter] = (),
    names: Sequence[str] = (MODEL, "org/alias"),
) -> Iterator[Gateway]:
    """`beside`: further models of the same gateway. `adapters` of the first one, which takes those that its base
    does."""
    engine = ScriptedEngine(tokenizer, lambda request: [])
    settings = settings or Settings(server=ServerConfig(max_body_mib=0.25))
    gateway = Gateway(engine, tokenizer)
    gateway.answers("Hello there, friend!")
    ready = threading.Event()
    stop: list[Callable[[], object]] = []

    def on_ready(host: str, port: int) -> None:
        gateway.host, gateway.port = host, port
        ready.set()

    async def run() -> None:
        cache = settings.cache if cached else CacheConfig(enabled=False)
        async with (
            open_store(settings.state or "memory") as store,
            open_directory(settings, store) as directory,
            open_cache(cache, settings.state) as answers,
            open_batches(settings.batches, settings.state or "memory") as batches,
        ):
            gateway.loop, gateway.directory = asyncio.get_running_loop(), directory
            model = ServedModel(names, tokenizer, answers.before(engine, tokenizer), adapter_base)
            app = create_app(
                [model, *beside],
                settings,
                directory=directory,
                collectors=answers.collectors,
                adapters=adapters,
                batches=batches,
                profiler=NothingToProfile(),
            )
            gateway.edge = app
            async with background_work(settings.consume, batches, app, directory):
                task = asyncio.ensure_future(serve(app, bind("127.0.0.1", 0), on_ready, 0.0, settings.server.tls))
                stop.append(lambda: task.get_loop().call_soon_threadsafe(task.cancel))
                with suppress(asyncio.CancelledError):
                    await task

    def main() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())

    thread = threading.Thread(target=main)
    thread.start()
    assert ready.wait(20)
    try:
        yield gateway
    finally:
        stop[0]()
        thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def gateway(tokenizer: Tokenizer) -> Iterator[Gateway]:
    with serving(tokenizer) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def shared_gateway(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """For requests that must not reach the engine and so leave nothing behind."""
    batches = BatchesConfig(folder=str(tmp_path_factory.mktemp("batches")))
    with serving(tokenizer, Settings(server=ServerConfig(max_body_mib=0.25), batches=batches)) as gateway:
        yield gateway
