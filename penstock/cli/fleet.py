"""`penstock fleet`: the replicas of a running server. Needs an admin key where the server has tenants."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from penstock.cli.environment import add_server_arguments
from penstock.client.http import HttpClient, Response, failure, openai_base

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_PIPE_WIDTH = 1000
TABLE_WIDTH = 100  # a table cut to the 80 columns of a terminal would lose ids and figures
_LONGEST_SECONDS = 3600.0  # until all replicas of a model are replaced


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("fleet", help="list, add, drain and replace replicas of a running server")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="show all replicas, and gateways where there are several")
    add = actions.add_parser("add", help="start more replicas of a model")
    add.add_argument("model", help="as clients call it")
    add.add_argument("count", nargs="?", type=int, default=1, help="how many (default %(default)s)")
    drain = actions.add_parser("drain", help="let a replica finish what it has, and stop it")
    drain.add_argument("replica", help="as in the list")
    replace = actions.add_parser("replace", help="replace a model's replicas, one after the other, without a pause")
    replace.add_argument("model", help="as clients call it")
    replace.add_argument("checkpoint", help="as the settings' model: a name, a folder or a file")
    for action in (drain, replace):
        action.add_argument(
            "--drain-seconds",
            type=float,
            default=30.0,
            metavar="S",
            help="what is not finished by then goes on at another replica (default %(default)s)",
        )
    for action, work in ((listing, _list), (add, _add), (drain, _drain), (replace, _replace)):
        add_server_arguments(action)
        action.set_defaults(run=lambda args, work=work: run(args, work))


def run(args: argparse.Namespace, work: Callable[[HttpClient, argparse.Namespace], Awaitable[dict[str, Any]]]) -> int:
    async def ask() -> dict[str, Any]:
        async with HttpClient(openai_base(args.url), api_key=args.api_key, timeout=_LONGEST_SECONDS) as http:
            return await work(http, args)

    console, found = plain_console(least_width=TABLE_WIDTH), asyncio.run(ask())
    console.print(replica_table(found["data"]))
    if found.get("gateways"):
        console.print("", gateway_table(found["gateways"]))
    return 0


def plain_console(*, stderr: bool = False, least_width: int = 0) -> Console:
    """Of a terminal; in a pipe no line is cut to a width. `least_width`: a narrower terminal breaks the lines."""
    from rich.console import Console

    shown = (sys.stderr if stderr else sys.stdout).isatty()
    console = Console(highlight=False, markup=False, width=None if shown else _PIPE_WIDTH, stderr=stderr)
    console.width = max(console.width, least_width)
    return console


async def _list(http: HttpClient, args: argparse.Namespace) -> dict[str, Any]:
    return _checked(http, await http.get("/admin/fleet"))


async def _add(http: HttpClient, args: argparse.Namespace) -> dict[str, Any]:
    return _checked(http, await http.post("/admin/fleet", {"model": args.model, "count": args.count}))


async def _drain(http: HttpClient, args: argparse.Namespace) -> dict[str, Any]:
    path = f"/admin/fleet/{quote(args.replica, safe='')}/drain"
    return _checked(http, await http.post(path, {"drain_seconds": args.drain_seconds}))


async def _replace(http: HttpClient, args: argparse.Namespace) -> dict[str, Any]:
    body = {"model": args.model, "checkpoint": args.checkpoint, "drain_seconds": args.drain_seconds}
    return _checked(http, await http.post("/admin/fleet/replace", body))


def _checked(http: HttpClient, response: Response) -> dict[str, Any]:
    if response.status not in (200, 201, 202):
        raise failure(http.url, response.status, response.error_message)
    found: dict[str, Any] = response.json()
    return found if "data" in found else {"data": [found]}


def replica_table(replicas: list[dict[str, Any]], *, model: bool = True) -> RenderableType:
    """Where there is no room for all of it, places and states are folded, never numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("replica", no_wrap=True)
    for heading in (*(["model"] if model else []), "where", "state"):
        table.add_column(heading, overflow="fold")
    rated = any("tokens_per_second" in one for one in replicas)
    for heading in ("for", "streams", "running", "waiting", "KV", *(["tok/s"] if rated else []), "restarts"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in replicas:
        place, state = _place_and_state(one)
        used = f"{one['kv_blocks_used'] / one['kv_blocks']:.0%}" if one["kv_blocks"] else "–"
        numbers = [f"{one['seconds']:.0f} s", str(one["streams"]), str(one["running"]), str(one["waiting"]), used]
        if rated:
            numbers.append(_rate(one.get("tokens_per_second")))
        table.add_row(one["id"], *([one["model"]] if model else []), place, state, *numbers, str(one["restarts"]))
    return table


def gateway_table(gateways: list[dict[str, Any]]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("gateway", "where", "serves at", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("for", "restarts"):
        table.add_column(heading, justify="right")
    for one in gateways:
        place, state = _place_and_state(one)
        table.add_row(one["id"], place, one["url"] or "–", state, f"{one['seconds']:.0f} s", str(one["restarts"]))
    return table


def _place_and_state(one: dict[str, Any]) -> tuple[str, str]:
    """Of a replica or gateway."""
    place = one["place"] if one["process"] is None else f"{one['place']} {one['process']}"
    return place, f"{one['state']} ({one['detail']})" if one["detail"] else one["state"]


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"
