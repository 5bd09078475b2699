"""GET /admin/live: what this gateway and its engines do now, as one stream of server-sent events.

Four times a second, while somebody watches, one frame is made for all who do: readings of the engines, the requests in
flight, those that ended, latencies by class. Nothing is kept or computed while nobody watches.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import islice
from typing import Any

from msgspec import Raw, Struct

from penstock import __version__
from penstock.core.engine import EngineStats
from penstock.gateway.api.caches import CacheEndpoints, Caches
from penstock.gateway.api.fleet import Control
from penstock.gateway.api.generation import Answer
from penstock.gateway.api.openai_types import ClassCard
from penstock.gateway.api.serving import Serving, event
from penstock.gateway.api.status import class_cards
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.budgets import SpendMetrics
from penstock.gateway.tenancy.tenants import Directory, Tenant
from penstock.observability.metrics import GAP_SECONDS, SECONDS
from penstock.observability.request_log import RequestLog
from penstock.state.store import BILLION

FRAME_SECONDS = 0.25  # as often as workers send readings
SLOW_FRAMES = 4  # replicas, tenants and caches are in every so many frames
MAX_FRAMES = 40  # kept for a watcher that is slow to read: ten seconds
MAX_RUNNING = 256  # requests in flight in a frame, the oldest
MAX_ENDED = 64  # requests that ended in a frame
MAX_REFUSED = 64
MAX_BACKLOG = 512  # accounts of requests before the watcher came


class Running(Struct, array_like=True):
    """A request in flight. Times are seconds since 1970."""

    id: str
    tenant: str
    objective: str  # name of the class
    model: str
    arrived: float
    submitted: float | None  # to the engine
    first: float | None  # its first token
    prompt_tokens: int
    output_tokens: int


class Refusal(Struct):
    """A request that failed before there was anything to account for."""

    at: float
    status: int
    endpoint: str
    tenant: str
    why: str


class Latencies(Struct):
    """Observations since the start, by bucket."""

    ttft: list[int]
    itl: list[int]


class TenantSpend(Struct):
    """Since the start of this gateway process."""

    name: str
    requests: int
    tokens: int
    cost: float
    limited: int  # requests refused for a limit
    budget_per_day: float | None = None
    budget_per_month: float | None = None


class Hello(Struct):
    version: str
    frame_seconds: float
    ttft_buckets: tuple[float, ...]  # seconds: upper bounds; the last bucket has none
    itl_buckets: tuple[float, ...]
    classes: dict[str, dict[str, ClassCard]]  # what is promised, by model and class
    backlog: list[Raw]  # accounts
    processes: int  # of the gateway: requests are those of one of them


class Frame(Struct, kw_only=True, omit_defaults=True):
    at: float
    engines: dict[str, EngineStats]  # by model
    in_flight: int
    running: list[Running]
    ended: list[Raw] = []  # accounts
    ended_more: int = 0  # that are not in the frame
    refused: list[Refusal] = []
    latencies: dict[str, dict[str, Latencies]]  # by model and class
    replicas: list[Any] | None = None  # these three: in some frames
    tenants: list[TenantSpend] | None = None
    caches: Caches | None = None


class Live:
    """The edge tells it of every request: what runs, and while somebody watches what ended."""

    def __init__(
        self,
        serving: Serving,
        requests: RequestLog,
        control: Control,
        caches: CacheEndpoints,
        spend: SpendMetrics,
        directory: Directory,
        processes: int,
    ) -> None:
        self._processes = processes
        self.running: dict[str, Answer] = {}  # by the request's id
        self._serving = serving
        self._requests = requests
        self._control = control
        self._caches = caches
        self._spend = spend
        self._directory = directory
        self._watchers = 0
        self._ticking: asyncio.Task[None] | None = None
        self._ticked = asyncio.Event()
        self._frames: deque[bytes] = deque(maxlen=MAX_FRAMES)
        self._count = 0  # frames made
        self._ended: list[bytes] = []
        self._ended_more = 0
        self._refused: list[Refusal] = []

    # ------------------------------------------------------------ what the edge tells

    def ended(self, account: bytes) -> None:
        if self._watchers:
            if len(self._ended) < MAX_ENDED:
                self._ended.append(account)
            else:
                self._ended_more += 1

    def refused(self, endpoint: str, tenant: str, status: int, why: str) -> None:
        if self._watchers and len(self._refused) < MAX_REFUSED:
            self._refused.append(Refusal(time.time(), status, endpoint, tenant, why))

    # ------------------------------------------------------------ what watchers get

    async def stream(self, request: Request, response: Response, tenant: Tenant) -> None:
        """Until the client leaves or the server drains."""
        await response.send_events(event(self._hello()))
        async with aclosing(self._watch()) as watch:
            async for frames in watch:
                if request.disconnected or self._serving.traffic.draining:
                    break
                await response.send_events(frames)
        await response.end_events(b": the end\n\n")

    def _hello(self) -> Hello:
        classes = {model.name: class_cards(model) for model in self._serving.models.all}
        backlog = [Raw(body) for body in self._requests.latest(MAX_BACKLOG)]
        return Hello(__version__, FRAME_SECONDS, SECONDS, GAP_SECONDS, classes, backlog, self._processes)

    async def _watch(self) -> AsyncGenerator[bytes, None]:
        """Frames from now on, those that came together joined. A watcher that does not keep up misses the oldest."""
        self._watchers += 1
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        seen = self._count
        try:
            while True:
                await self._ticked.wait()
                new = min(self._count - seen, len(self._frames))
                seen = self._count
                yield b"".join(islice(self._frames, len(self._frames) - new, None))
        finally:
            self._watchers -= 1
            if not self._watchers and self._ticking is not None:
                self._ticking.cancel()
                self._ticking = None
                self._frames.clear()
                self._take_news()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(FRAME_SECONDS)
            self._frames.append(event(await self._frame()))
            self._count += 1
            ticked, self._ticked = self._ticked, asyncio.Event()
            ticked.set()

    async def _frame(self) -> Frame:
        now = time.time()
        since_1970 = now - time.monotonic()
        running = [_running(answer, since_1970) for answer in islice(self.running.values(), MAX_RUNNING)]
        ended, ended_more, refused = self._take_news()
        frame = Frame(
            at=now,
            engines={model.name: model.engine.stats for model in self._serving.models.all},
            in_flight=len(self.running),
            running=running,
            ended=[Raw(body) for body in ended],
            ended_more=ended_more,
            refused=refused,
            latencies={
                model: {
                    name: Latencies(found.first_token.counts, found.inter_token.counts)
                    for name, found in metrics.classes.items()
                }
                for model, metrics in self._serving.metrics.models.items()
            },
        )
        if self._count % SLOW_FRAMES == 0:
            frame.replicas = await self._control.replicas()
            frame.tenants = self._tenants()
            frame.caches = self._caches.view()
        return frame

    def _take_news(self) -> tuple[list[bytes], int, list[Refusal]]:
        news = self._ended, self._ended_more, self._refused
        self._ended, self._ended_more, self._refused = [], 0, []
        return news

    def _tenants(self) -> list[TenantSpend]:
        found: dict[str, TenantSpend] = {}
        for name, tenant in self._directory.tenants.items():
            found[name] = TenantSpend(name, 0, 0, 0.0, 0, tenant.budget_per_day, tenant.budget_per_month)
        for (name, _), used in self._spend.used.items():
            spent = found.setdefault(name, TenantSpend(name, 0, 0, 0.0, 0))
            spent.requests += used.requests
            spent.tokens += used.tokens
            spent.cost += used.cost / BILLION
        for (name, _), count in self._spend.refused.items():
            found.setdefault(name, TenantSpend(name, 0, 0, 0.0, 0)).limited += count
        return list(found.values())


def _running(answer: Answer, since_1970: float) -> Running:
    """`since_1970`: what to add to a time of time.monotonic()."""
    generation = answer.generation
    context, choices = generation.context, generation.choices
    submitted = [choice.submitted for choice in choices if choice.submitted is not None]
    firsts = [choice.first for choice in choices if choice.first is not None]
    return Running(
        context.id,
        context.tenant.name,
        context.objective.name,
        context.model.name,
        since_1970 + context.arrived,
        since_1970 + min(submitted) if submitted else None,
        since_1970 + min(firsts) if firsts else None,
        sum(len(choice.prompt.token_ids) for choice in choices if choice.first_of_prompt),
        sum(choice.stream.output_tokens for choice in choices),
    )
