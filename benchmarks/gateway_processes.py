"""How gateway processes add up: `penstock serve` with one, two, four … of them over the same workers.

    python benchmarks/gateway_processes.py --processes 1,2,4 --json processes.json

The workers have no model and cost next to nothing (`peers/trivial_worker.py`). Keys, limits, cache and metrics are on.
It needs a machine with cores for everybody: so many gateway processes, half as many workers again, and the load.
Afterwards a tenant that may send `LIMIT` requests a minute sends many more through all processes at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from gateway_peers import ENVIRONMENT, MANY, first_line, say
from peers.process import PeerError, PeerProcess, free_port, running

from penstock.bench.report import describe_machine
from penstock.checkpoint.source import BUILT_IN
from penstock.gateway.tenancy.keys import create_key
from penstock.state.open import open_store
from penstock.worker.remote import SECRET

CASES = {
    "chunks": {"clients": 32, "tokens": 64, "stream": True},
    "requests": {"clients": 32, "tokens": 1, "stream": False},
}
LIMIT = 500
SECRETS = {SECRET: "of this benchmark alone"}


@asynccontextmanager
async def serving(processes: int, workers: int, folder: Path) -> AsyncIterator[tuple[int, dict[str, str], PeerProcess]]:
    """A port, and the keys of a tenant that may do anything and of one that may not."""
    async with AsyncExitStack() as stack:
        ports = [free_port() for _ in range(workers)]
        for port in ports:
            command = [sys.executable, "-m", "peers.trivial_worker", f"tcp://127.0.0.1:{port}"]
            log = folder / f"worker-{port}.log"
            await first_line(await stack.enter_async_context(running(command, ENVIRONMENT | SECRETS, log, pipe=True)))
        state = f"sqlite:///{folder / f'state-{processes}.sqlite'}"
        tenants = {
            "many": {"requests_per_minute": MANY, "tokens_per_minute": MANY, "concurrent": 10_000},
            "few": {"requests_per_minute": LIMIT, "concurrent": 10_000},
        }
        async with open_store(state) as store:
            keys = {tenant: (await create_key(store, tenant))[0] for tenant in tenants}
        port = free_port()
        settings = {
            "server": {"port": port, "processes": processes},
            "state": state,
            "tenants": tenants,
            "models": {"trivial": {"model": BUILT_IN, "workers": [f"tcp://127.0.0.1:{port}" for port in ports]}},
        }
        file = folder / "settings.yaml"
        file.write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "penstock.cli.main", "serve", "--config", str(file)]
        log = folder / f"gateway-{processes}.log"
        gateway = await stack.enter_async_context(running(command, ENVIRONMENT | SECRETS, log, pipe=True))
        await first_line(gateway)
        yield port, keys, gateway


async def load(port: int, key: str, loads: int, seconds: float, case: dict[str, Any]) -> list[dict[str, Any]]:
    """So many processes put the same load on it."""
    one = json.dumps({"port": port, "key": key, "model": "trivial", "seconds": seconds, **case})
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "peers.gateway_load", one),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT},
        )
        for _ in range(loads)
    ]
    outputs = [await process.communicate() for process in processes]
    if any(process.returncode for process in processes):
        raise PeerError("a load ended with an error")
    return [json.loads(output) for output, _ in outputs]


async def measure(processes: int, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    found = {}
    async with serving(processes, args.workers or processes + processes // 2, folder) as (port, keys, _):
        loads = args.loads or 2 * processes
        await load(port, keys["many"], loads, 1.0, CASES["chunks"])  # a warm-up
        for name, case in CASES.items():
            outcomes = await load(port, keys["many"], loads, args.seconds, case)
            errors = [outcome["errors"] for outcome in outcomes if outcome["errors"]]
            if errors:
                raise PeerError(f"requests failed: {errors}")
            found[name] = sum(outcome["done"] * case["tokens"] / outcome["seconds"] for outcome in outcomes)
        outcomes = await load(port, keys["few"], loads, 2.0, CASES["requests"])
        found["admitted"] = sum(outcome["done"] for outcome in outcomes)
        found["refused"] = sum(outcome["errors"].get("429", 0) for outcome in outcomes)
    say(f"  {processes} processes: " + ", ".join(f"{name} {value:,.0f}" for name, value in found.items()))
    return found


async def run(args: argparse.Namespace) -> dict[int, list[dict[str, float]]]:
    rounds: dict[int, list[dict[str, float]]] = {number: [] for number in args.processes}
    for number in range(args.rounds):
        say(f"round {number + 1} of {args.rounds}")
        for processes in args.processes:
            with tempfile.TemporaryDirectory() as folder:
                rounds[processes].append(await measure(processes, args, Path(folder)))
    return rounds


def table(rounds: dict[int, list[dict[str, float]]]) -> str:
    lines = [f"| processes | chunks/s | requests/s | admitted of {LIMIT} a minute (refused) |", "|---" * 4 + "|"]
    first = next(iter(rounds.values()))
    for processes, found in rounds.items():
        cells = []
        for name in CASES:
            value = median(one[name] for one in found)
            cells.append(f"{value:,.0f} ({value / median(one[name] for one in first):.2f}×)")
        admitted = ", ".join(f"{one['admitted']:.0f} ({one['refused']:,.0f})" for one in found)
        lines.append(f"| {processes} | " + " | ".join(cells) + f" | {admitted} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(number) for number in text.split(",")]  # noqa: E731
    parser.add_argument("--processes", type=numbers, default=[1, 2, 4], help="numbers of gateway processes (1,2,4)")
    parser.add_argument("--workers", type=int, help="trivial workers (1.5 for each gateway process)")
    parser.add_argument("--loads", type=int, help="processes that send requests (2 for each gateway process)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load (5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    args = parser.parse_args(argv)
    rounds = asyncio.run(run(args))
    if args.json:
        args.json.write_text(json.dumps({"machine": describe_machine(), "rounds": rounds}, indent=2) + "\n")
    print(table(rounds))


if __name__ == "__main__":
    main()
