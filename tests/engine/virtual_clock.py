"""The real scheduler on a virtual clock: steps take as long as a formula says, so an hour of load takes seconds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from penstock.core.errors import Overloaded
from penstock.core.ledger import Ledger
from penstock.core.request import Chunk, GenerateRequest
from penstock.engine.executor import StepResult
from penstock.engine.planned_step import PlannedStep
from penstock.engine.scheduler import Scheduler
from penstock.engine.step_time import StepShape

StepSeconds = Callable[[StepShape], float]


def gpu_step_seconds(shape: StepShape) -> float:
    """An 8B model in bfloat16 on an H200, about: 16 GB of weights, 128 KiB of KV a token, 20 us a prompt token."""
    tokens = shape.decodes + shape.prefill
    overhead = 1.5e-3 if shape.prefill else 0.2e-3
    attention = shape.context * 3.3e-8 + shape.pairs * 0.7e-9 + shape.depth * 2e-8
    return overhead + max(3.9e-3, tokens * 20e-6) + attention


def cpu_step_seconds(shape: StepShape) -> float:
    """A 135M model in int8 on two cores, about."""
    tokens = shape.decodes + shape.prefill
    return 5.5e-3 + tokens * 0.45e-3 + shape.context * 2e-7 + shape.pairs * 4e-8


@dataclass(slots=True)
class Answer:
    arrival: float
    token_times: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    refused: Overloaded | None = None
    ledger: Ledger | None = None

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrival if self.token_times else math.inf

    def gap(self, q: float) -> float:
        gaps = sorted(b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False))
        return gaps[min(len(gaps) - 1, int(q * len(gaps)))] if gaps else 0.0


class VirtualEngine:
    """Steps a scheduler as `EngineLoop` does, one step ahead or not, in virtual time."""

    def __init__(
        self, scheduler: Scheduler, seconds: StepSeconds, *, runs_ahead: bool, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.answers: dict[str, Answer] = {}
        self._seconds = seconds
        self._runs_ahead = runs_ahead
        self._noise = noise
        self._random = random.Random(seed)
        self._in_flight: list[tuple[PlannedStep, float]] = []  # with when it ends

    def run(self, arrivals: Iterable[tuple[float, GenerateRequest]], until: float = math.inf) -> dict[str, Answer]:
        """`arrivals` by time. Ends when all is done, or at `until`."""
        todo = sorted(arrivals, key=lambda arrival: arrival[0])
        sent = 0
        while self.now < until:
            if self._in_flight:
                self.now = max(self.now, min(self.scheduler.plan_at(), self._in_flight[-1][1]))
            while sent < len(todo) and todo[sent][0] <= self.now:
                self.submit(todo[sent][1], todo[sent][0])
                sent += 1
            self._launch()
            if not self._in_flight:
                if sent == len(todo):
                    break
                self.now = max(self.now, todo[sent][0])
                continue
            if self._runs_ahead and len(self._in_flight) == 1 and self.scheduler.has_work and not self._ahead:
                self._ahead = True
                continue
            planned, end = self._in_flight.pop(0)
            while sent < len(todo) and todo[sent][0] <= end:  # a step does not keep requests from being taken in
                self.submit(todo[sent][1], todo[sent][0])
                sent += 1
            self.now = end
            self._ahead = False
            tokens = [7 if samples else -1 for samples in planned.step.samples]
            self._take(self.scheduler.complete(planned, StepResult(tokens), end))
        return self.answers

    _ahead = False

    def submit(self, request: GenerateRequest, at: float) -> None:
        answer = self.answers[request.id] = Answer(at)
        try:
            self.scheduler.add(request, at)
        except Overloaded as error:
            answer.refused = error

    def _launch(self) -> None:
        if len(self._in_flight) > (1 if self._runs_ahead else 0):
            return
        planned = self.scheduler.schedule(self.now)
        self._take(self.scheduler.take_notices())
        if planned is not None:
            start = max(self.now, self._in_flight[-1][1] if self._in_flight else 0.0)
            noise = self._random.lognormvariate(0, self._noise) if self._noise else 1.0
            self._in_flight.append((planned, start + self._seconds(planned.shape) * noise))

    def _take(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            answer = self.answers[chunk.request_id]
            assert answer.refused is None, "a refused request was run"
            assert answer.finish_reason is None, "a chunk came after the last one"
            if chunk.token_ids:
                answer.token_times.append(self.now)
            if chunk.finish_reason is not None:
                answer.finish_reason, answer.ledger = chunk.finish_reason, chunk.ledger
