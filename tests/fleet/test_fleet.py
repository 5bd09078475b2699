"""A fleet whose replicas are lost, refuse, fail and are drained: every stream comes out whole."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count

import pytest

from penstock.core.engine import ChunkStream, EngineInfo
from penstock.core.errors import (
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    Overloaded,
    PenstockError,
    StartupError,
    Unavailable,
)
from penstock.core.ledger import Ledger
from penstock.core.request import Chunk, GenerateRequest, SamplingParams
from penstock.engine.executor import Step, StepResult
from penstock.fleet.failover import BREAK_AFTER, SUSPECT_AFTER
from penstock.fleet.fleet import Fleet
from penstock.fleet.journal import Journal
from penstock.fleet.launcher import Loss
from penstock.fleet.settings import FailoverConfig, PolicyName, RoutingConfig
from penstock.fleet.stream import RequestStream
from penstock.simulation.paged_executor import VOCAB, PagedExecutor, expected_output
from penstock.worker.protocol import NOT_STARTED
from tests.fleet.simulated import (
    LIMITS,
    HeldExecutor,
    SimulatedInstance,
    SimulatedLauncher,
    SimulatedUpstream,
    SimulatedWorker,
)

POISON = VOCAB  # that no model samples: a prompt with it crashes the worker that computes it


def asking(name: str, prompt: list[int], tokens: int = 60, **more: object) -> GenerateRequest:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return GenerateRequest(name, prompt, params, seed=3, **more)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


@asynccontextmanager
async def running(
    *launchers: SimulatedLauncher, wait_seconds: float = 30.0, policy: PolicyName = "forecast"
) -> AsyncIterator[tuple[Fleet, list[SimulatedLauncher]]]:
    fleet = Fleet("m", RoutingConfig(policy), FailoverConfig(wait_seconds))
    await fleet.start(launchers)
    await until(lambda: all(replica.state == "ready" for replica in fleet.replicas))
    try:
        yield fleet, list(launchers)
    finally:
        await fleet.stop()
        for launcher in launchers:
            await launcher.close()


async def answer(
    fleet: Fleet, request: GenerateRequest, on_token: Callable[[int], None] = lambda n: None
) -> list[Chunk]:
    chunks: list[Chunk] = []
    async for chunk in fleet.submit(request):
        chunks.append(chunk)
        on_token(sum(len(each.token_ids) for each in chunks))
    return chunks


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def expected(request: GenerateRequest) -> list[int]:
    return expected_output(request.prompt, request.seed, request.params.max_tokens or 0, frozenset())


def last_ledger(chunks: list[Chunk]) -> Ledger:
    ledger = chunks[-1].ledger
    assert ledger is not None
    return ledger


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
async def test_streams_come_out_whole_whatever_dies(replicas: int, seed: int) -> None:
    draw = random.Random(seed)
    async with running(*(SimulatedLauncher() for _ in range(replicas))) as (fleet, launchers):
        requests = [
            asking(str(number), [draw.randrange(40) for _ in range(draw.randrange(1, 30))], draw.randrange(1, 120))
            for number in range(24)
        ]
        deaths = {draw.randrange(len(requests)): draw.randrange(1, 40) for _ in range(8)}

        async def ask(number: int) -> None:
            def on_token(count: int) -> None:
                if deaths.get(number, count) < count and not any(one.suspected for one in fleet.journals.values()):
                    del deaths[number]  # one blow at a time: those who took the last one have had a token since
                    draw.choice(launchers).worker.die()

            request = requests[number]
            chunks = await answer(fleet, request, on_token)
            assert tokens_of(chunks) == expected(request)
            ledger = last_ledger(chunks)
            assert ledger.request_id == request.id
            assert ledger.accounted == pytest.approx(ledger.total)
            assert ledger.output_tokens == request.params.max_tokens
            assert [bool(chunk.replica) for chunk in chunks] == [True] + [False] * (len(chunks) - 1)

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for number in range(len(requests)):
                tasks.create_task(ask(number))


def hold_the_first(steps: int = 100) -> Callable[[SimulatedWorker], None]:
    """Workers of which the first one stands still after some steps; those that follow it do not."""
    launched = count()

    def launch(worker: SimulatedWorker) -> None:
        if next(launched) == 0:
            worker.hold(steps)

    return launch


async def test_the_ledger_says_what_was_lost() -> None:
    async with running(SimulatedLauncher(hold_the_first())) as (fleet, (launcher,)):
        request = asking("r", [1, 2, 3], 2000)
        known: list[int] = []

        def die(count: int) -> None:
            known.append(fleet.stats.steps)
            if count == 20:
                launcher.worker.die()

        chunks = await answer(fleet, request, die)
        (failover,) = last_ledger(chunks).failovers
        assert failover.replica == "m-0"
        assert 20 <= failover.output_tokens < 2000
        assert failover.lost > 0
        assert fleet.failovers == 1
        assert fleet.replicas[0].restarts == 1
        assert known == sorted(known), "counters must not shrink when a replica is lost"


@pytest.mark.parametrize("order", [("die", "remove"), ("die", "drain", "remove"), ("drain", "die", "remove")])
async def test_what_a_replica_has_counted_is_counted_once(order: tuple[str, ...]) -> None:
    """The autoscaler takes what is counted for work that has come."""
    async with running(SimulatedLauncher(), SimulatedLauncher()) as (fleet, (launcher, _)):
        async with asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(answer(fleet, asking(str(number), [number, 2, 3])))
        replica, counted = fleet.replicas[0], (8, 8 * 60)
        await until(lambda: (fleet.stats.requests, fleet.stats.output_tokens) == counted)  # by heartbeats
        assert 0 < replica.stats.requests < 8
        launcher.failing = True
        for what in order:
            if what == "die":
                launcher.worker.die()
                await until(lambda: replica.state == "lost")
            elif what == "drain":
                replica.drain()
            else:
                await fleet.remove(replica, 0)
            assert (fleet.stats.requests, fleet.stats.output_tokens) == counted, what
        assert replica.stats.requests == 0


class PoisonedExecutor(PagedExecutor):
    """Its worker dies when it is to compute a certain token."""

    def __init__(self, worker: SimulatedWorker) -> None:
        super().__init__(worker.executor.num_blocks, 4)
        self._worker = worker
        self._loop = asyncio.get_running_loop()

    def launch(self, step: Step) -> StepResult:
        if POISON in step.tokens[: sum(step.counts)]:
            self._loop.call_soon_threadsafe(self._worker.die)
            raise SystemExit  # what a process that crashes does to its engine
        return super().launch(step)


def poison(worker: SimulatedWorker) -> None:
    worker.engine._executor = PoisonedExecutor(worker)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_request_that_crashes_workers_is_refused_and_its_victims_are_served(replicas: int) -> None:
    async with running(*(SimulatedLauncher(poison) for _ in range(replicas))) as (fleet, _):
        victims = [asking(str(number), [number, 5, 6], 200) for number in range(6)]
        culprit = asking("culprit", [1, POISON, 2])
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(answer(fleet, victim)) for victim in victims]
            with pytest.raises(EngineFailure, match="not tried again") as refused:
                await answer(fleet, culprit)
        assert refused.value.code == "quarantined"
        for victim, task in zip(victims, answers, strict=True):
            assert tokens_of(task.result()) == expected(victim)
        restarts = sum(replica.restarts for replica in fleet.replicas)
        with pytest.raises(EngineFailure, match="not tried again"):
            await answer(fleet, asking("again", [1, POISON, 2]))
        assert sum(replica.restarts for replica in fleet.replicas) == restarts


async def test_a_suspect_waits_for_the_trial_of_another_no_longer_than_it_may() -> None:
    launcher = SimulatedLauncher()

    def suspect(name: str, deadline: float | None = None) -> tuple[Journal, RequestStream]:
        journal = Journal(asking(name, [1, 2], 5, deadline=deadline))
        journal.suspected = SUSPECT_AFTER
        return journal, RequestStream(fleet, journal)

    async with asyncio.timeout(20), running(launcher) as (fleet, _):
        held = launcher.worker.hold(0)
        tried, stream = suspect("tried")
        first_token = asyncio.create_task(anext(stream))
        await until(lambda: tried.on_trial)
        with pytest.raises(DeadlineExceeded):
            await anext(suspect("late", deadline=0.001)[1])
        abandoned = asyncio.create_task(anext(suspect("abandoned")[1]))
        await until(lambda: "abandoned" in fleet.journals)
        abandoned.cancel()
        held.released.set()
        await first_token
        _, stream = suspect("next")  # neither of those that left has kept the trial
        assert [token async for chunk in stream for token in chunk.token_ids] == expected(asking("next", [1, 2], 5))


def unable_to_start(worker: SimulatedWorker) -> None:
    """Requests with a certain token, as if their adapter were on a disk that is broken."""
    submit = worker.engine.submit

    def submit_others(request: GenerateRequest) -> None:
        if POISON in request.prompt:
            raise OSError(errno.EIO, "Input/output error")
        submit(request)

    worker.engine.submit = submit_others  # type: ignore[method-assign]


async def test_what_one_replica_cannot_start_another_one_does() -> None:
    async with running(SimulatedLauncher(unable_to_start), SimulatedLauncher()) as (fleet, _):
        for number in range(3 * BREAK_AFTER):
            request = asking(str(number), [1, 2, POISON])
            assert tokens_of(await answer(fleet, request)) == expected(request)
        assert not any(replica.breaker.open for replica in fleet.replicas)


@pytest.mark.parametrize("replicas", [1, 2])
async def test_what_no_replica_can_start_keeps_nobody_else_waiting(replicas: int) -> None:
    launchers = [SimulatedLauncher(unable_to_start) for _ in range(replicas)]
    async with asyncio.timeout(60), running(*launchers) as (fleet, _):
        for number in range(100):  # more than fruitless retries are allowed
            with pytest.raises(EngineFailure) as refused:
                await answer(fleet, asking(str(number), [1, 2, POISON]))
            assert refused.value.code == NOT_STARTED
        assert not any(replica.breaker.open for replica in fleet.replicas)
        request = asking("other", [1, 2])
        assert tokens_of(await answer(fleet, request)) == expected(request)


async def fill(launcher: SimulatedLauncher) -> HeldExecutor:
    """One request in a step that stands still, one waiting, and no more are taken."""
    worker = launcher.worker
    held = worker.hold(0)
    worker.engine.submit(asking("running", [7, 8], 5))
    await until(lambda: bool(worker.scheduler.running))
    worker.engine.submit(asking("waiting", [7, 8], 5))
    worker.scheduler.limits = replace(LIMITS, max_waiting=1)
    return held


async def test_a_stream_goes_on_where_there_was_no_room_for_it_at_first() -> None:
    full, lost = SimulatedLauncher(), SimulatedLauncher(hold_the_first())
    async with asyncio.timeout(60), running(full, lost, policy="round_robin") as (fleet, _):
        held = await fill(full)
        refused: list[PenstockError] = []

        def lose(count: int) -> None:
            if count == 20:
                refused.extend(fleet.journals["r"].refused.values())
                held.released.set()
                lost.worker.die()

        request = asking("r", [1, 2, 3], 200)
        assert tokens_of(await answer(fleet, request, lose)) == expected(request)
        assert [type(error) for error in refused] == [Overloaded]


async def test_refusals_do_not_count_as_failures() -> None:
    """A step that fails is computed again, however many replicas had no room before."""
    launchers = [SimulatedLauncher() for _ in range(3)]
    async with asyncio.timeout(60), running(*launchers, policy="round_robin") as (fleet, _):
        held = [await fill(launcher) for launcher in launchers[:2]]
        launchers[2].worker.executor.fail_next = True
        request = asking("r", [1, 2, 3])
        asked = asyncio.create_task(answer(fleet, request))
        await until(lambda: bool(fleet.failovers) or asked.done())
        for executor in held:
            executor.released.set()
        assert tokens_of(await asked) == expected(request)


async def test_kills_from_outside_blame_nobody_however_many() -> None:
    async with running(SimulatedLauncher()) as (fleet, (launcher,)):
        launcher.killed_from_outside = True
        requests = [asking(str(number), [number, 5, 6], 40) for number in range(24)]
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(answer(fleet, request)) for request in requests]
            for restarts in range(1, 10):
                await until(lambda: fleet.replicas[0].state == "ready" and fleet.streams(fleet.replicas[0]) > 0)
                launcher.worker.die()
                await until(lambda expected=restarts: fleet.replicas[0].restarts == expected)  # type: ignore[misc]
        for request, task in zip(requests, answers, strict=True):
            assert tokens_of(task.result()) == expected(request)


async def test_a_failed_step_is_computed_again() -> None:
    async with running(SimulatedLauncher()) as (fleet, (launcher,)):
        request = asking("r", [1, 2, 3], 2000)

        def fail_once(count: int) -> None:
            if count == 10:
                launcher.worker.executor.fail_next = True

        assert tokens_of(await answer(fleet, request, fail_once)) == expected(request)


async def test_without_any_replica_a_request_waits_for_one() -> None:
    async with running(SimulatedLauncher()) as (fleet, (launcher,)):
        launcher.failing = True
        launcher.worker.die()
        waiting = asyncio.create_task(answer(fleet, asking("r", [1, 2, 3])))
        late = asyncio.create_task(answer(fleet, asking("late", [1, 2, 3], deadline=0.001)))
        await until(lambda: fleet.replicas[0].state != "ready")
        assert not fleet.health().ok
        launcher.failing = False
        assert tokens_of(await waiting) == expected(asking("r", [1, 2, 3]))
        with pytest.raises(PenstockError) as ended:
            (await late)[-1].raise_failure()
        assert isinstance(ended.value, DeadlineExceeded)


async def test_whatever_a_launcher_raises_it_is_tried_again() -> None:
    """Also what it does not say that it raises: a replica that nobody starts again would be lost for good."""

    def fail_at_second(_: SimulatedWorker) -> None:
        if len(launcher.workers) == 2:
            raise ValueError("a bug")

    launcher = SimulatedLauncher(fail_at_second)
    async with running(launcher) as (fleet, _):
        launcher.worker.die()
        assert tokens_of(await answer(fleet, asking("r", [1, 2, 3]))) == expected(asking("r", [1, 2, 3]))
        assert len(launcher.workers) == 3


async def test_a_replica_that_cannot_be_watched_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = SimulatedInstance.lost

    async def fail_once(instance: SimulatedInstance) -> Loss:
        monkeypatch.setattr(SimulatedInstance, "lost", lost)
        raise ValueError("a bug")

    monkeypatch.setattr(SimulatedInstance, "lost", fail_once)
    async with running(SimulatedLauncher()) as (fleet, (launcher,)):
        await until(lambda: len(launcher.workers) == 2 and fleet.replicas[0].state == "ready")
        assert tokens_of(await answer(fleet, asking("r", [1, 2, 3]))) == expected(asking("r", [1, 2, 3]))


async def test_it_does_not_wait_for_ever() -> None:
    async with running(SimulatedLauncher(), wait_seconds=0.05) as (fleet, (launcher,)):
        launcher.failing = True
        launcher.worker.die()
        with pytest.raises(Unavailable, match="no replica of m is running"):
            await answer(fleet, asking("r", [1, 2, 3]))


async def test_where_another_model_stands_in_nothing_is_waited_for() -> None:
    """Neither by a request that comes when no replica runs, nor by one that is lost with its replica. A stream that has
    begun goes on."""
    async with running(SimulatedLauncher(hold_the_first(8)), wait_seconds=3600) as (fleet, (launcher,)):
        half, began = asking("half", [1, 2, 3], 20, waits="begun"), [asyncio.Event(), asyncio.Event()]
        going_on = asyncio.create_task(answer(fleet, half, lambda count: began[0].set()))
        whole = asking("whole", [1, 2, 3], 20, waits="never")
        lost = [asyncio.create_task(answer(fleet, whole, lambda count: began[1].set()))]
        await asyncio.gather(*(event.wait() for event in began))
        lost.append(asyncio.create_task(answer(fleet, asking("prompt", [1] * 3000, waits="begun"))))
        await until(lambda: fleet.streams(fleet.replicas[0]) == 3)
        launcher.failing = True
        launcher.worker.die()
        for one in lost:
            with pytest.raises(Unavailable, match="no replica of m can take it"):
                await one
        for waits in ("begun", "never"):
            with pytest.raises(Unavailable, match="no replica of m can take it"):
                await answer(fleet, asking(f"later {waits}", [1, 2, 3], waits=waits))
        launcher.failing = False
        assert tokens_of(await going_on) == expected(half)


async def test_what_upstreams_refuse_waits_for_a_worker_that_comes_back() -> None:
    scored = asking("scored", [1, 2, 3])
    scored = replace(scored, params=replace(scored.params, prompt_logprobs=0))
    async with running(SimulatedLauncher(hold_the_first(8)), SimulatedUpstream()) as (fleet, (worker, _)):
        stream = fleet.submit(scored)
        tokens = [*(await anext(stream)).token_ids]
        worker.failing = True
        worker.worker.die()
        await until(lambda: fleet.replicas[0].state == "lost")
        later = asyncio.create_task(answer(fleet, replace(scored, id="later")))
        going_on = asyncio.create_task(answer_of(stream))
        await until(lambda: fleet.held == 2 or later.done())
        worker.failing = False
        assert tokens_of(await later) == tokens + tokens_of(await going_on) == expected(scored)
        await fleet.remove(fleet.replicas[0], 0)
        with pytest.raises(InvalidRequest, match="prompt_logprobs cannot be had from an upstream"):
            await answer(fleet, replace(scored, id="too late"))


async def answer_of(stream: ChunkStream) -> list[Chunk]:
    return [chunk async for chunk in stream]


async def test_a_drained_replica_finishes_what_it_has() -> None:
    async with running(SimulatedLauncher(), SimulatedLauncher()) as (fleet, _):
        requests = [asking(str(number), [number, 2, 3], 300) for number in range(8)]
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(answer(fleet, request)) for request in requests]
            await until(lambda: all(fleet.streams(replica) for replica in fleet.replicas))
            await fleet.remove(fleet.replicas[0], drain_seconds=30)
        assert len(fleet.replicas) == 1
        assert fleet.failovers == 0
        for request, task in zip(requests, answers, strict=True):
            assert tokens_of(task.result()) == expected(request)


async def test_what_drains_too_slowly_goes_on_elsewhere() -> None:
    async with running(SimulatedLauncher(), SimulatedLauncher()) as (fleet, _):
        requests = [asking(str(number), [number, 2, 3], 1500) for number in range(4)]
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(answer(fleet, request)) for request in requests]
            await until(lambda: all(fleet.streams(replica) for replica in fleet.replicas))
            await fleet.remove(fleet.replicas[0], drain_seconds=0)
        assert fleet.failovers
        for request, task in zip(requests, answers, strict=True):
            assert tokens_of(task.result()) == expected(request)


async def test_a_stream_that_outlasts_the_drain_of_its_upstream_comes_out_whole() -> None:
    async with running(SimulatedUpstream(), SimulatedUpstream()) as (fleet, _):
        request = asking("r", [1, 2, 3] * 20)
        stream = fleet.submit(request)
        first = await anext(stream)
        await fleet.remove(next(replica for replica in fleet.replicas if replica.name == first.replica), 0)
        assert [*first.token_ids, *tokens_of(await answer_of(stream))] == expected(request)


async def test_an_aborted_request_has_its_ledger_also_after_a_failover() -> None:
    held: list[HeldExecutor] = []
    async with running(SimulatedLauncher(lambda worker: held.append(worker.hold(100)))) as (fleet, (launcher,)):
        stream = fleet.submit(asking("r", [1, 2, 3], 3000))
        await anext(stream)
        launcher.worker.die()
        while not fleet.failovers:
            await anext(stream)
        await anext(stream)
        await stream.aclose()
        held[-1].released.set()
        ledger = await fleet.aborted("r")
        assert ledger is not None
        assert ledger.request_id == "r"
        assert len(ledger.failovers) == 1
        assert ledger.accounted == pytest.approx(ledger.total)


async def test_a_fleet_whose_first_replica_cannot_start_does_not_start() -> None:
    launcher = SimulatedLauncher()
    launcher.failing = True
    with pytest.raises(StartupError, match="no machine is free"):
        await Fleet("m").start([launcher])


async def test_where_others_have_served_the_model_any_replica_will_do() -> None:
    """As for a gateway process that is started again while the first replica is down."""
    launchers = SimulatedLauncher(), SimulatedLauncher()
    launchers[0].failing = True
    fleet = Fleet("m")
    fleet.info = EngineInfo("m", LIMITS.max_model_len, LIMITS.vocab_size)
    async with asyncio.timeout(30):
        await fleet.start(launchers)
        request = asking("r", [1, 2, 3])
        assert tokens_of(await answer(fleet, request)) == expected(request)
    await fleet.stop()
    await launchers[1].close()
