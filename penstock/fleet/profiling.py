"""A profile of all replicas that this gateway is connected to, and of what the gateway does to reach them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from penstock.core.errors import PenstockError
from penstock.fleet.fleet import Fleet
from penstock.fleet.router import Placement, Router
from penstock.profiling.recorder import Recorder
from penstock.profiling.summary import StepSummary
from penstock.worker import client
from penstock.worker.profiling import frame_in, frame_out
from penstock.worker.protocol import decode_profile

FIRST_NUMBER = 2  # of a replica among the processes of a trace


class FleetProfiler:
    def __init__(self, fleets: Iterable[Fleet]) -> None:
        self._fleets = list(fleets)

    def watch(self, recorder: Recorder) -> None:
        recorder.watch(Router, "place", "route", "gateway", lambda placed, *_: _shown(placed))
        recorder.watch(client, "frame", "frame out", "socket", frame_out)
        recorder.watch(client, "decode_from_worker", "frame in", "socket", frame_in)

    async def take(self, seconds: float) -> tuple[list[StepSummary], list[bytes], list[str]]:
        """Of every replica that serves: what its steps did, and its events; and why others are missing. Raises what the
        only replica refuses it for."""
        workers, notes = {}, []
        for fleet in self._fleets:
            for replica in fleet.replicas:
                if replica.state not in ("ready", "draining"):
                    notes.append(f"{replica.name} is not in the profile: it is {replica.state}")
                elif isinstance(replica.engine, client.WorkerClient):
                    workers[replica.name] = replica.engine
                else:
                    notes.append(f"{replica.name} is not in the profile: it is another server")
        calls = [
            engine.profile(seconds, name, number) for number, (name, engine) in enumerate(workers.items(), FIRST_NUMBER)
        ]
        if not calls:  # the gateway alone
            await asyncio.sleep(seconds)
        summaries, events = [], []
        for name, found in zip(workers, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(found, PenstockError) and len(workers) > 1:
                notes.append(f"{name} is not in the profile: {found.message}")
            elif isinstance(found, BaseException):
                raise found
            else:
                profile = decode_profile(found)
                summaries.append(profile.summary)
                events.append(profile.events)
        return summaries, events, notes


def _shown(placed: Placement | None) -> dict[str, str]:
    return {} if placed is None else {"replica": placed.replica.name, "why": placed.reason}
