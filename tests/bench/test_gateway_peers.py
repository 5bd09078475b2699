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


@pytest.mark.skipif((os.cpu_count() or 1) < 2 or not shutil.which("taskset"), reason="needs two cores and taskset")
def test_penstock_is_measured(tmp_path: Path) -> None:
    async def measure() -> gateway_peers.Figures:
        async with gateway_peers.penstock(tmp_path, tmp_path) as gateway:
            return await gateway_peers.measure(gateway, gateway_peers.CASES, 0.2)

    figures = asyncio.run(measure())
    assert set(figures) == set(gateway_peers.TITLES)
    assert all(value > 0 for name, value in figures.items() if name != "stolen")
