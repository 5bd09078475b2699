"""What a gateway adds: Penstock beside the LiteLLM proxy, each before an upstream that costs nothing.

    python benchmarks/gateway_peers.py --install-only          # once; LiteLLM in an environment of its own
    python benchmarks/gateway_peers.py --rounds 3 --json gateway.json

The gateway has one core, the upstream and the load share another. Keys, limits, cache and metrics are on in both
gateways. The upstream answers at once, so all time is the gateway's, the client's and the upstream's handling of
sockets; what those two need alone is measured as `direct` and taken off. See benchmarks/README.md.
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
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from peers.process import PeerError, PeerProcess, free_port, running
from peers.workshop import InstallError, Workshop

from penstock.bench.report import describe_machine
from penstock.client.http import HttpClient
from penstock.core.errors import PenstockError

PEERS_DIR = Path("~/.cache/penstock/peers")
LITELLM = "litellm[proxy]==1.106.2"
GATEWAY_CORE, LOAD_CORE = 0, 1
START_SECONDS = 120.0
MIB = 1 << 20
MANY = 10**9  # limits are counted, never reached

Figures = dict[str, float]

# figure: its title, the target
TITLES = {
    "added_p50": ("added to TTFT, 1 client, p50 ms", "≤ 0.8"),
    "open_p50": ("added to TTFT at 200/s, p50 ms", "≤ 0.8"),
    "open_p99": ("added to TTFT at 200/s, p99 ms", "≤ 3"),
    "calm_p99": ("the same, while the host took nothing", "≤ 3"),
    "stolen": ("taken by the host, ms of a second", "–"),
    "requests": ("requests/s, 32 clients", "≥ 2,000"),
    "stored": ("requests/s, each looked up and stored in the cache", "–"),
    "streams": ("64-chunk streams/s, 32 clients", "≥ 400"),
    "chunks": ("chunks/s", "≥ 25,000"),
    "cached": ("cached answer, end to end, p50 ms", "≤ 1"),
    "memory": ("resident MiB", "≤ 150"),
}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    load: dict[str, Any]
    times: int = 1  # how much longer than the others it takes

    def figures(self, outcome: dict[str, Any]) -> Figures:
        rate = outcome["done"] / outcome["seconds"]
        if self.name in ("requests", "stored"):
            return {self.name: rate}
        if self.name == "streams":
            return {"streams": rate, "chunks": rate * self.load["tokens"]}
        if not outcome["done"]:
            return {}
        if self.name == "cached":
            return {"cached": outcome["total"]["p50"]}
        ttft = outcome["ttft"]
        if self.name == "one":
            return {"added_p50": ttft["p50"]}
        found = {"open_p50": ttft["p50"], "open_p99": ttft["p99"], "stolen": outcome["stolen"] / outcome["seconds"]}
        return found | ({"calm_p99": outcome["calm"]["p99"]} if outcome["calm"] else {})


CASES = (
    Case("one", {"clients": 1, "tokens": 8, "stream": True}),
    Case("requests", {"clients": 32, "tokens": 1, "stream": False}),
    Case("stored", {"clients": 32, "tokens": 1, "stream": False, "deterministic": True}),
    Case("streams", {"clients": 32, "tokens": 64, "stream": True}),
    Case("cached", {"clients": 1, "tokens": 8, "stream": False, "deterministic": True, "repeat": True}),
    # Last: whoever cannot keep up is busy for long after. Longer: one request in a hundred must be more than a few.
    Case("open", {"rate": 200.0, "tokens": 8, "stream": True}, times=3),
)
DIRECT_CASES = (CASES[0], CASES[-1])
BARE_CASES = CASES[1:2]


@dataclass(frozen=True, slots=True)
class Gateway:
    name: str
    port: int
    key: str
    process: PeerProcess


def python_module(name: str, *arguments: str, core: int) -> list[str]:
    return ["taskset", "-c", str(core), sys.executable, "-m", name, *arguments]


PATHS = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(filter(None, PATHS))}


@asynccontextmanager
async def penstock(folder: Path, logs: Path) -> AsyncIterator[Gateway]:
    socket = folder / "worker.sock"
    tenant = {"requests_per_minute": MANY, "tokens_per_minute": MANY, "concurrent": 10_000}
    settings = {"state": f"sqlite:///{folder / 'state.sqlite'}", "tenants": {"bench": tenant}}
    worker_command = python_module("peers.trivial_worker", str(socket), core=LOAD_CORE)
    async with running(worker_command, ENVIRONMENT, logs / "trivial-worker.log", pipe=True) as worker:
        await first_line(worker)
        command = python_module("peers.run_gateway", str(socket), json.dumps(settings), core=GATEWAY_CORE)
        async with running(command, ENVIRONMENT, logs / "penstock-gateway.log", pipe=True) as process:
            port, key = (await first_line(process)).split()
            yield Gateway("Penstock", int(port), key, process)


@asynccontextmanager
async def trivial_upstream(logs: Path) -> AsyncIterator[Gateway]:
    port = free_port()
    command = python_module("peers.trivial_openai", str(port), core=LOAD_CORE)
    async with running(command, ENVIRONMENT, logs / "trivial-openai.log", pipe=True) as process:
        await first_line(process)
        yield Gateway("direct", port, "unused", process)


@asynccontextmanager
async def bare_server(logs: Path) -> AsyncIterator[Gateway]:
    port = free_port()
    command = python_module("peers.bare_asgi", str(port), core=GATEWAY_CORE)
    async with running(command, ENVIRONMENT, logs / "bare-asgi.log", pipe=True) as process:
        await first_line(process)
        await answers(port, process)
        yield Gateway("uvicorn alone", port, "unused", process)


@asynccontextmanager
async def bare_relay(logs: Path) -> AsyncIterator[Gateway]:
    async with trivial_upstream(logs) as upstream:
        port = free_port()
        command = python_module("peers.bare_relay", str(port), str(upstream.port), core=GATEWAY_CORE)
        async with running(command, ENVIRONMENT, logs / "bare-relay.log", pipe=True) as process:
            await first_line(process)
            yield Gateway("bare relay", port, "unused", process)


LITELLM_CONFIG = """\
model_list:
  - model_name: trivial
    litellm_params: {{model: openai/trivial, api_base: "http://127.0.0.1:{upstream}/v1", api_key: unused,
      rpm: {many}, tpm: {many}}}
litellm_settings: {{cache: true, cache_params: {{type: local}}, callbacks: [prometheus]}}
general_settings: {{master_key: sk-bench}}
"""


@asynccontextmanager
async def litellm(workshop: Workshop, folder: Path, logs: Path) -> AsyncIterator[Gateway]:
    port = free_port()
    async with trivial_upstream(logs) as upstream:
        config = folder / "litellm.yaml"
        config.write_text(LITELLM_CONFIG.format(upstream=upstream.port, many=MANY))
        program = workshop.folder / "venv" / "bin" / "litellm"
        command = ["taskset", "-c", str(GATEWAY_CORE), str(program), "--config", str(config), "--port", str(port)]
        environment = {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION"}
        async with running(command, environment, logs / "litellm.log", pipe=False) as process:
            await answers(port, process)
            yield Gateway("LiteLLM", port, "sk-bench", process)


async def first_line(process: PeerProcess) -> str:
    assert process.process.stdout is not None
    line = await asyncio.wait_for(process.process.stdout.readline(), START_SECONDS)
    if not line:
        raise PeerError(f"it did not start; see {process.log}")
    return line.decode().strip()


async def answers(port: int, process: PeerProcess) -> None:
    async with asyncio.timeout(START_SECONDS), HttpClient(f"http://127.0.0.1:{port}") as http:
        while True:
            process.check_alive()
            try:
                if (await http.get("/health/liveliness")).status == 200:
                    return
            except PenstockError:
                pass
            await asyncio.sleep(0.2)


async def measure(gateway: Gateway, cases: Sequence[Case], seconds: float) -> Figures:
    await run_load(gateway, cases[0], 1.0)  # a warm-up
    figures: Figures = {}
    for case in cases:
        outcome = await run_load(gateway, case, seconds)
        figures |= case.figures(outcome)
        shown = {
            name: {q: round(ms, 2) for q, ms in outcome[name].items()} for name in ("ttft", "calm", "total", "late")
        }
        say(f"  {gateway.name} {case.name}: {outcome['done']} done, errors {outcome['errors']}, {shown}")
    figures["memory"] = gateway.process.resident_bytes() / MIB
    return figures


async def run_load(gateway: Gateway, case: Case, seconds: float) -> dict[str, Any]:
    load = {"port": gateway.port, "key": gateway.key, "model": "trivial", "seconds": seconds * case.times, **case.load}
    process = await asyncio.create_subprocess_exec(
        *python_module("peers.gateway_load", json.dumps(load), core=LOAD_CORE),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT},
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise PeerError(f"the load on {gateway.name} ended with {process.returncode}")
    outcome: dict[str, Any] = json.loads(output)
    if case.load["stream"] and outcome["events"] < outcome["done"] * case.load["tokens"]:
        raise PeerError(f"{gateway.name} lost chunks: {outcome['events']} of {outcome['done']} streams")
    return outcome


async def one_round(args: argparse.Namespace, workshop: Workshop | None, logs: Path) -> dict[str, Figures]:
    found: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with trivial_upstream(logs) as upstream:
            direct = await measure(upstream, DIRECT_CASES, args.seconds)
        async with bare_server(logs) as bare:
            found[bare.name] = await measure(bare, BARE_CASES, args.seconds)
        systems = [(bare_relay(logs), DIRECT_CASES), (penstock(Path(folder), logs), CASES)]
        if workshop is not None:
            systems.append((litellm(workshop, Path(folder), logs), CASES))
        for system, cases in systems:
            async with AsyncExitStack() as stack:
                gateway = await stack.enter_async_context(system)
                figures = await measure(gateway, cases, args.seconds)
                found[gateway.name] = {
                    name: value - direct.get(name, 0.0) * _is_added(name) for name, value in figures.items()
                }
    found["direct"] = direct
    return found


def _is_added(name: str) -> bool:
    return name in ("added_p50", "open_p50", "open_p99", "calm_p99")


def table(rounds: Sequence[dict[str, Figures]]) -> str:
    names = [name for name in ("Penstock", "LiteLLM", "bare relay", "direct", "uvicorn alone") if name in rounds[0]]
    lines = ["| | " + " | ".join(names) + " | target |", "|---" * (len(names) + 2) + "|"]
    for figure, (title, target) in TITLES.items():
        cells = []
        for name in names:
            values = [found[name][figure] for found in rounds if figure in found[name]]
            cells.append("–" if not values else _shown(median(values)))
        lines.append(f"| {title} | " + " | ".join(cells) + f" | {target} |")
    return "\n".join(lines)


def _shown(value: float) -> str:
    return f"{value:,.2f}" if abs(value) < 10 else f"{value:,.0f}"


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def install(folder: Path) -> Workshop | None:
    workshop = Workshop(folder / "litellm")
    try:
        workshop.folder.mkdir(parents=True, exist_ok=True)
        workshop.venv()
        workshop.packages(LITELLM, "prometheus_client")
    except InstallError as error:
        say(f"LiteLLM: SKIPPED, not installed: {error}")
        return None
    return workshop


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-dir", type=Path, default=PEERS_DIR, help=f"where LiteLLM is installed ({PEERS_DIR})")
    parser.add_argument("--rounds", type=int, default=1, help="how often each is started and measured (1)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load (5)")
    parser.add_argument("--skip-peer", action="store_true", help="Penstock alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    parser.add_argument("--install-only", action="store_true")
    args = parser.parse_args(argv)
    folder = args.peers_dir.expanduser()
    workshop = None if args.skip_peer else install(folder)
    if args.install_only:
        return 0 if workshop is not None else 1
    if (os.cpu_count() or 1) < 2:
        raise SystemExit("gateway_peers: needs two cores, one of them for the gateway alone")
    rounds = []
    for number in range(args.rounds):
        say(f"round {number + 1} of {args.rounds}")
        rounds.append(asyncio.run(one_round(args, workshop, folder / "logs")))
        if args.json:
            args.json.write_text(json.dumps({"machine": describe_machine(), "rounds": rounds}, indent=2) + "\n")
    print(table(rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
