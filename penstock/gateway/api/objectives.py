"""Which class a request belongs to, and what that class is promised on this machine."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping

from msgspec import UNSET, UnsetType
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.core.engine import EngineStats
from penstock.core.errors import InvalidRequest
from penstock.core.request import Objective
from penstock.gateway.api.openai_types import MAX_DEADLINE_MS
from penstock.gateway.errors import require
from penstock.gateway.http.request import Request
from penstock.gateway.settings import BUILT_IN_CLASSES, ClassConfig
from penstock.gateway.tenancy.tenants import Tenant
from penstock.observability.logging import log
from penstock.observability.metrics import Promise

logger = logging.getLogger("penstock.gateway")

SLACK = 4  # objectives allow this many times what the machine needs for a usual prompt, or a step of a usual batch
MIN_TTFT, MIN_GAP = 0.2, 0.05  # seconds
OPENAI_TIERS = {"flex": "batch", "priority": "interactive"}

_NAME = re.compile(rb"[\x21-\x7e]{1,64}")
_MILLISECONDS = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,3})?")


class Objectives:
    def __init__(
        self, classes: Mapping[str, ClassConfig], default_class: str | None, stats: Callable[[], EngineStats]
    ) -> None:
        self.fixed = {
            name: Objective(
                name,
                _seconds(given.ttft_ms),
                _seconds(given.itl_ms),
                given.rank,
                paced=given.itl_ms is None and given.rank <= 0,
            )
            for name, given in classes.items()
        }
        self.known = tuple(classes) or BUILT_IN_CLASSES
        self.default = default_class or "standard"
        self._stats = stats
        self._unmeasured = {name: derived(name, EngineStats()) for name in BUILT_IN_CLASSES}

    def classify(self, request: Request, tenant: Tenant, tier: str | None) -> Objective:
        """The objective of the class that a request belongs to; `tier` is its `service_tier`."""
        return self.objective(self.background if request.background else self._chosen(request, tenant, tier))

    @property
    def background(self) -> str:
        """The class of requests that nobody waits for."""
        return "batch" if "batch" in self.known else max(self.known, key=lambda name: self.objective(name).rank)

    def objective(self, name: str) -> Objective:
        return self.all()[name]

    def all(self) -> Mapping[str, Objective]:
        """Those of the settings, or else what this machine can keep. That is settled as soon as its speed is known and
        then stays: a promise that grew when the machine got slow would be none."""
        if self.fixed:
            return self.fixed
        stats = self._stats()
        if stats.loaded_step_seconds <= 0:
            return self._unmeasured
        self.fixed = {name: derived(name, stats) for name in BUILT_IN_CLASSES}
        for name, objective in self.fixed.items():
            ttft_ms, itl_ms = milliseconds(objective.ttft), milliseconds(objective.itl)
            log(logger, logging.INFO, "class", name=name, ttft_ms=ttft_ms, itl_ms=itl_ms)
        return self.fixed

    def _chosen(self, request: Request, tenant: Tenant, tier: str | None) -> str:
        """OpenAI's `auto` leaves it to the other ways of choosing."""
        if tier == "default":
            return self.default
        if tier is not None and tier != "auto":
            return self._class_of_tier(tier)
        if b"x-penstock-class" in request.headers:
            name = request.header(b"x-penstock-class", _NAME) or ""
            if name not in self.known:
                raise self._unknown("x-penstock-class", name)
            return name
        of_tenant = tenant.default_class  # of a stored tenant: perhaps from before the classes changed
        return of_tenant if of_tenant in self.known else self.default

    def _class_of_tier(self, tier: str) -> str:
        if tier in self.known:
            return tier
        meant = OPENAI_TIERS.get(tier)
        if meant is not None and meant in self.known:
            return meant
        raise self._unknown("service_tier", tier, f": it means {meant}, which is no class here" if meant else "")

    def _unknown(self, param: str, sent: str, why: str = "") -> InvalidRequest:
        return InvalidRequest(f"{param} must be one of {', '.join(self.known)}, not {sent[:64]!r}{why}", param=param)


class ObjectiveMetrics(Collector):
    """The objectives themselves, read when they are scraped: those of built-in classes are derived after the start."""

    def __init__(self, objectives: Mapping[str, Objectives]) -> None:
        """By the name of the model."""
        self._objectives = objectives

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        seconds = GaugeMetricFamily(
            "penstock_objective_seconds",
            "What a class of requests is promised: the longest TTFT, and the longest gap between tokens",
            labels=["model", "class", "objective"],
        )
        for promise, promised in self.promises().items():
            seconds.add_metric(promise, promised)
        yield seconds

    def promises(self) -> dict[Promise, float]:
        return {
            (model, name, kind): promised
            for model, objectives in self._objectives.items()
            for name, objective in objectives.all().items()
            for kind, promised in (("ttft", objective.ttft), ("gap", objective.itl))
            if promised is not None
        }


def derived(name: str, stats: EngineStats) -> Objective:
    """The built-in classes: promises a machine of this measured speed can keep with some load on it."""
    if name == "batch":
        return Objective(name, rank=1)
    prompt, step = stats.usual_prompt_seconds, stats.loaded_step_seconds
    if name == "standard" or step <= 0:
        return Objective(name, paced=True)
    return Objective(name, max(MIN_TTFT, SLACK * prompt), max(MIN_GAP, SLACK * step))


def reported_tier(asked: str | None) -> str | UnsetType:
    """What an answer says of its tier: as OpenAI does, only when asked, in the words of the request."""
    if asked is None:
        return UNSET
    return "default" if asked == "auto" else asked


def deadline(request: Request, tenant: Tenant, asked_ms: float | None) -> float | None:
    """Seconds after arrival: what the request asks for or what its tenant is allowed, whichever is shorter."""
    param = "deadline_ms"
    if asked_ms is None and b"x-penstock-deadline-ms" in request.headers:
        param = "x-penstock-deadline-ms"
        asked_ms = float(request.header(b"x-penstock-deadline-ms", _MILLISECONDS) or 0)
    asked = _seconds(asked_ms)
    if asked_ms is not None:
        require(0 < asked_ms <= MAX_DEADLINE_MS, param, f"must be above 0 and at most {MAX_DEADLINE_MS}")
    allowed = tenant.timeout_seconds
    if asked is None or allowed is None:
        return allowed if asked is None else asked
    return min(asked, allowed)


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
