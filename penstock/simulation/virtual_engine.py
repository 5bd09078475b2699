"""The real engine loop on a virtual clock: steps take as long as a formula says, so an hour of load takes seconds.

Two requests, one and a half seconds apart:

    virtual = VirtualEngine(Scheduler(limits), cpu_step_seconds, runs_ahead=False)
    outcomes = virtual.run([(0.0, request), (1.5, another)])
    assert outcomes[request.id].ttft < 0.1
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from penstock.core.errors import Overloaded
from penstock.core.ledger import Ledger
from penstock.core.request import Chunk, GenerateRequest
from penstock.engine.executor import Step, StepResult, TokenMask
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.engine.step_time import StepShape
from penstock.simulation.clock import VirtualClock

TOKEN = 7  # that is sampled every time

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


def shape_of(step: Step) -> StepShape:
    """A sequence that computes one token decodes, as far as an executor can tell."""
    shape = StepShape()
    for start, count in zip(step.starts, step.counts, strict=True):
        if count == 1:
            shape.decodes += 1
            shape.context += start + 1
        else:
            shape = shape.with_chunk(start, count)
    return shape


class TimedExecutor:
    """Computes nothing, and takes its time for it. Waiting for a step advances the clock to the step's end."""

    idle_seconds: float | None = None
    mask_memory: TokenMask | None = None

    def __init__(
        self, clock: VirtualClock, seconds: StepSeconds, *, num_blocks: int, runs_ahead: bool, noise: float, seed: int
    ) -> None:
        self.seconds = seconds
        self.num_blocks = num_blocks
        self.runs_ahead = runs_ahead
        self._clock = clock
        self._noise = noise
        self._random = random.Random(seed)
        self._free = 0.0  # when all that was launched has ended
        self.busy_seconds = 0.0

    def padded_tokens(self, tokens: int) -> int:
        return tokens

    def launch(self, step: Step) -> tuple[Step, float]:
        noise = self._random.lognormvariate(0, self._noise) if self._noise else 1.0
        seconds = self.seconds(shape_of(step)) * noise
        self._free = max(self._clock.now, self._free) + seconds
        self.busy_seconds += seconds
        return step, self._free

    def constrain(self, handle: tuple[Step, float], masks: TokenMask) -> None:
        """Whatever it may sample, it samples the same."""

    def resample(self, handle: tuple[Step, float], masks: Mapping[int, TokenMask]) -> list[int]:
        return [TOKEN] * len(masks)

    def collect(self, handle: tuple[Step, float]) -> StepResult:
        step, end = handle
        self._clock.advance(end)
        return StepResult([[TOKEN] * samples for samples in step.samples])


@dataclass(slots=True)
class Outcome:
    """What became of one request, in the clock's seconds."""

    arrival: float
    token_times: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    refused: Overloaded | None = None
    ledger: Ledger | None = None

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrival if self.token_times else math.inf

    def itl(self, q: float) -> float:
        """A quantile of its inter-token latencies."""
        latencies = sorted(b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False))
        return latencies[min(len(latencies) - 1, int(q * len(latencies)))] if latencies else 0.0


class VirtualEngine:
    """`noise` is the standard deviation of the logarithm of a step's time; `on_chunk` is called with every chunk."""

    def __init__(
        self, scheduler: Scheduler, seconds: StepSeconds, *, runs_ahead: bool, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.clock = VirtualClock()
        self.scheduler = scheduler
        self.outcomes: dict[str, Outcome] = {}
        self.on_chunk: Callable[[Chunk], object] | None = None
        num_blocks = scheduler.limits.num_blocks
        self.executor = TimedExecutor(
            self.clock, seconds, num_blocks=num_blocks, runs_ahead=runs_ahead, noise=noise, seed=seed
        )
        self._loop = EngineLoop(scheduler, self.executor, self._take, clock=self.clock, sleep=self.clock.sleep)

    @property
    def now(self) -> float:
        return self.clock.now

    def run(self, arrivals: Iterable[tuple[float, GenerateRequest]], until: float = math.inf) -> dict[str, Outcome]:
        """Ends when all is done, or at `until`: what arrives later never does."""
        for at, request in arrivals:
            self.clock.at(at, partial(self.submit, request))
        self.clock.advance(self.now)
        while self.now < until:
            if not self._loop.step() and not self.clock.advance_to_next_event():
                break
        self.clock.clear()
        return self.outcomes

    def step(self) -> bool:
        """One turn of the loop, up to the end of a step. False when there is nothing left to do."""
        return self._loop.step()

    def submit(self, request: GenerateRequest) -> None:
        """Now. A step under way does not keep requests from being taken in."""
        outcome = self.outcomes[request.id] = Outcome(self.now)
        try:
            self._loop.submit(request)
        except Overloaded as error:
            outcome.refused = error

    def _take(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            outcome = self.outcomes[chunk.request_id]
            assert outcome.refused is None, "a refused request was run"
            assert outcome.finish_reason is None, "a chunk came after the last one"
            assert chunk.finish_reason != "error", "a step failed"
            outcome.token_times += [self.now] * len(chunk.token_ids)
            if chunk.finish_reason is not None:
                outcome.finish_reason, outcome.ledger = chunk.finish_reason, chunk.ledger
            if self.on_chunk is not None:
                self.on_chunk(chunk)
