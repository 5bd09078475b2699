"""From no replica to the first token over HTTP: cold, and from the warm pool, in turn, with what the time went into.

    python benchmarks/starts.py [--rounds 10]

Two servers of the built-in model scale to zero, one of them with a standby. Whenever both sleep, each gets a request.
`cold` is a new process; weights have been packed and are in the page cache, as after any earlier start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from penstock.client.http import HttpClient

SETTINGS = """
autoscale: {min_replicas: 0, max_replicas: 1, interval_seconds: 0.2, idle_seconds: 1}
cache: {enabled: false}
server: {log_level: warning}
"""
MODEL = "smollm2-135m"
PHASES = ("process", "import", "kernels", "load", "first_token")


@contextmanager
def serving(folder: Path, standby: int) -> Iterator[tuple[str, str]]:
    """A server's address and an admin key."""
    config, state = folder / f"{standby}.yaml", f"sqlite:///{folder}/{standby}.db"
    config.write_text(f"standby: {standby}{SETTINGS}")
    penstock = [sys.executable, "-m", "penstock.cli.main"]
    create = [*penstock, "keys", "create", "--admin", "--state", state]
    key = subprocess.run(create, capture_output=True, text=True, check=True).stdout.strip()
    command = [*penstock, "serve", "--port", "0", "--config", str(config), "--state", state]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert server.stdout is not None
    url = next(found[0] for line in server.stdout if (found := re.search(r"http://[\w.:]+", line)))
    try:
        yield url, key
    finally:
        server.terminate()
        server.wait()


async def woken(url: str, key: str, standby: int, number: int) -> dict[str, float]:
    """Seconds to the first token of a request to a server that has no replica, in all and by phase."""
    async with HttpClient(url) as http, HttpClient(url, api_key=key) as admin:
        while True:
            fleet = (await admin.get("/admin/fleet")).json()
            if not fleet["data"] and fleet["autoscale"][0]["standby"] == standby:
                break
            await asyncio.sleep(0.05)
        body = {"model": MODEL, "prompt": f"Once upon a time {number}", "max_tokens": 1, "stream": True}
        began = time.perf_counter()
        async with http.stream("POST", "/v1/completions", body) as response:
            async for event in response.events():
                if event != "[DONE]" and json.loads(event)["choices"]:
                    seconds = {"all": time.perf_counter() - began}
                    break
        text = (await admin.get("/metrics")).body.decode()
        phases = re.findall(r'^penstock_replica_start_seconds{.*phase="(\w+)".*} (\S+)$', text, re.M)
        return seconds | {phase: float(value) for phase, value in phases}


async def measure(servers: dict[int, tuple[str, str]], rounds: int) -> dict[int, list[dict[str, float]]]:
    found: dict[int, list[dict[str, float]]] = {standby: [] for standby in servers}
    for number in range(rounds):
        for standby, (url, key) in servers.items():
            found[standby].append(await woken(url, key, standby, number))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {standby: stack.enter_context(serving(folder, standby)) for standby in (0, 1)}
        found = asyncio.run(measure(servers, rounds))
    names = ("all", *PHASES)
    print(f"median (and most) of {rounds} in ms", *(f"{name:>14}" for name in names))
    for standby, each in found.items():
        values = [[seconds.get(name, 0.0) * 1000 for seconds in each] for name in names]
        cells = (f"{statistics.median(one):6.0f} ({max(one):5.0f})" for one in values)
        print(f"{'from the warm pool' if standby else 'cold':<27}", *cells)


if __name__ == "__main__":
    main()
