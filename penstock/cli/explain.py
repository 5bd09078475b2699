"""`penstock explain ID`: where the time of a request went. Without ID: which requests took longest lately."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from penstock.cli.environment import add_server_arguments, printable
from penstock.cli.fleet import TABLE_WIDTH, plain_console
from penstock.client.http import HttpClient, Response, failure, openai_base
from penstock.core.errors import NotFound

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

BAR_WIDTH = 72
MAX_CHUNK_ROWS = 8

# part: colour, what happened then
PARTS: dict[str, tuple[str, str]] = {
    "prepare": ("cyan", "read, checked and tokenised by the gateway"),
    "cascade": ("bright_blue", "at a small model whose answer was not used"),
    "held": ("bright_yellow", "waiting for a replica, as none was running"),
    "queued": ("yellow", "waiting for a first step"),
    "prefill": ("blue", "computing the prompt"),
    "decode": ("green", "computing the answer"),
    "stalled": ("red", "ready, but others were computed"),
    "failover": ("bright_red", "at a replica that was lost, and until another took over"),
    "answer": ("green", "answered without a ledger of its own: from a cache, or ended early"),
    "relay": ("magenta", "sockets, tokens to text, sending"),
}
QUEUE_CAUSES = {
    "step": "the step under way had to end",
    "order": "others went first",
    "rows": "as many sequences as allowed were running",
    "memory": "no KV memory was free",
    "adapters": "every adapter slot was in use",
    "preempted": "its KV memory was taken away",
}
CACHE_STATES = {
    "hit": "the answer was stored",
    "similar": "the answer to a prompt of the same meaning was stored",
    "shared": "an identical request was being computed, and this one listened",
}
MISS_CAUSES = {
    "never_seen": "never seen before",
    "evicted": "evicted since",
    "too_short": "too short for a whole block",
    "other_salt": "cached under another salt",
    "off": "prefix caching is off",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("explain", help="say where the time of a request went", description=__doc__)
    parser.add_argument("id", nargs="?", metavar="ID", help="of a response, or its x-request-id")
    add_server_arguments(parser)
    parser.add_argument("--limit", type=int, default=10, help="without ID: how many (default %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    asyncio.run(_run(args, plain_console(least_width=TABLE_WIDTH if args.id is None else 0)))
    return 0


async def _run(args: argparse.Namespace, console: Console) -> None:
    async with HttpClient(openai_base(args.url), api_key=args.api_key, timeout=30) as http:
        if args.id is None:
            found = _checked(await http.get(f"/v1/requests?limit={args.limit}"), http.url)
            console.print(slowest_table(found["data"]))
        else:
            account = _checked(await http.get(f"/v1/requests/{quote(args.id, safe='')}"), http.url)
            console.print(*explanation(account), sep="\n")


def _checked(response: Response, url: str) -> Any:
    if response.status == 404:
        raise NotFound(response.error_message)
    if response.status != 200:
        raise failure(url, response.status, response.error_message)
    return response.json()


def slowest_table(accounts: list[dict[str, Any]]) -> RenderableType:
    from rich.table import Table

    if not accounts:
        return "no request has ended yet"
    table = Table(title="Slowest requests lately", title_justify="left", box=None, pad_edge=False)
    for heading in ("id", "class", "status", "most of it"):
        table.add_column(heading, no_wrap=True)
    for heading in ("total", "first", "in/out"):
        table.add_column(heading, justify="right")
    for account in accounts:
        part, seconds = largest_part(account)
        table.add_row(
            account["id"],
            account["objective"],
            str(account["status"]),
            f"{part} {duration(seconds)}",
            duration(account["total"]),
            duration(account["ttft"]),
            f"{account['prompt_tokens']}/{account['output_tokens']}",
        )
    return table


def largest_part(account: dict[str, Any]) -> tuple[str, float]:
    """Of the choice that a reader waited for longest; all choices end with the request."""
    parts: dict[str, float] = account["choices"][0]["parts"]
    return max(parts.items(), key=lambda item: item[1])


def explanation(account: dict[str, Any]) -> Iterable[RenderableType]:
    from rich.text import Text

    title = Text.assemble(
        (account["id"], "bold"),
        f"  {account['endpoint']}  {account['model']}  status {account['status']}, {_ago(account)}",
    )
    if account["request_id"] != account["id"]:
        title.append(f"  (x-request-id {account['request_id']})", "dim")
    yield title
    yield (
        f"{duration(account['total'])} in all, first token after {duration(account['ttft'])}; "
        f"{account['prompt_tokens']} tokens in ({account['cached_tokens']} cached), {account['output_tokens']} out"
        + (f"; tenant {account['tenant']}" if account["tenant"] else "")
    )
    if adapter := account["adapter"]:
        yield f"Adapter {adapter['name']} of {account['model']}, digest {adapter['digest']}."
    if account["why"]:
        yield f"Model {account['model']} for {account['asked']}: {account['why']}."
    for attempt in account["attempts"]:
        tokens = f"{attempt['output_tokens']} tokens in {duration(attempt['seconds'])}"
        yield f"Model {attempt['model']} before, {tokens} that were not used: {attempt['why']}."
    if account["error"]:
        message = printable(account["error"])
        yield Text(f"error: {message}", "red")
    for choice in account["choices"]:
        yield ""
        if len(account["choices"]) > 1:
            yield Text(f"choice {choice['index']}", "bold")
        yield from _choice(choice, account)


def _choice(choice: dict[str, Any], account: dict[str, Any]) -> Iterable[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    total: float = account["total"]
    parts = {name: choice["parts"][name] for name in PARTS if choice["parts"][name]}
    yield timeline(parts, total)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, seconds in parts.items():
        colour, meaning = PARTS[name]
        table.add_row(
            Text("■", colour), name, Text(duration(seconds), justify="right"), f"{seconds / total:6.1%}", meaning
        )
    yield table
    if choice["cache"] in CACHE_STATES:
        yield f"Result cache: {CACHE_STATES[choice['cache']]}."
    if choice["engine"] is not None:
        yield from _engine(choice["engine"])
    name, seconds = max(parts.items(), key=lambda item: item[1])
    yield f"Most of it: {name}, {duration(seconds)} ({seconds / total:.0%})."


def timeline(parts: dict[str, float], total: float) -> Text:
    """One character per 1/BAR_WIDTH of the time; what is shorter still gets one."""
    from rich.text import Text

    bar = Text()
    for name, seconds in parts.items():
        if seconds > 0:
            bar.append("█" * max(1, round(seconds / total * BAR_WIDTH)), PARTS[name][0])
    return bar


def _engine(ledger: dict[str, Any]) -> Iterable[RenderableType]:
    if ledger["replica"]:
        yield f"Replica: {ledger['replica']}" + (f" ({ledger['routing']})." if ledger["routing"] else ".")
    for each in ledger["failovers"]:
        yield (
            f"Failover: from {each['replica']} after {each['output_tokens']} tokens ({each['cause']}); "
            f"{duration(each['lost'])} until another replica went on."
        )
    if queued := {cause: seconds for cause, seconds in ledger["queued"].items() if seconds > 0}:
        yield "Queued: " + ", ".join(f"{duration(s)} {QUEUE_CAUSES.get(c, c)}" for c, s in queued.items()) + "."
    yield from _prefill(ledger["prefill"])
    if ledger["decode_steps"]:
        each = ledger["decode"] / ledger["decode_steps"]
        forced = f" ({ledger['forced_tokens']} forced by the grammar)" if ledger["forced_tokens"] else ""
        steps = f"in {ledger['decode_steps']} steps of {duration(each)}"
        yield f"Decode: {ledger['output_tokens']} tokens{forced} {steps}."
    if drafted := ledger["drafted_tokens"]:
        yield f"Speculation: {drafted} tokens drafted, {ledger['accepted_tokens']} of them right."
    if ledger["stalled"] > 0:
        by = [
            f"{duration(stall['seconds'])} by {stall['request_id'] or 'others'} ({stall['steps']} steps)"
            for stall in ledger["stalls"][:5]
        ]
        yield f"Stalled: {duration(ledger['stalled'])}" + (": " + ", ".join(by) if by else "") + "."
    missed = [f"{n} {MISS_CAUSES.get(cause, cause)}" for cause, n in ledger["missed_tokens"].items() if n]
    hits = f"Prefix cache: {ledger['cached_tokens']} of {ledger['prompt_tokens']} prompt tokens"
    yield hits + (f"; the rest: {', '.join(missed)}." if missed else ".")
    if ledger["preemptions"]:
        yield f"Preempted {ledger['preemptions']} times, {ledger['recomputed_tokens']} tokens computed again."
    yield from _objective(ledger)


def _prefill(chunks: list[dict[str, Any]]) -> Iterable[str]:
    if not chunks:
        return
    shown = ", ".join(f"{chunk['tokens']} tokens in {duration(chunk['seconds'])}" for chunk in chunks[:MAX_CHUNK_ROWS])
    rest = chunks[MAX_CHUNK_ROWS:]
    if rest:
        shown += f", {sum(c['tokens'] for c in rest)} in {len(rest)} more ({duration(sum(c['seconds'] for c in rest))})"
    yield f"Prefill: {shown}."


def _objective(ledger: dict[str, Any]) -> Iterable[RenderableType]:
    from rich.text import Text

    line = Text(f"Objective {ledger['objective']}: ")
    for name, met in (("first token", ledger["met_ttft"]), ("gaps", ledger["met_gap"])):
        verdict, colour = (
            ("nothing promised", "dim") if met is None else ("kept", "green") if met else ("missed", "red")
        )
        line.append(f"{name} ").append(verdict, colour).append("  ")
    if ledger["predicted_ttft"] is not None and ledger["ttft"] is not None:
        line.append(f"(first token forecast {duration(ledger['predicted_ttft'])}, took {duration(ledger['ttft'])})")
    yield line


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if abs(seconds) < 0.0995:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds * 1000:.0f} ms" if abs(seconds) < 10 else f"{seconds:.1f} s"


def _ago(account: dict[str, Any]) -> str:
    ago = max(0.0, time.time() - account["arrived"] - account["total"])
    return f"{ago:.0f} s ago" if ago < 120 else f"{ago / 60:.0f} min ago"
