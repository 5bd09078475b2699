"""Shadow traffic: requests are sent to another model as well, after their answers, and what it says is thrown away."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from penstock.core.request import CacheControl, GenerateRequest, Objective
from penstock.gateway.api.choices import Choice
from penstock.gateway.api.generation import Answer, Generation
from penstock.gateway.api.models import Model
from penstock.observability.logging import log

logger = logging.getLogger("penstock.gateway")

MAX_SEQUENCES = 32  # in flight, to all models together
SECONDS = 120.0  # that one may take
OUTCOMES = ("completed", "failed", "dropped")
TENANT = "*shadow*"  # no tenant can have this name, so none loses its turn in the engine for shadows of its requests

Choices = Callable[[], Awaitable[Sequence[Choice]]]


class ShadowedAnswer:
    """Calls `after` when the answer has been sent, and only then."""

    def __init__(self, answer: Answer, after: Callable[[Generation], None]) -> None:
        self._answer = answer
        self._after = after

    @property
    def generation(self) -> Generation:
        return self._answer.generation

    async def respond(self) -> None:
        await self._answer.respond()
        self._after(self.generation)


class Shadows:
    """Those in flight. One more is dropped when there are many, or when its model is unhealthy or busy."""

    def __init__(self, counts: Counter[tuple[str, str]]) -> None:
        """`counts` by model and outcome."""
        self._counts = counts
        self._tasks: set[asyncio.Task[None]] = set()
        self._sequences = 0

    def send(self, model: Model, choices: Choices) -> None:
        """`choices` reads the request for this model. Does not wait for anything."""
        busy = not model.engine.health().ok or model.engine.stats.waiting > 0
        if busy or len(self._tasks) >= MAX_SEQUENCES:
            self._counts[model.name, "dropped"] += 1
            return
        task = asyncio.create_task(self._run(model, choices))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, model: Model, choices: Choices) -> None:
        outcome = "failed"
        try:
            async with asyncio.timeout(SECONDS):
                outcome = await self._compute(model, [shadow_of(choice, model) for choice in await choices()])
        except Exception as error:
            log(logger, logging.INFO, "shadow failed", model=model.name, why=str(error))
        finally:
            self._counts[model.name, outcome] += 1

    async def _compute(self, model: Model, requests: Sequence[GenerateRequest]) -> str:
        if self._sequences + len(requests) > MAX_SEQUENCES:
            return "dropped"
        self._sequences += len(requests)
        try:
            async with asyncio.TaskGroup() as tasks:
                for request in requests:
                    tasks.create_task(_drain(model, request))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self._sequences -= len(requests)
        return "completed"

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def shadow_of(choice: Choice, model: Model) -> GenerateRequest:
    """Behind all classes, computed whatever is cached, and nobody's."""
    last = max(objective.rank for objective in model.objectives.all().values())
    return replace(
        choice.request,
        id=f"shadow-{choice.request.id}",
        objective=Objective("batch", rank=last + 1),
        deadline=SECONDS,
        priority=0,
        tenant=TENANT,
        weight=1.0,
        cache=CacheControl(read=False, store=False),
    )


async def _drain(model: Model, request: GenerateRequest) -> None:
    async with aclosing(model.engine.submit(request)) as chunks:
        async for chunk in chunks:
            chunk.raise_failure()
