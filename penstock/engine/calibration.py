"""The first start on a machine: run a few requests of our own, so that it is known how fast the machine is.

The step-time model learns from steps of all sizes, and two yardsticks are measured, in multiples of which the built-in
classes promise: the first token of a usual prompt, and a decode step of a usual batch.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable

from penstock.core.request import Chunk, GenerateRequest, SamplingParams
from penstock.engine.executor import Executor
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.engine.step_time import USUAL_BATCH, USUAL_CONTEXT, USUAL_PROMPT, Yardsticks

MOST_SECONDS = 10.0  # usually it takes one or two; a model that needs longer is learnt from the requests of its users
# Tokens; one joins at every step, so that prefill is seen beside all batch sizes and decoding with much and little KV.
_PROMPTS = (256, 16, 96, 24, 256, 40, 64, 16, 256, 32, 128, 24, 64, 16, 96, 32, 48, 16)
_OUTPUTS = 24  # tokens; the last ones are decoded without any prefill
_TRIALS = 2  # of the usual prompt; the faster one counts, as others may disturb
_LOADED_STEPS = 12


def calibrate(scheduler: Scheduler, executor: Executor, clock: Callable[[], float] = time.monotonic) -> bool:
    """Whether enough was seen. Leaves the scheduler as it was, but for what it has learnt."""
    run = _Calibration(scheduler, executor, clock)
    speculation, scheduler.speculation = scheduler.speculation, None  # a step gives one token to each sequence
    run.mix()
    yardsticks = run.yardsticks()
    run.end()
    scheduler.speculation = speculation
    scheduler.times.yardsticks = yardsticks
    scheduler.times.save()
    scheduler.pool.forget()
    scheduler.counters.clear()
    return scheduler.times.measured


class _Calibration:
    def __init__(self, scheduler: Scheduler, executor: Executor, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._loop = EngineLoop(scheduler, executor, self._take, clock=clock)
        self._random = random.Random(0)
        self._deadline = clock() + MOST_SECONDS
        self._ids: list[str] = []
        self._emitted: list[tuple[float, int]] = []  # when, for how many sequences

    @property
    def _late(self) -> bool:
        return self._clock() > self._deadline

    def mix(self) -> None:
        """Steps of all sizes."""
        for length in _PROMPTS:
            if self._late:
                break
            self._submit(self._tokens(length), _OUTPUTS)
            self._loop.step()
            while self._scheduler.waiting and not self._late:  # a small KV cache: one after the other
                self._loop.step()
        self._finish()

    def yardsticks(self) -> Yardsticks | None:
        """None: they take too long."""
        limits = self._scheduler.limits
        prompts = [self._tokens(USUAL_PROMPT) for _ in range(_TRIALS)]
        seconds = []
        for prompt in prompts:
            self._emitted.clear()
            begin = self._clock()
            self._submit(prompt, 1)
            self._finish()
            if self._late or not limits.prefix_caching:  # without the prefix the batch below takes seconds to begin
                return None
            seconds.append(self._emitted[0][0] - begin)
        batch = min(USUAL_BATCH, limits.max_seqs)
        for number in range(batch):
            self._submit(prompts[number % _TRIALS][: USUAL_CONTEXT + 1], _LOADED_STEPS)
            while len(self._scheduler.waiting) >= limits.max_waiting and not self._late:
                self._loop.step()
        self._emitted.clear()
        self._finish()
        full = [when for when, sequences in self._emitted if sequences == batch]
        steps = [after - before for before, after in itertools.pairwise(full)]
        return Yardsticks(min(seconds), statistics.median(steps)) if steps else None

    def end(self) -> None:
        for request_id in self._ids:
            self._loop.abort(request_id)
        while self._loop.step():
            pass

    def _tokens(self, count: int) -> list[int]:
        limits = self._scheduler.limits
        return [self._random.randrange(limits.vocab_size) for _ in range(min(count, limits.longest_sequence // 2))]

    def _submit(self, tokens: list[int], outputs: int) -> None:
        outputs = 0 if self._scheduler.limits.pools else outputs
        params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        self._ids.append(f"calibration-{len(self._ids)}")
        self._loop.submit(GenerateRequest(self._ids[-1], tokens, params))

    def _finish(self) -> None:
        """Step until all is done, or for as long as there is time."""
        while not self._late and self._loop.step():
            pass

    def _take(self, chunks: list[Chunk]) -> None:
        self._emitted.append((self._clock(), sum(bool(chunk.token_ids) for chunk in chunks)))
