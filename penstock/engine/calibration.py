"""The first start on a machine: run a few requests of our own, so that the step-time model knows how fast it is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from penstock.core.request import GenerateRequest, SamplingParams
from penstock.engine.bookkeeping import Counts
from penstock.engine.executor import Executor
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler

MOST_SECONDS = 3.0  # a model that needs longer is learnt from the requests of its users
# Tokens; one joins at every step, so that prefill is seen beside all batch sizes and decoding with much and little KV.
_PROMPTS = (768, 16, 96, 24, 256, 40, 64, 16, 256, 32, 128, 24, 64, 16, 96, 32, 48, 16)
_OUTPUTS = 24  # tokens; the last ones are decoded without any prefill


def calibrate(scheduler: Scheduler, executor: Executor, clock: Callable[[], float] = time.monotonic) -> bool:
    """Whether enough was seen. Leaves the scheduler as it was, but for what it has learnt."""
    loop = EngineLoop(scheduler, executor, lambda chunks: None, clock=clock)
    draw, limits = random.Random(0), scheduler.limits
    end = clock() + MOST_SECONDS
    requests: list[GenerateRequest] = []
    for length in _PROMPTS:
        if clock() > end:
            break
        tokens = [draw.randrange(limits.vocab_size) for _ in range(min(length, limits.longest_sequence // 2))]
        params = SamplingParams(temperature=0, max_tokens=_OUTPUTS, ignore_eos=True)
        requests.append(GenerateRequest(f"calibration-{len(requests)}", tokens, params))
        loop.submit(requests[-1])
        loop.step()
        while scheduler.waiting and clock() < end:  # a small KV cache: one after the other
            loop.step()
    while loop.step():
        if clock() > end:
            for request in requests:
                loop.abort(request.id)
    scheduler.times.save()
    scheduler.pool.forget()
    scheduler.counters = Counts()
    return scheduler.times.measured
