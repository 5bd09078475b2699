"""The gateway's benchmark runs: its worker, the real gateway with a tenant and a key, and its client."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gateway_peers
from peers.gateway_load import Outcome


@pytest.mark.skipif((os.cpu_count() or 1) < 2 or not shutil.which("taskset"), reason="needs two cores and taskset")
def test_penstock_is_measured(tmp_path: Path) -> None:
    async def measure() -> gateway_peers.Figures:
        async with gateway_peers.penstock(tmp_path, tmp_path) as gateway:
            return await gateway_peers.measure(gateway, gateway_peers.CASES, 0.2)

    figures = asyncio.run(measure())
    assert set(figures) | {"calm_p99"} == set(gateway_peers.TITLES), "too short for that one"
    assert all(value > 0 for name, value in figures.items() if name != "stolen")


def test_requests_during_which_the_host_took_something_are_told_apart() -> None:
    every = [number / 200 for number in range(1000)]  # five seconds
    stolen = [(moment / 2, 7 if moment < 5 else 9) for moment in range(11)]  # something between 2.0 and 2.5
    outcome = Outcome(ttft=[0.006] * 1000, sent=every, stolen=stolen)
    assert len(outcome.calm()) == 1000 - 200 - 1, "nor those of the half second after, nor the one sent just before"
    outcome.stolen = [(moment / 2, moment) for moment in range(11)]
    assert outcome.calm() == []
