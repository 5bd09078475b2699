"""Both ends of a worker's socket with a real engine loop between them; only the model is simulated."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from penstock.core.engine import EngineInfo
from penstock.core.errors import ContextTooLong, EngineFailure, InvalidRequest
from penstock.core.request import Adapter, Chunk, GenerateRequest, Grammar, SamplingParams
from penstock.engine.executor import Adapters, AdapterWeights
from penstock.engine.grammar import Grammars
from penstock.engine.limits import SchedulerLimits
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.simulation.paged_executor import VOCAB, PagedExecutor, expected_output
from penstock.worker.client import WorkerClient
from penstock.worker.protocol import NOT_STARTED
from penstock.worker.server import HEARTBEATS_PER_READING, GatewayConnection, WorkerServer
from tests.engine.toy_grammar import ToyGrammars, constrained_output

LIMITS = SchedulerLimits(
    num_blocks=2000, block_size=4, max_seqs=4, max_step_tokens=8, max_model_len=8000, vocab_size=VOCAB, max_adapters=2
)
PROMPT = [1, 2, 3, 4, 5]
Emit = Callable[[list[Chunk]], None]


@asynccontextmanager
async def both_ends(
    executor: PagedExecutor,
    grammars: Grammars | None = None,
    loop: type[EngineLoop] = EngineLoop,
    adapters: Adapters | None = None,
) -> AsyncIterator[tuple[WorkerServer, WorkerClient]]:
    ours, theirs = socket.socketpair()
    server = WorkerServer()
    server.info = EngineInfo("m", LIMITS.max_model_len, VOCAB)
    engine = server.engine = loop(Scheduler(LIMITS), executor, server.emit, grammars, adapters)
    thread = threading.Thread(target=engine.run, name="engine")
    thread.start()
    await asyncio.get_running_loop().create_unix_connection(lambda: GatewayConnection(server), sock=theirs)
    try:
        yield server, await WorkerClient.connect(ours)
    finally:
        server.close()
        engine.stop()
        await asyncio.to_thread(thread.join)


@asynccontextmanager
async def simulated(executor: PagedExecutor, grammars: Grammars | None = None) -> AsyncIterator[WorkerClient]:
    async with both_ends(executor, grammars) as (_, client):
        yield client


def asking(tokens: int, id: str = "r", **more: object) -> GenerateRequest:
    return GenerateRequest(id, PROMPT, SamplingParams(max_tokens=tokens, ignore_eos=True), **more)  # type: ignore[arg-type]


@pytest.fixture
def executor() -> PagedExecutor:
    return PagedExecutor(LIMITS.num_blocks, LIMITS.block_size)


async def test_output_from_elsewhere_is_continued(executor: PagedExecutor) -> None:
    whole = expected_output(PROMPT, 0, 9, frozenset())
    async with simulated(executor) as client:
        chunks = [chunk async for chunk in client.submit(asking(9, output=whole[:4]))]
    assert [token for chunk in chunks for token in chunk.token_ids] == whole[4:]
    ledger = chunks[-1].ledger
    assert ledger is not None
    assert (ledger.prompt_tokens, ledger.output_tokens) == (5, 9)


class SlowToReturn(EngineLoop):
    """Its thread is done with the first request before `submit` returns."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: PagedExecutor,
        emit: Emit,
        grammars: Grammars | None,
        adapters: Adapters | None,
    ) -> None:
        self._done = threading.Event()

        def emitting(chunks: list[Chunk]) -> None:
            emit(chunks)
            if any(chunk.finish_reason for chunk in chunks):
                self._done.set()

        super().__init__(scheduler, executor, emitting, grammars, adapters)

    def submit(self, request: GenerateRequest) -> None:
        super().submit(request)
        assert self._done.wait(60)


async def test_chunks_that_come_before_the_request_is_known_to_be_accepted(executor: PagedExecutor) -> None:
    async with asyncio.timeout(60), both_ends(executor, loop=SlowToReturn) as (_, client):
        chunks = [chunk async for chunk in client.submit(asking(3))]
    assert [token for chunk in chunks for token in chunk.token_ids] == expected_output(PROMPT, 0, 3, frozenset())


async def test_heartbeats_go_on_while_all_threads_compile_grammars(executor: PagedExecutor) -> None:
    over, busy = threading.Event(), ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(busy)
    busy.submit(over.wait)
    try:
        async with asyncio.timeout(60), both_ends(executor) as (_, client):
            heard = 0
            while heard < 2 * HEARTBEATS_PER_READING:
                before = client.stats
                await asyncio.sleep(0.01)
                heard += client.stats is not before
            over.set()
    finally:
        over.set()


async def test_a_drained_worker_has_sent_its_last_chunk(
    executor: PagedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that the engine's thread is just sending."""
    sending, go_on, order = threading.Event(), threading.Event(), list[str]()
    write = GatewayConnection.write

    def slow_write(gateway: GatewayConnection, data: bytes) -> None:
        if threading.current_thread().name == "engine":
            sending.set()
            go_on.wait(60)
            order.append("sent")
        write(gateway, data)

    monkeypatch.setattr(GatewayConnection, "write", slow_write)
    async with both_ends(executor) as (server, client):
        answer = asyncio.ensure_future(anext(client.submit(asking(1))))
        await asyncio.to_thread(sending.wait, 60)
        threading.Timer(0.2, go_on.set).start()  # while `drain` waits, if it does
        await server.drain(60)
        order.append("drained")
        server.close()
        assert (await answer).finish_reason == "length"
        assert order == ["sent", "drained"]


async def test_a_failed_step_ends_with_a_ledger(executor: PagedExecutor) -> None:
    executor.fail_next = True
    async with simulated(executor) as client:
        (chunk,) = [chunk async for chunk in client.submit(asking(9))]
        assert chunk.ledger is not None
        assert await client.aborted("r") is None, "it was not aborted"
        with pytest.raises(EngineFailure, match="send it again"):
            chunk.raise_failure()


@pytest.mark.parametrize("late", [False, True])
async def test_what_is_aborted_has_its_ledger(executor: PagedExecutor, late: bool) -> None:
    async with simulated(executor) as client:
        stream = client.submit(asking(7000))
        await anext(stream)
        await stream.aclose()
        if late:
            done = [chunk async for chunk in client.submit(asking(50, "other"))]
            assert done[-1].finish_reason == "length"
        ledger = await client.aborted("r")
    assert ledger is not None
    assert ledger.request_id == "r"
    assert ledger.accounted == pytest.approx(ledger.total)


async def test_what_was_refused_or_never_sent_has_none(executor: PagedExecutor) -> None:
    async with simulated(executor) as client:
        with pytest.raises(ContextTooLong):
            await anext(client.submit(GenerateRequest("r", [1] * 9000, SamplingParams())))
        async with asyncio.timeout(0.5):
            assert await client.aborted("r") is None
            assert await client.aborted("never sent") is None


class SlowGrammars(ToyGrammars):
    """Compiling waits until it is let."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def compile(self, grammar: Grammar) -> None:
        self.began.set()
        self.may_end.wait(60)
        super().compile(grammar)


def constrained(source: str, id: str = "r") -> GenerateRequest:
    params = SamplingParams(max_tokens=12, ignore_eos=True, grammar=Grammar("regex", source, param="guided_regex"))
    return GenerateRequest(id, PROMPT, params)


async def test_a_grammar_is_compiled_beside_other_requests(executor: PagedExecutor) -> None:
    grammars = SlowGrammars()
    async with simulated(executor, grammars) as client:
        stream = client.submit(constrained("6"))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(grammars.began.wait, 60)
        assert [chunk async for chunk in client.submit(asking(3, "other"))][-1].finish_reason == "length"
        assert not first.done()
        grammars.may_end.set()
        chunks = [await first, *[chunk async for chunk in stream]]
        assert [token for chunk in chunks for token in chunk.token_ids] == constrained_output(
            PROMPT, 0, 12, frozenset(), 0, "6"
        )
        assert chunks[-1].finish_reason == "stop"
        with pytest.raises(InvalidRequest) as refused:
            await anext(client.submit(constrained("broken")))
        assert refused.value.param == "guided_regex"
        assert [chunk async for chunk in client.submit(constrained("6"))], "the id is free again"


async def test_aborted_while_its_grammar_is_compiled(executor: PagedExecutor) -> None:
    grammars = SlowGrammars()
    async with simulated(executor, grammars) as client:
        stream = client.submit(constrained("6"))
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(grammars.began.wait, 60)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await stream.aclose()
        assert await client.aborted("r") is None
        grammars.may_end.set()
        done = [chunk async for chunk in client.submit(constrained("6", "next"))]
        assert done[-1].finish_reason == "stop"
        assert client.stats.running == 0


async def test_aborted_as_its_grammar_has_just_been_compiled(executor: PagedExecutor) -> None:
    """The Abort is read in the turn of the event loop in which compiling ends."""
    async with asyncio.timeout(60), both_ends(executor, ToyGrammars()) as (server, _):
        (gateway,) = server._gateways
        for again in (False, True):
            server.submit(gateway, constrained("6"))
            while not server._preparing["r"].done():  # noqa: ASYNC110
                await asyncio.sleep(0)
            server.abort(gateway, "r")
            if again:  # and the same id comes right behind
                server.submit(gateway, constrained("6"))
            await server.drain(60)
            assert server.engine.stats.requests == again


async def test_an_engine_without_grammars_refuses(executor: PagedExecutor) -> None:
    async with simulated(executor) as client:
        with pytest.raises(InvalidRequest, match="no grammars"):
            await anext(client.submit(constrained("6")))


class BrokenAdapters:
    """What reading them raises for as long as there is something."""

    def __init__(self, *errors: BaseException) -> None:
        self._errors = list(errors)

    def get(self, adapter: Adapter) -> AdapterWeights:
        if self._errors:
            raise self._errors.pop(0)
        return AdapterWeights(adapter.digest, 1, {})


class Panic(BaseException):
    """As libraries in Rust raise it."""


ADAPTER = Adapter("digest", "/srv/adapters/mine")
ERRORS = [OSError(errno.EIO, "Input/output error"), MemoryError(), EngineFailure("no memory for it"), Panic()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_what_cannot_be_prepared_is_refused(
    executor: PagedExecutor, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = BrokenAdapters(error)
    async with asyncio.timeout(60), both_ends(executor, adapters=adapters) as (server, client):
        with pytest.raises(EngineFailure) as refused:
            await anext(client.submit(asking(3, adapter=ADAPTER)))
        assert refused.value.code == NOT_STARTED
        assert refused.value.retryable
        (said,) = [record for record in caplog.records if record.exc_info]
        assert said.exc_info is not None
        assert said.exc_info[1] is error
        assert [chunk async for chunk in client.submit(asking(3, adapter=ADAPTER))][-1].finish_reason == "length"
        await server.drain(60)


class NoSubmit(EngineLoop):
    def submit(self, request: GenerateRequest) -> None:
        if not request.id.startswith("other"):
            raise KeyError("a bug")
        super().submit(request)


@pytest.mark.parametrize("adapter", [None, ADAPTER])
async def test_a_request_that_the_engine_stumbles_over_ends_alone(
    executor: PagedExecutor, adapter: Adapter | None
) -> None:
    async with asyncio.timeout(60), both_ends(executor, None, NoSubmit, BrokenAdapters()) as (server, client):
        other = client.submit(asking(500, "other"))
        first = await anext(other)
        with pytest.raises(EngineFailure, match="log has the reason") as refused:
            await anext(client.submit(asking(3, adapter=adapter)))
        assert refused.value.code == NOT_STARTED
        tokens = [*first.token_ids, *[token async for chunk in other for token in chunk.token_ids]]
        assert tokens == expected_output(PROMPT, 0, 500, frozenset())
        await server.drain(60)
