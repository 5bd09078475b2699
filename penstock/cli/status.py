"""`penstock status`: the fleet of a running server in the terminal. Needs an admin key."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.cli.environment import add_server_arguments
from penstock.cli.fleet import gateway_table, plain_console, replica_table
from penstock.client.http import HttpClient, failure, openai_base
from penstock.core.errors import PenstockError, Unauthorized, Unavailable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

RATE_SECONDS = 1.0  # between the two readings that give tokens per second
WINDOW_SECONDS = 60.0  # over which --watch counts met objectives
_TIMEOUT_SECONDS = 20.0
_NEEDS_KEY = "Give an admin key in PENSTOCK_API_KEY or with --api-key; 'penstock keys create --admin' makes one."
_NAMES = {"ttft": "TTFT", "gap": "ITL"}  # of objectives: as in metrics, and for people


@dataclass(frozen=True, slots=True)
class Reading:
    """What a server said of itself at one time."""

    at: float  # seconds of a monotonic clock
    replicas: list[dict[str, Any]]
    autoscale: dict[str, dict[str, Any]]  # what the autoscaler says, by model
    objectives: dict[tuple[str, str, str], float]  # seconds, by (model, class, ttft or gap)
    kept: dict[tuple[str, str, str, bool], float]  # promises, by the same and whether they were met
    machine_per_hour: float | None = None
    gateways: list[dict[str, Any]] = field(default_factory=list)  # where there are several


@dataclass(frozen=True, slots=True)
class Attainment:
    objective_ms: float | None
    met: int = 0
    missed: int = 0

    @property
    def share(self) -> float | None:
        total = self.met + self.missed
        return self.met / total if total else None


@dataclass(slots=True)
class ModelStatus:
    model: str
    replicas: list[dict[str, Any]]  # with tokens_per_second
    ready: int
    running: int
    waiting: int
    tokens_per_second: float | None
    cost_per_hour: float | None = None  # of all replicas, in the currency of the settings
    held: int = 0  # requests that wait for a replica, as there is none
    standby: int = 0  # prepared processes of the warm pool
    wanted: int | None = None  # replicas that the autoscaler wants
    reason: str = ""  # why
    classes: dict[str, dict[str, Attainment]] = field(default_factory=dict)  # by class and objective


@dataclass(frozen=True, slots=True)
class FleetStatus:
    models: list[ModelStatus]
    machine_per_hour: float | None  # price of the machine in the settings
    gateways: list[dict[str, Any]] = field(default_factory=list)  # where there are several


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("status", help="replicas, load, objectives and cost of a running server")
    parser.add_argument("--watch", action="store_true", help="show it again and again, until Ctrl-C")
    parser.add_argument("--interval", type=_seconds, default=2.0, metavar="S", help="of --watch (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="for programs; with --watch one line each time")
    add_server_arguments(parser)
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError("must be between 0.1 and 3600")
    return value


def run(args: argparse.Namespace) -> int:
    console = plain_console()
    try:
        asyncio.run(_watch(args, console) if args.watch else _once(args, console))
    except KeyboardInterrupt:
        if not args.watch:
            raise
    return 0


async def _once(args: argparse.Namespace, console: Console) -> None:
    async with _client(args) as http:
        before = await read(http)
        await asyncio.sleep(RATE_SECONDS)
        found = summarised(await read(http), before)
    if args.json:
        print(_json(found, indent=2))
    else:
        console.print(page(found, "since the server started"))


async def _watch(args: argparse.Namespace, console: Console) -> None:
    from rich.live import Live
    from rich.text import Text

    readings: deque[Reading] = deque()
    reached = False
    with Live(console=console, auto_refresh=False) as live:
        async with _client(args) as http:
            while True:
                try:
                    readings.append(await read(http))
                    reached, found = True, _latest(readings)
                    watched = readings[-1].at - readings[0].at
                    shown = page(found, f"in the last {watched:.0f} s" if watched else "since the server started")
                    told = _json(found)
                except PenstockError as error:
                    if not reached:
                        raise
                    readings.clear()  # it may have been started again, and counts from zero then
                    shown, told = Text(error.message), json.dumps({"error": error.message})
                if args.json:
                    print(told, flush=True)
                elif console.is_terminal:
                    live.update(shown, refresh=True)
                else:
                    console.print(shown, Text())
                await asyncio.sleep(args.interval)


def _latest(readings: deque[Reading]) -> FleetStatus:
    """By the last reading, with rates since the one before and objectives over the whole window."""
    while readings[-1].at - readings[0].at > WINDOW_SECONDS and len(readings) > 2:
        readings.popleft()
    if len(readings) == 1:
        return summarised(readings[0], None)
    return summarised(readings[-1], readings[-2], since=readings[0])


def _client(args: argparse.Namespace) -> HttpClient:
    return HttpClient(openai_base(args.url), api_key=args.api_key, timeout=_TIMEOUT_SECONDS)


async def read(http: HttpClient) -> Reading:
    from prometheus_client.parser import text_string_to_metric_families

    fleet, exposition = await asyncio.gather(_get(http, "/admin/fleet"), _get(http, "/metrics"))
    objectives: dict[tuple[str, str, str], float] = {}
    kept: dict[tuple[str, str, str, bool], float] = {}
    machine_per_hour = None
    for family in text_string_to_metric_families(exposition.decode()):
        if family.name == "penstock_machine_cost_per_hour":
            machine_per_hour = family.samples[0].value
        if family.name not in ("penstock_objective_seconds", "penstock_objectives"):
            continue
        for _, labels, value, *_ in family.samples:
            key = labels["model"], labels["class"], labels["objective"]
            if "met" in labels:
                kept[*key, labels["met"] == "true"] = value
            else:
                objectives[key] = value
    answer = json.loads(fleet)
    autoscale = {each["model"]: each for each in answer.get("autoscale", [])}
    gateways = answer.get("gateways") or []
    return Reading(time.monotonic(), answer["data"], autoscale, objectives, kept, machine_per_hour, gateways)


async def _get(http: HttpClient, path: str) -> bytes:
    try:
        response = await http.get(path)
    except Unavailable as error:
        if error.code != "connect":
            raise
        raise Unavailable(f"{error.message}\nIs a server running there? Give its address with --url.") from error
    if response.status in (401, 403):
        raise Unauthorized(f"{http.url} answers {response.status}: {response.error_message}\n{_NEEDS_KEY}")
    if response.status != 200:
        raise failure(f"{http.url}{path}", response.status, response.error_message)
    return response.body


def summarised(now: Reading, before: Reading | None, since: Reading | None = None) -> FleetStatus:
    """`before` gives rates. Objectives are counted since `since`, or since the server started."""
    names = dict.fromkeys([*(replica["model"] for replica in now.replicas), *now.autoscale])
    models = []
    for name in names:
        replicas = [
            {**one, "tokens_per_second": _rate(now, before, one)} for one in now.replicas if one["model"] == name
        ]
        rates = [one["tokens_per_second"] for one in replicas if one["tokens_per_second"] is not None]
        about = now.autoscale.get(name, {})
        price, live = about.get("replica_per_hour"), [one for one in replicas if one["state"] != "stopped"]
        models.append(
            ModelStatus(
                name,
                replicas,
                ready=sum(one["state"] == "ready" for one in replicas),
                running=sum(one["running"] for one in replicas),
                waiting=sum(one["waiting"] for one in replicas),
                tokens_per_second=sum(rates) if rates else None,
                cost_per_hour=None if price is None else price * len(live),
                held=about.get("held", 0),
                standby=about.get("standby", 0),
                wanted=about.get("wanted"),
                reason=about.get("reason", ""),
                classes=_classes(now, since, None if len(names) == 1 else name),
            )
        )
    return FleetStatus(models, now.machine_per_hour, now.gateways)


def _rate(now: Reading, before: Reading | None, replica: dict[str, Any]) -> float | None:
    """None for a replica that has been started since."""
    if before is None:
        return None
    for one in before.replicas:
        if one["id"] == replica["id"] and one["output_tokens"] <= replica["output_tokens"]:
            tokens: int = replica["output_tokens"] - one["output_tokens"]
            return tokens / (now.at - before.at)
    return None


def _classes(now: Reading, since: Reading | None, model: str | None) -> dict[str, dict[str, Attainment]]:
    """Of one model; None: of the only one, whatever it is called."""
    found: dict[str, dict[str, Attainment]] = {}
    for of_model, name, objective in sorted({*now.objectives, *(key[:3] for key in now.kept)}):
        if model not in (None, of_model):
            continue
        key = of_model, name, objective
        met, missed = (
            int(now.kept.get((*key, kept), 0) - (since.kept.get((*key, kept), 0) if since else 0))
            for kept in (True, False)
        )
        seconds = now.objectives.get(key)
        attained = Attainment(None if seconds is None else seconds * 1000, met, missed)
        found.setdefault(name, {})[objective] = attained
    return found


def _json(found: FleetStatus, indent: int | None = None) -> str:
    return json.dumps(asdict(found), indent=indent)


def page(found: FleetStatus, period: str) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for model in found.models:
        parts += [Text(_headline(model), style="bold"), replica_table(model.replicas, model=False)]
        if model.classes:
            parts += [Text(f"\nobjectives met {period}"), _class_table(model)]
        parts.append(Text())
    if not parts:
        parts = [Text("this server has no replicas of its own"), Text()]
    if found.gateways:
        parts += [gateway_table(found.gateways), Text()]
    if found.machine_per_hour is not None:
        parts[-1] = Text(f"\nthe machine costs {found.machine_per_hour:.2f} per hour")
        return Group(*parts)
    return Group(*parts[:-1])


def _headline(model: ModelStatus) -> str:
    parts = [f"{model.ready} of {len(model.replicas)} ready", f"{model.running} running", f"{model.waiting} waiting"]
    if model.tokens_per_second is not None:
        parts.append(f"{model.tokens_per_second:.0f} tok/s")
    if model.held:
        parts.append(f"{model.held} held")
    if model.standby:
        parts.append(f"{model.standby} on standby")
    if model.cost_per_hour is not None:
        parts.append(f"{model.cost_per_hour:.2f} per hour")
    lines = [f"{model.model}: {', '.join(parts)}"]
    if model.wanted is not None:
        lines.append(f"autoscaler: wants {model.wanted}" + (f" ({model.reason})" if model.reason else ""))
    return "\n".join(lines)


def _class_table(model: ModelStatus) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("class", no_wrap=True)
    for name in _NAMES.values():
        table.add_column(f"{name} within", justify="right")
        table.add_column("met", justify="right")
        table.add_column("of", justify="right")
    for name, objectives in model.classes.items():
        cells = []
        for key in _NAMES:
            one = objectives.get(key, Attainment(None))
            share = one.share
            cells += [
                "–" if one.objective_ms is None else f"{one.objective_ms:.0f} ms",
                "–" if share is None else f"{share:.1%}",
                str(one.met + one.missed),
            ]
        table.add_row(name, *cells)
    return table
