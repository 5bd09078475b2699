"""The first start on a machine: run a few requests of our own, so that the step-time model knows how fast it is."""

from __future__ import annotations

import random
import time

from penstock.core.request import GenerateRequest, SamplingParams
from penstock.engine.executor import Executor
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Counts, Scheduler

MOST_SECONDS = 3.0  # a model that needs longer is learnt from the requests of its users
# Tokens; one joins at every step, so that prefill is seen beside all batch sizes and decoding with much and little KV.
_PROMPTS = (768, 16, 96, 24, 256, 40, 64, 16, 256, 32, 128, 24, 64, 16, 96, 32, 48, 16)
_OUTPUTS = 24  # tokens; the last ones are decoded without any prefill


def calibrate(scheduler: Scheduler, executor: Executor) -> bool:
    """Whether enough was seen. Leaves the scheduler as it was, but for what it has learnt."""
    loop, draw, limits = EngineLoop(scheduler, executor, lambda chunks: None), random.Random(0), scheduler.limits
    end = time.monotonic() + MOST_SECONDS
    requests: list[GenerateRequest] = []
    for length in _PROMPTS:
        if time.monotonic() > end:
            break
        tokens = [draw.randrange(limits.vocab_size) for _ in range(min(length, limits.longest_sequence // 2))]
        params = SamplingParams(temperature=0, max_tokens=_OUTPUTS, ignore_eos=True)
        requests.append(GenerateRequest(f"calibration-{len(requests)}", tokens, params))
        loop.submit(requests[-1])
        loop.step()
        while scheduler.waiting and time.monotonic() < end:  # a small KV cache: one after the other
            loop.step()
    while loop.step():
        if time.monotonic() > end:
            for request in requests:
                loop.abort(request.id)
    scheduler.times.save()
    scheduler.pool.forget()
    scheduler.counters = Counts()
    return scheduler.times.measured
