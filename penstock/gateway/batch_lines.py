"""Answers the lines of batches: each is a request of its tenant, in the class that goes last."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.batches.decisions import room
from penstock.batches.place import Batches
from penstock.batches.records import Answered
from penstock.batches.runner import Asked, Attempt, BatchRunner, failure
from penstock.core.errors import Forbidden, NotFound, Overloaded, PenstockError
from penstock.gateway.edge import Edge
from penstock.gateway.http.local import LocalResponse, local_request
from penstock.gateway.tenancy.tenants import Directory, Tenant

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class LineAnswers:
    def __init__(self, edge: Edge, directory: Directory) -> None:
        self._edge = edge
        self._directory = directory

    @property
    def draining(self) -> bool:
        return self._edge.traffic.draining

    async def served(self) -> Sequence[Sequence[str]]:
        models, adapters = self._edge.serving.models, self._edge.serving.adapters
        await adapters.refresh()
        return [*models.groups, *([adapter.name] for adapter in adapters.all())]

    def models(self, tenant: str, served: Sequence[Sequence[str]]) -> Sequence[str]:
        """Those of other gateways by the same rule as `Models.names`."""
        found = self._tenant(tenant)
        if found is None:
            return []
        allowed = found.models
        return [name for names in served if allowed is None or not set(allowed).isdisjoint(names) for name in names]

    async def groups(self) -> Sequence[Sequence[str]]:
        """Virtual models are with the one that stands in for them, adapters with the one that they change, also those
        that were unloaded: their lines are refused, instead of waiting until the batch expires."""
        models, adapters = self._edge.serving.models, self._edge.serving.adapters
        await adapters.refresh()
        engines = {name: model.name for name, model in models.by_name.items()}
        engines |= adapters.unloaded | {adapter.name: adapter.model for adapter in adapters.all()}
        return [[name for name, engine in engines.items() if engine == model.name] for model in models.all]

    def room(self, group: Sequence[str], running: int, most: int) -> int:
        return room(self._edge.serving.models.by_name[group[0]].engine.stats, running, most)

    def refusal(self, model: str) -> PenstockError | None:
        if model not in self._edge.serving.adapters.unloaded:
            return None
        return NotFound(f"the adapter {model!r} was unloaded", param="model", code="model_not_found")

    async def answer(self, asked: Asked) -> Attempt:
        tenant = self._tenant(asked.tenant)
        if tenant is None:
            return failure(Forbidden("the tenant of this request is gone", code="unknown_tenant"))
        body = _not_stored(asked.body) if asked.endpoint == "/v1/responses" else asked.body
        request = local_request(asked.endpoint, body)
        request.background, request.journal = True, asked.journal
        response = LocalResponse(request, asked.on_events)
        await self._edge.answer(request, response, tenant)
        error = response.error
        wait = error.retry_after if isinstance(error, Overloaded) else 0.0
        retryable = error is not None and error.retryable
        status = response.status if error is None else error.status
        return Attempt(Answered(status, request.id, response.body), retryable, wait)

    def _tenant(self, name: str) -> Tenant | None:
        return self._directory.tenants.get(name) if name else self._directory.public


def _not_stored(body: bytes) -> bytes:
    """Unless it says so: who has many responses computed has them in a file or queue, and there is room to store so few
    that they would displace the tenant's conversations."""
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body  # the endpoint says what is wrong with it
    if bytes(fields.get("store", b"null")) != b"null":
        return body
    return msgspec.json.encode({**fields, "store": False})


class BatchMetrics(Collector):
    def __init__(self, runner: BatchRunner) -> None:
        self._runner = runner

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        attempts = CounterMetricFamily(
            "penstock_batch_lines", "Attempts to answer lines of batches, by what became of them", labels=["outcome"]
        )
        for outcome, count in self._runner.outcomes.items():
            attempts.add_metric([outcome], count)
        yield attempts
        yield GaugeMetricFamily("penstock_batch_lines_running", "Lines of batches being computed", self._runner.running)
        yield GaugeMetricFamily(
            "penstock_batch_lines_waiting", "Lines of batches not answered yet", self._runner.waiting
        )


@asynccontextmanager
async def running_batches(batches: Batches | None, edge: Edge, directory: Directory) -> AsyncIterator[None]:
    """Batches make progress while this is open. None: there is no place for them."""
    if batches is None or not batches.config.concurrent:
        yield
        return
    answers = LineAnswers(edge, directory)
    runner = BatchRunner(batches, answers, edge.serving.max_body)
    edge.metrics.registry.register(BatchMetrics(runner))
    batches.wake = runner.wake
    runner.start()
    try:
        yield
    finally:
        await runner.close()
