"""What is served here and how it is doing: models, health, readiness, version and metrics."""

from __future__ import annotations

from datetime import UTC, datetime

from msgspec import UNSET
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS

from penstock import __version__
from penstock.core.request import RECOMMENDED
from penstock.gateway.api.models import Model
from penstock.gateway.api.objectives import milliseconds
from penstock.gateway.api.openai_types import ClassCard, HealthReport, Load, ModelCard, ModelList, Version
from penstock.gateway.api.serving import Serving, encode_json
from penstock.gateway.api.siblings import Siblings
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.tenants import Tenant
from penstock.observability.metrics import exposition

SERVES = ("ok", "degraded")  # degraded: some of the models do not work


def class_cards(model: Model) -> dict[str, ClassCard]:
    """What each class of requests is promised."""
    return {
        objective.name: ClassCard(milliseconds(objective.ttft), milliseconds(objective.itl))
        for objective in model.objectives.all().values()
    }


class StatusEndpoints:
    def __init__(self, serving: Serving, max_waiting: int, siblings: Siblings) -> None:
        self.serving = serving
        self.siblings = siblings
        self.max_waiting = max_waiting

    def _card(self, name: str) -> ModelCard:
        """Of a model, or of an adapter as it was found last."""
        model, adapter = self.serving.model_of(name), self.serving.adapters.get(name)
        info = model.engine.info
        defaults = {field: getattr(info.sampling_defaults, field) for field in RECOMMENDED}
        generates = info.task == "generate"
        created = self.serving.created if adapter is None else adapter.loaded
        text = model.text
        return ModelCard(
            name,
            created,
            info.max_model_len,
            class_cards(model),
            text.tools,
            text.reasoning,
            root=model.name,
            parent=None if adapter is None else model.name,
            digest=UNSET if adapter is None else adapter.adapter.digest,
            display_name=name,
            created_at=datetime.fromtimestamp(created, UTC).isoformat(),
            max_input_tokens=info.max_model_len - generates,
            sampling_defaults=defaults if generates else UNSET,
            task=info.task,
            embedding_size=info.width if info.task == "embed" else UNSET,
        )

    async def models(self, request: Request, response: Response, tenant: Tenant) -> None:
        await self.serving.adapters.refresh()
        cards = [self._card(name) for name in self.serving.names(tenant)]
        ends = (cards[0].id, cards[-1].id) if cards else (None, None)
        await response.send(200, encode_json(ModelList(cards, *ends)))

    async def model(self, request: Request, response: Response, tenant: Tenant) -> None:
        name = request.path_params["id"]
        await self.serving.find(name, tenant)
        await response.send(200, encode_json(self._card(name)))

    async def health(self, request: Request, response: Response, tenant: Tenant) -> None:
        await self._send(response, self._health())

    async def ready(self, request: Request, response: Response, tenant: Tenant) -> None:
        """Whether a request that came now would be taken: also no when the queue of every model that works is full."""
        report = self._health()
        queues = [model.engine.stats.waiting for model in self.serving.models.all if model.engine.health().ok]
        if report.status in SERVES and min(queues) >= self.max_waiting:
            report = HealthReport("overloaded", f"{sum(queues)} requests wait, and no more are taken")
        await self._send(response, report)

    def _health(self) -> HealthReport:
        """Load balancers leave out a gateway that is not healthy, and with it the models that work."""
        if self.serving.traffic.draining:
            return HealthReport("draining", "the server is shutting down")
        found = [(model.name, model.engine.health()) for model in self.serving.models.all]
        failing = [(name, health) for name, health in found if not health.ok]
        parts = failing or found
        detail = parts[0][1].detail if len(found) == 1 else "; ".join(f"{name}: {part.detail}" for name, part in parts)
        if not failing:
            return HealthReport("ok", detail)
        return HealthReport("degraded" if len(failing) < len(found) else "unhealthy", detail)

    async def _send(self, response: Response, report: HealthReport) -> None:
        await response.send(200 if report.status in SERVES else 503, encode_json(report))

    async def load(self, request: Request, response: Response, tenant: Tenant) -> None:
        stats = [model.engine.stats for model in self.serving.models.all]
        await response.send(200, encode_json(Load(sum(one.running + one.waiting for one in stats))))

    async def version(self, request: Request, response: Response, tenant: Tenant) -> None:
        await response.send(200, encode_json(Version(__version__)))

    async def metrics(self, request: Request, response: Response, tenant: Tenant) -> None:
        openmetrics = b"application/openmetrics-text" in request.headers.get(b"accept", b"")
        text = await self.siblings.metrics(openmetrics) or exposition(self.serving.metrics.registry, openmetrics)
        content_type = OPENMETRICS if openmetrics else CONTENT_TYPE_LATEST
        await response.send(200, text, (b"content-type", content_type.encode()))
