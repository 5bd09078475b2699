"""From the settings to the autoscalers of the models that have one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

from penstock.core.engine import EngineStats
from penstock.fleet.arrival_profile import profile_path
from penstock.fleet.autoscaler import Autoscaler, Objectives
from penstock.fleet.control import FleetControl
from penstock.fleet.fleet import Fleet
from penstock.gateway.api.objectives import derived
from penstock.gateway.settings import BUILT_IN_CLASSES
from penstock.settings import Settings


def autoscalers(settings: Settings, fleets: Mapping[str, Fleet], control: FleetControl) -> dict[str, Autoscaler]:
    """By the name of the fleet's model. `fleets` by the name of the settings. None of them runs yet."""
    found = {}
    for name, config in settings.served.items():
        if config.autoscale is not None:
            fleet = fleets[name]
            found[fleet.model] = Autoscaler(
                fleet,
                config.autoscale,
                lambda model=fleet.model: control.launcher(model),  # type: ignore[misc]
                drain_seconds=settings.server.drain_seconds,
                objectives=shortest_objectives(settings),
                profile_path=profile_path(fleet.model),
            )
    return found


@asynccontextmanager
async def running(autoscalers: Iterable[Autoscaler]) -> AsyncIterator[None]:
    for autoscaler in autoscalers:
        autoscaler.start()
    try:
        yield
    finally:
        for autoscaler in autoscalers:
            await autoscaler.stop()


def shortest_objectives(settings: Settings) -> Objectives:
    """The shortest TTFT and ITL of any class: those of the settings, or else derived from the speed of the replicas."""

    def shortest(stats: EngineStats) -> tuple[float | None, float | None]:
        if settings.classes:
            given = settings.classes.values()
            ttfts = [each.ttft_ms / 1000 for each in given if each.ttft_ms is not None]
            itls = [each.itl_ms / 1000 for each in given if each.itl_ms is not None]
        else:
            classes = [derived(name, stats) for name in BUILT_IN_CLASSES]
            ttfts = [each.ttft for each in classes if each.ttft is not None]
            itls = [each.itl for each in classes if each.itl is not None]
        return min(ttfts, default=None), min(itls, default=None)

    return shortest
