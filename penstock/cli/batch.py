"""`penstock batch`: submit files of requests to a running server, follow them, and fetch what came of them."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from penstock.cli.environment import add_server_arguments, output_file
from penstock.cli.fleet import TABLE_WIDTH, plain_console
from penstock.client.http import HttpClient, Response, failure, openai_base
from penstock.core.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

OVER = ("completed", "failed", "expired", "cancelled")
POLL_SECONDS = 1.0
LONGEST_LINE = 16 * 2**20  # bytes of a first line, in which the endpoint is looked for

Command = Callable[[argparse.Namespace, HttpClient], Awaitable[int]]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("batch", help="run files of requests, when the server has room for them")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    submit = _action(actions, "submit", "upload a file of requests and run it; prints the id of the batch", _submit)
    submit.add_argument("file", type=Path, help="JSON lines of custom_id, method, url and body; -: standard input")
    submit.add_argument("--endpoint", help="default: that of the first line")
    submit.add_argument("--window", default="24h", help="for it to be done in, as 30m, 24h or 7d (default %(default)s)")
    submit.add_argument("--wait", action="store_true", help="until it is over")
    status = _action(actions, "status", "how far a batch has come", _status)
    status.add_argument("--wait", action="store_true", help="until it is over")
    fetch = _action(actions, "fetch", "write the answers of a batch, and say what went wrong", _fetch)
    fetch.add_argument("--output", type=output_file, metavar="FILE", help="of the answers (default: standard output)")
    fetch.add_argument("--errors", type=output_file, metavar="FILE", help="of the lines that have none")
    cancel = _action(actions, "cancel", "stop a batch; what is answered stays", _cancel)
    for action in (status, fetch, cancel):
        action.add_argument("id", help="as printed by submit")
    _action(actions, "list", "the latest batches", _list)


def _action(actions: Subparsers, name: str, about: str, command: Command) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=about)
    add_server_arguments(parser)
    parser.set_defaults(run=lambda args: asyncio.run(_run(args, command)))
    return parser


async def _run(args: argparse.Namespace, command: Command) -> int:
    async with HttpClient(openai_base(args.url), api_key=args.api_key) as http:
        return await command(args, http)


async def _submit(args: argparse.Namespace, http: HttpClient) -> int:
    with _to_upload(args.file) as path:
        endpoint = args.endpoint or await asyncio.to_thread(_first_url, path, args.file)
        with _progress() as progress:
            bar = progress.add_task("uploading", total=path.stat().st_size)
            uploaded = await http.upload(
                "/v1/files", path, {"purpose": "batch"}, lambda sent: progress.advance(bar, sent)
            )
    file = _checked(http, "/v1/files", uploaded)
    wanted = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": args.window}
    batch = await _ask(http, "POST", "/v1/batches", wanted)
    print(batch["id"], flush=True)
    return await _follow(http, batch) if args.wait else 0


async def _status(args: argparse.Namespace, http: HttpClient) -> int:
    batch = await _ask(http, "GET", f"/v1/batches/{args.id}")
    if args.wait:
        return await _follow(http, batch)
    _show(batch)
    return 0


async def _cancel(args: argparse.Namespace, http: HttpClient) -> int:
    _show(await _ask(http, "POST", f"/v1/batches/{args.id}/cancel"))
    return 0


async def _list(args: argparse.Namespace, http: HttpClient) -> int:
    from rich.table import Table

    table = Table("batch", "status", "done", "failed", "of", "endpoint", "created", box=None)
    for batch in (await _ask(http, "GET", "/v1/batches?limit=100"))["data"]:
        counts = batch["request_counts"]
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(batch["created_at"]))
        numbers = (str(counts[name]) for name in ("completed", "failed", "total"))
        table.add_row(batch["id"], batch["status"], *numbers, batch["endpoint"], made)
    plain_console(least_width=TABLE_WIDTH).print(table)
    return 0


async def _fetch(args: argparse.Namespace, http: HttpClient) -> int:
    batch = await _ask(http, "GET", f"/v1/batches/{args.id}")
    if batch["status"] not in OVER:
        raise Unavailable(f"{args.id} is {batch['status']}; 'penstock batch status --wait {args.id}' waits for its end")
    await _download(http, batch["output_file_id"], args.output)
    if args.errors is not None:
        await _download(http, batch["error_file_id"], args.errors)
    return _say_how_it_ended(batch)


async def _follow(http: HttpClient, batch: dict[str, Any]) -> int:
    """A bar, until it is over. A server that is restarted is waited for."""
    path = f"/v1/batches/{batch['id']}"
    with _progress() as progress:
        bar = progress.add_task(batch["status"], total=None)
        while batch["status"] not in OVER:
            await asyncio.sleep(POLL_SECONDS)
            try:
                batch = await _ask(http, "GET", path)
            except Unavailable as error:
                if error.code not in ("connect", "closed"):
                    raise
                progress.update(bar, description="no answer")
                continue
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            progress.update(bar, description=batch["status"], completed=done, total=counts["total"] or None)
    return _say_how_it_ended(batch)


def _say_how_it_ended(batch: dict[str, Any]) -> int:
    counts = batch["request_counts"]
    console = plain_console(stderr=True)
    console.print(f"{batch['status']}: {counts['completed']} answered, {counts['failed']} failed, of {counts['total']}")
    for error in (batch["errors"] or {"data": []})["data"]:
        where = "" if error["line"] is None else f"line {error['line']}: "
        console.print(f"  {where}{error['code']}: {error['message']}")
    return 0 if batch["status"] == "completed" and not counts["failed"] else 1


def _show(batch: dict[str, Any]) -> None:
    print(json.dumps({name: value for name, value in batch.items() if value is not None}, indent=2))


async def _download(http: HttpClient, file: str | None, path: Path | None) -> None:
    """What there is none of is an empty file, not the one of an earlier batch."""
    if file is None:
        if path is not None:
            await asyncio.to_thread(path.write_bytes, b"")
        return
    async with http.stream("GET", f"/v1/files/{file}/content") as response:
        if response.status != 200:
            raise failure(f"{http.url}/v1/files/{file}/content", response.status, await response.read_error())
        target = sys.stdout.buffer if path is None else await asyncio.to_thread(path.open, "wb")
        try:
            async for part in response.body():
                target.write(part)
            target.flush()
        finally:
            if path is not None:
                target.close()


async def _ask(http: HttpClient, method: str, path: str, payload: object = None) -> dict[str, Any]:
    response = await (http.get(path) if method == "GET" else http.post(path, payload))
    return _checked(http, path, response)


def _checked(http: HttpClient, path: str, response: Response) -> dict[str, Any]:
    if response.status != 200:
        raise failure(f"{http.url}{path}", response.status, response.error_message)
    return dict(response.json())


@contextmanager
def _to_upload(path: Path) -> Iterator[Path]:
    """A file whose length is known and which can be read again. Of a pipe, that is a copy."""
    if path.is_file():
        yield path
        return
    with NamedTemporaryFile(suffix=".jsonl") as copy:
        try:
            with sys.stdin.buffer if path == Path("-") else path.open("rb") as source:
                shutil.copyfileobj(source, copy)
        except OSError as error:
            raise InvalidRequest(f"cannot read {path}: {error.strerror}", param="file") from error
        copy.flush()
        yield Path(copy.name)


def _first_url(path: Path, given: Path) -> str:
    try:
        with path.open("rb") as file:
            lines = (line.removeprefix(BOM_UTF8) for line in iter(partial(file.readline, LONGEST_LINE), b""))
            first = next(filter(bytes.strip, lines), None)
            if first is None:
                raise InvalidRequest(f"{'standard input' if given == Path('-') else given} is empty", param="file")
            return str(json.loads(first)["url"])
    except OSError as error:
        raise InvalidRequest(f"cannot read {given}: {error.strerror}", param="file") from error
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidRequest(f"the first line of {given} names no url; give --endpoint", param="file") from error


def _progress() -> Any:
    """On standard error, so that what is printed can be piped."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=plain_console(stderr=True))
