"""A profile of this worker: engine steps, their kernels, the event loop, and frames in and out."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, ParamSpec, TypeVar

import msgspec

from penstock.core.errors import Conflict
from penstock.core.machine import boot_id
from penstock.core.request import Chunk
from penstock.engine.executor import Executor, Step, StepResult
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.engine.step_work import KernelProbe, KernelRecord, Limits, Work
from penstock.profiling.event_loop import recording_stalls
from penstock.profiling.recorder import Event, Recorder
from penstock.profiling.summary import StepSummary, engine_parts, kernel_parts, successive, totals
from penstock.profiling.trace import fragment
from penstock.worker import server as frames
from penstock.worker.protocol import Profile, WorkerProfile
from penstock.worker.server import WorkerServer

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_ENGINE_PARTS = ("choose", "draft", "schedule", "launch", "collect", "complete", "emit")
_LONGEST_TURN = 10.0  # seconds


@dataclass(slots=True)
class _Totals:
    """Over all steps that are in the summary: those that ended, until the kernels were no longer recorded."""

    steps: int = 0
    rows: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    waiting: int = 0
    work: dict[str, Work] = field(default_factory=dict)


class StepRecorder:
    """Records what the engine's thread does, in whole turns of its loop, until it is told to stop."""

    def __init__(
        self,
        recorder: Recorder,
        engine: EngineLoop,
        scheduler: Scheduler,
        executor: Executor,
        probe: KernelProbe | None,
        stop_kernels: Callable[[], None],
    ) -> None:
        """`stop_kernels` is called after as many steps as the probe allows."""
        self.totals = _Totals()
        self.limits: Limits | None = None
        self.began = monotonic_ns()
        self.ended = 0  # when steps were counted no more; 0: they still are
        self._stop_kernels = stop_kernels
        self._steps = 0
        self._recorder = recorder
        self._scheduler = scheduler
        self._probe = probe
        self._work = None if probe is None else probe.work
        self._in_flight: dict[int, tuple[int, dict[str, int], dict[str, Work]]] = {}  # by the handle's identity
        self._stopping = False
        self._thread = 0  # of the engine, while a turn is recorded
        self._between_turns = threading.Event()
        self._between_turns.set()
        recorder.replace(scheduler, "choose", self._timed("choose", scheduler.choose))
        recorder.replace(engine, "_draft", self._timed("draft", engine._draft))
        recorder.replace(scheduler, "schedule", self._timed("schedule", scheduler.schedule))
        recorder.replace(executor, "launch", self._timed("launch", self._launch(executor.launch)))
        recorder.replace(executor, "collect", self._timed("collect", self._collect(executor.collect)))
        recorder.replace(scheduler, "complete", self._timed("complete", scheduler.complete))
        recorder.replace(engine, "_emit", self._timed("emit", engine._emit))
        recorder.replace(engine, "step", self._turn(engine.step))

    async def stop(self) -> None:
        """Returns when the turn under way has ended, unless the engine hangs in it."""
        self._stopping = True
        await asyncio.to_thread(self._between_turns.wait, _LONGEST_TURN)
        self.ended = self.ended or monotonic_ns()

    def _turn(self, step: Callable[[], bool]) -> Callable[[], bool]:
        def turn() -> bool:
            self._between_turns.clear()
            if self._stopping:
                self._between_turns.set()
                return step()
            if self.limits is None and self._probe is not None:
                self.limits = self._probe.limits()
            began, self._thread = monotonic_ns(), threading.get_ident()
            try:
                if worked := step():
                    self._add("turn", began)
                    self._count_no_more_if_done()
                return worked
            finally:
                self._thread = 0
                self._between_turns.set()

        return turn

    def _count_no_more_if_done(self) -> None:
        most = None if self._probe is None else self._probe.most_steps
        if most is not None and self.totals.steps >= most and not self.ended:
            self.ended = monotonic_ns()
            self._stop_kernels()

    def _timed(self, name: str, call: Callable[P, R]) -> Callable[P, R]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            began = monotonic_ns()
            result = call(*args, **kwargs)
            if self._thread == threading.get_ident():  # others end requests, too
                self._add(name, began)
            return result

        return timed

    def _launch(self, launch: Callable[[Step], Any]) -> Callable[[Step], Any]:
        def recorded(step: Step) -> Any:
            began, shown = monotonic_ns(), self._composition(step)
            work = {} if self._work is None else self._work.of(step)
            handle = launch(step)
            if self._thread:
                self._in_flight[id(handle)] = began, shown, work
            return handle

        return recorded

    def _collect(self, collect: Callable[[Any], StepResult]) -> Callable[[Any], StepResult]:
        def recorded(handle: Any) -> StepResult:
            if not self._thread:
                return collect(handle)
            with nullcontext() if self._probe is None else self._probe.step():
                result = collect(handle)
            if (known := self._in_flight.pop(id(handle), None)) is not None:
                self._ended(*known)
            return result

        return recorded

    def _add(self, name: str, began: int) -> None:
        self._recorder.add(Event(name, "engine", began, monotonic_ns(), "engine"))

    def _composition(self, step: Step) -> dict[str, int]:
        scheduler = self._scheduler
        decoding = sum(samples for samples, count in zip(step.samples, step.counts, strict=True) if samples == count)
        return {
            "rows": len(step.rows),
            "prefill_tokens": len(step.tokens) - decoding,
            "decode_tokens": decoding,
            "context_tokens": sum(step.starts) + len(step.tokens),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_blocks_used": scheduler.pool.used,
        }

    def _ended(self, began: int, shown: dict[str, int], work: dict[str, Work]) -> None:
        self._steps += 1
        name, id = "step with prompts" if shown["prefill_tokens"] else "decode step", str(self._steps)
        self._recorder.add(Event(name, "steps", began, monotonic_ns(), "steps", shown, overlaps=id))
        if self.ended:
            return
        totals = self.totals
        totals.steps += 1
        totals.rows += shown["rows"]
        totals.prefill_tokens += shown["prefill_tokens"]
        totals.decode_tokens += shown["decode_tokens"]
        totals.waiting += shown["waiting"]
        for part, one in work.items():
            totals.work[part] = totals.work.get(part, Work()).plus(one)


class WorkerProfiler:
    """Takes one profile at a time."""

    def __init__(
        self,
        server: WorkerServer,
        scheduler: Scheduler,
        executor: Executor,
        device: str,
        probe: KernelProbe | None,
    ) -> None:
        """`device` says to people what computes."""
        self._server = server
        self._scheduler = scheduler
        self._executor = executor
        self._device = device
        self._probe = probe
        self._busy = False

    async def take(self, asked: Profile) -> bytes:
        """A `WorkerProfile`, encoded. Times are on the clock of the gateway: that of this machine where both run on it,
        else this machine's, set by when the gateway sent its request."""
        if self._busy:
            raise Conflict("this replica is being profiled for another gateway", code="profile_running")
        offset = 0 if asked.boot == boot_id() else asked.now - monotonic_ns()
        recorder = Recorder()
        self._busy = True
        try:
            stop = threading.Event()
            async with self._recording_kernels(stop) as kernels:
                steps = await self._record(recorder, asked.seconds, stop)
            place = f"worker {asked.replica} ({os.getpid()})", asked.number, offset
            return await asyncio.to_thread(self._encoded, recorder, steps, kernels, asked.replica, place)
        finally:
            self._busy = False

    @asynccontextmanager
    async def _recording_kernels(self, stop: threading.Event) -> AsyncIterator[KernelRecord]:
        """Until `stop` is set. What is given is filled in at the end."""
        found, probe = KernelRecord(), self._probe
        if probe is None:
            found.notes.append("no kernels: those of encoders and of models on plain torch are not timed")
            yield found
            return
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def on_begun() -> None:
            loop.call_soon_threadsafe(begun.set)

        recording = asyncio.create_task(asyncio.to_thread(probe.record, on_begun, stop))
        recording.add_done_callback(lambda _: begun.set())
        try:
            await begun.wait()
            yield found
        finally:
            stop.set()
            try:
                record = await recording
                found.kernels, found.notes = record.kernels, record.notes
            except Exception as error:  # of torch's profiler; the steps are of use without their kernels
                log.exception("the kernels could not be recorded")
                found.notes.append(f"no kernels: {error!r}")

    async def _record(self, recorder: Recorder, seconds: float, stop: threading.Event) -> StepRecorder:
        try:
            engine = self._server.engine
            steps = StepRecorder(recorder, engine, self._scheduler, self._executor, self._probe, stop.set)
            _watch_frames(recorder)
            async with recording_stalls(recorder):
                await asyncio.sleep(seconds)
            await steps.stop()
            return steps
        finally:
            recorder.restore()

    def _encoded(
        self,
        recorder: Recorder,
        steps: StepRecorder,
        record: KernelRecord,
        replica: str,
        place: tuple[str, int, int],
    ) -> bytes:
        """`place` in the trace: name and number of the process, and what is added to its times."""
        summary = self._summary(recorder.events, steps, record, replica)
        for kernel in record.kernels:
            track = "kernels" if not kernel.stream else f"CUDA stream {kernel.stream}"
            recorder.add(Event(kernel.name, "kernels", kernel.began, kernel.ended, track))
        if recorder.dropped:
            summary.notes.append(f"the trace lacks {recorder.dropped} events beyond {len(recorder.events)}")
        process, number, offset = place
        return msgspec.msgpack.encode(WorkerProfile(fragment(process, number, recorder.events, offset), summary))

    def _summary(self, events: list[Event], steps: StepRecorder, record: KernelRecord, replica: str) -> StepSummary:
        all_steps, count = steps.totals, max(1, steps.totals.steps)
        limits, began, ended = steps.limits or Limits(None, None, "not known"), steps.began, steps.ended
        in_time = (e for e in events if e.category == "engine" and e.ended <= ended)
        spans = totals(((e.name, e.began, e.ended) for e in in_time), _ENGINE_PARTS)
        turns, seconds = spans.pop("turn", 0.0), (ended - began) / 1e9
        in_steps = ((k.part, k.began, k.ended) for k in record.kernels if began <= k.began <= ended)
        kernels = totals(successive(in_steps))
        overlapped = self._executor.runs_ahead
        on_engine_thread = 0.0 if overlapped else sum(kernels.values())
        if "collect" in spans:
            spans["collect"] = max(0.0, spans["collect"] - on_engine_thread)
        rates = limits.bytes_per_second, limits.flops_per_second
        return StepSummary(
            replica=replica,
            model=self._server.info.model,
            device=self._device,
            seconds=seconds,
            busy=min(1.0, turns / seconds),
            steps=all_steps.steps,
            step_seconds=turns / count,
            rows=all_steps.rows / count,
            prefill_tokens=all_steps.prefill_tokens / count,
            decode_tokens=all_steps.decode_tokens / count,
            waiting=all_steps.waiting / count,
            bytes_per_second=limits.bytes_per_second,
            flops_per_second=limits.flops_per_second,
            limits_source=limits.source,
            overlapped=overlapped,
            kernels=kernel_parts(kernels, all_steps.work, rates, count, turns / count),
            engine=engine_parts(spans, turns, on_engine_thread, count),
            notes=[*record.notes, *([] if all_steps.steps else ["no step ended while it was profiled"])],
        )


def _watch_frames(recorder: Recorder) -> None:
    """Where the module that sends and receives them finds these functions."""
    recorder.watch(frames, "decode_to_worker", "frame in", "socket", frame_in)
    recorder.watch(frames, "frame", "frame out", "socket", frame_out)
    recorder.watch(frames, "frames_of", "frame out", "socket", lambda data, chunks: _chunks_out(data, chunks))


def frame_in(message: object, body: bytes) -> dict[str, Any]:
    return {"message": type(message).__name__, "bytes": len(body)}


def frame_out(data: bytes, message: object) -> dict[str, Any]:
    return {"message": type(message).__name__, "bytes": len(data)}


def _chunks_out(data: bytes, chunks: list[Chunk]) -> dict[str, Any]:
    return {"message": "Chunks", "bytes": len(data), "chunks": len(chunks)}
