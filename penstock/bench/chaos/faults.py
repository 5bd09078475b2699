"""Breaking the replicas of a running server over its `/admin/fleet`, one fault after the other."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from penstock.client.http import HttpClient, failure
from penstock.core.errors import InvalidRequest, Unavailable

FAULTS = ("kill", "freeze", "slow", "cut")
RECOVERY_SECONDS = 120.0  # a fleet that takes longer has not recovered
POLL_SECONDS = 0.05


@dataclass(slots=True)
class Fault:
    """One that was injected. Times are of this process's performance counter."""

    kind: str
    replica: str
    at: float
    requests: int  # in flight there, as the server counts them: one for each choice
    ready: float = 0.0  # the replica served again
    recovered: float = 0.0  # and all streams flowed


class Admin:
    """The administrator's side: which replicas there are, and breaking one."""

    def __init__(self, http: HttpClient, model: str | None) -> None:
        self._http = http
        self.model = model or ""

    async def replicas(self) -> list[dict[str, Any]]:
        response = await self._http.get("/admin/fleet")
        if response.status != 200:
            raise failure(f"{self._http.url}/admin/fleet", response.status, response.error_message)
        found: list[dict[str, Any]] = response.json()["data"]
        self.model = self.model or (found[0]["model"] if found else "")
        return [replica for replica in found if replica["model"] == self.model]

    async def check(self, faults: Sequence[str]) -> None:
        """Raises where there is nothing that these faults could break."""
        replicas = await self.replicas()
        if not replicas:
            raise InvalidRequest(f"{self._http.url} has no replicas of {self.model or 'any model'}", param="model")
        for fault in faults:
            if not any(breakable(replica, fault) for replica in replicas):
                places = ", ".join(sorted({replica["place"] for replica in replicas}))
                raise InvalidRequest(f"{self.model} has no replica that {fault} could break: {places}", param="faults")

    async def inject(self, kind: str, replica: str, seconds: float) -> Fault:
        at = time.perf_counter()
        path = f"/admin/fleet/{quote(replica, safe='')}/fault"
        response = await self._http.post(path, {"fault": kind, "seconds": seconds})
        if response.status != 202:
            raise failure(self._http.url + path, response.status, response.error_message)
        return Fault(kind, replica, at, response.json()["streams"])

    async def until_ready(self, victim: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Wait until all replicas serve, the victim as a new instance."""
        end = time.perf_counter() + RECOVERY_SECONDS
        while time.perf_counter() < end:
            replicas = await self.replicas()
            back = [r for r in replicas if victim and r["id"] == victim["id"] and r["restarts"] > victim["restarts"]]
            if all(replica["state"] == "ready" for replica in replicas) and (back or victim is None):
                return replicas
            await asyncio.sleep(POLL_SECONDS)
        states = ", ".join(f"{replica['id']} is {replica['state']} {replica['detail']}" for replica in replicas)
        raise Unavailable(f"the fleet has not recovered in {RECOVERY_SECONDS:.0f} s: {states}")


def breakable(replica: dict[str, Any], fault: str) -> bool:
    """A worker on another machine can only be cut off; another server not even that."""
    return replica["process"] is not None or (fault == "cut" and replica["place"].startswith(("tcp://", "ray node")))


async def break_replicas(
    admin: Admin,
    kinds: Iterable[str],
    interval: float,
    slow_seconds: float,
    rng: random.Random,
    flows_since: Callable[[float], bool],
) -> AsyncIterator[Fault]:
    """One fault of each kind that comes, each when the replicas serve and all streams flow again, after a pause of half
    to one and a half times the interval."""
    for kind in kinds:
        await asyncio.sleep(interval * rng.uniform(0.5, 1.5))
        replicas = await admin.until_ready()
        victim = rng.choice([replica for replica in replicas if breakable(replica, kind)])
        fault = await admin.inject(kind, victim["id"], slow_seconds)
        if kind == "slow":
            await asyncio.sleep(slow_seconds)
        await admin.until_ready(None if kind == "slow" else victim)
        fault.ready = time.perf_counter()
        await _until_flowing(fault.at, flows_since)
        fault.recovered = time.perf_counter()
        yield fault


async def _until_flowing(at: float, flows_since: Callable[[float], bool]) -> None:
    end = time.perf_counter() + RECOVERY_SECONDS
    while not flows_since(at):
        if time.perf_counter() > end:
            raise Unavailable(f"streams have stood still for {RECOVERY_SECONDS:.0f} s after a fault")
        await asyncio.sleep(POLL_SECONDS)


def shuffled_rounds(kinds: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Each kind once in every round, without end."""
    while True:
        yield from rng.sample(kinds, len(kinds))
