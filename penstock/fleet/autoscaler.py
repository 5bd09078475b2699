"""Sizes a fleet by its load. It is the one writer of the number of a fleet's replicas."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from penstock.autoscaling.load import Load, Meter
from penstock.autoscaling.scaler import Decision, Scaler
from penstock.autoscaling.settings import AutoscaleConfig
from penstock.core.engine import EngineStats
from penstock.fleet.arrival_profile import load_profile, save_profile
from penstock.fleet.fleet import Fleet
from penstock.fleet.launcher import Launcher
from penstock.fleet.replica import Replica
from penstock.fleet.routing import forecast_ttft
from penstock.fleet.snapshot import Snapshot

log = logging.getLogger(__name__)

_WARM_SECONDS = 0.5  # that a start from the warm pool takes at most
_SAVE_SECONDS = 600.0  # between two writings of the profile of arrivals
_FIRST_START_SECONDS = 5.0  # that a start is taken for before there was one

Objectives = Callable[[EngineStats], tuple[float | None, float | None]]  # TTFT and ITL, in seconds


def wall_clock() -> Callable[[], float]:
    """Seconds that never go back and give the time of day, whatever is done to the system's clock meanwhile."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


class Autoscaler:
    def __init__(
        self,
        fleet: Fleet,
        config: AutoscaleConfig,
        launcher: Callable[[], Launcher],
        *,
        drain_seconds: float = 30.0,
        objectives: Objectives = lambda stats: (None, None),
        clock: Callable[[], float] | None = None,
        profile_path: Path | None = None,
    ) -> None:
        """`launcher` makes that of one more replica. `objectives` are those of the classes, for what the settings do
        not say. `profile_path` is where the course of arrivals is kept from one run to the next."""
        self.fleet = fleet
        self.config = config
        self.decision: Decision | None = None  # the latest
        self.raised = self.lowered = 0  # times that replicas were added, and removed
        self._launcher = launcher
        self._drain_seconds = drain_seconds
        self._objectives = objectives
        self._clock = clock or wall_clock()
        self._scaler = Scaler(config)
        self._profile_path = profile_path
        if profile_path is not None:
            load_profile(self._scaler.arrivals.profile, profile_path)
        self._meter = Meter()
        self._start_seconds = _FIRST_START_SECONDS  # the longest of the replicas there are, or were last
        self._woken = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        if config.min_replicas == 0:
            fleet.wake = self._woken.set

    def start(self) -> None:
        self._in_background(self._run())
        if self._profile_path is not None:
            self._in_background(self._save_profile(self._profile_path))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._profile_path is not None:
            save_profile(self._scaler.arrivals.profile, self._profile_path)

    async def _save_profile(self, path: Path) -> None:
        while True:
            await asyncio.sleep(_SAVE_SECONDS)
            await asyncio.to_thread(save_profile, self._scaler.arrivals.profile, path)

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # of a policy of the user's own: the fleet stays as it is
                log.exception("%s could not be autoscaled", self.fleet.model)
            try:
                async with asyncio.timeout(self.config.interval_seconds):
                    await self._woken.wait()
            except TimeoutError:
                continue
            self._woken.clear()

    async def look(self) -> None:
        """Look at the fleet, decide, and act. Not while its replicas are being replaced one by one."""
        if self.fleet.resizing.locked():
            return
        async with self.fleet.resizing:
            await self.fleet.refresh()
            self.decision = self._scaler.look(self._load())
            self._act(self.decision)

    @property
    def current(self) -> list[Replica]:
        """Those that stay: ready, or on their way."""
        return [replica for replica in self.fleet.replicas if replica.comes_back and replica.state != "draining"]

    def _load(self) -> Load:
        fleet, meter, config = self.fleet, self._meter, self.config
        stats, ready = fleet.stats, [replica for replica in fleet.replicas if replica.state == "ready"]
        ttft, itl = self._objectives(stats)
        meter.ttft_objective = ttft if config.ttft_ms is None else config.ttft_ms / 1000
        meter.itl_objective = itl if config.itl_ms is None else config.itl_ms / 1000
        self._start_seconds = max((replica.launch_seconds for replica in ready), default=self._start_seconds)
        forecasts = [_forecast_ttft(replica, round(meter.prompt_tokens)) for replica in ready]
        is_warm = fleet.pool is not None and fleet.pool.prepared > 0
        return meter.load(
            self._clock(),
            stats,
            ready=len(ready),
            starting=len(self.current) - len(ready),
            held=fleet.held,
            warmup_seconds=min(self._start_seconds, _WARM_SECONDS) if is_warm else self._start_seconds,
            ttft=min((now for now, _ in forecasts), default=0.0),
            idle_ttft=min((idle for _, idle in forecasts), default=0.0),
        )

    def _act(self, decision: Decision) -> None:
        current = self.current
        missing = decision.replicas - len(current)
        if not missing:
            return
        log.info("%s: from %d to %d replicas: %s", self.fleet.model, len(current), decision.replicas, decision.reason)
        self.raised += missing > 0
        self.lowered += missing < 0
        for _ in range(missing):
            self.fleet.add(self._launcher())
        for replica in self._least_busy(current)[: max(0, -missing)]:
            self.fleet.remove_soon(replica, self._drain_seconds)

    def _least_busy(self, replicas: list[Replica]) -> list[Replica]:
        """Those that do not serve yet come first, then those with the fewest requests, the latest of them first."""
        latest_first = replicas[::-1]
        return sorted(latest_first, key=lambda each: (each.state == "ready", self.fleet.streams(each)))

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _forecast_ttft(replica: Replica, tokens: int) -> tuple[float, float]:
    """By what the replica says of itself, whoever sends requests there: of a prompt sent now, and of one sent while it
    is idle."""
    snapshot = Snapshot(replica.name, 0)
    snapshot.kv_tokens = replica.stats.kv_blocks * replica.engine.info.block_size
    snapshot.heard(replica.stats)
    snapshot.prefill_tokens = replica.stats.prefill_tokens
    snapshot.derive()
    return forecast_ttft(snapshot, tokens, 0), tokens * snapshot.token_seconds
