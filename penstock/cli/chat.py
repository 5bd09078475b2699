"""`penstock chat`: a conversation in the terminal, with the server that is running or with a model of its own.

With standard input piped, all of it is one prompt, the bare answer goes to standard output and the exit code is 0 or 1:
`git diff | penstock chat --system "Write a commit message."`
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import IO, TYPE_CHECKING

from penstock.checkpoint.source import DEFAULT_MODEL
from penstock.cli.conversation import Conversation, Turn, parse_parameter
from penstock.cli.environment import DEFAULT_URL, URL, add_key_argument, server_url
from penstock.cli.terminal import PlainAnswer, Terminal
from penstock.client.http import HttpClient, first_model, openai_base
from penstock.core.errors import InvalidRequest, StartupError, Unauthorized, Unavailable

if TYPE_CHECKING:
    from rich.console import Console

STOP_SECONDS = 10.0
LOOK_SECONDS = 2.0  # for a server at the default address


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("chat", help="talk to a model in the terminal", description=__doc__)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="run this one, as for serve; with --url, which one to ask for"
    )
    parser.add_argument(
        "--url",
        help=f"talk to this OpenAI-compatible server (default: {URL}, else {DEFAULT_URL} if one answers there)",
    )
    parser.add_argument("--local", action="store_true", help=f"run a model, by default {DEFAULT_MODEL}, in any case")
    add_key_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--temperature", type=float, help="default: the server's")
    parser.add_argument("--max-tokens", type=int, help="longest answer, in tokens")
    parser.add_argument("--plain", action="store_true", help="show answers as they are, without rendering Markdown")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        return asyncio.run(_run(args))
    except asyncio.CancelledError:  # by a signal, see _end_on_signals
        return 128 + signal.SIGTERM


async def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    given = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    parameters = {name: parse_parameter(name, str(value)) for name, value in given.items() if value is not None}
    console = Console(highlight=False, stderr=not sys.stdin.isatty())
    _end_on_signals()
    async with AsyncExitStack() as stack:
        url = await find_server(args, console)
        model = args.model if url else None
        if url is None:
            with console.status(f"Loading {args.model or DEFAULT_MODEL} …"):
                url = await stack.enter_async_context(own_server(args.model or DEFAULT_MODEL))
        http = await stack.enter_async_context(HttpClient(openai_base(url), api_key=args.api_key))
        conversation = Conversation(http, model or await first_model(http), parameters, args.system)
        if not sys.stdin.isatty():
            return await answer_stdin(conversation)
        return await Terminal(conversation, console, plain=args.plain).run()


async def find_server(args: argparse.Namespace, console: Console) -> str | None:
    """The server to talk to; None: start one. Naming a model asks for one of its own, unless a server is named too."""
    if args.local and args.url:
        raise InvalidRequest("local runs a model here and url talks to one elsewhere; give one of them", param="local")
    if args.url:
        return str(args.url)
    if args.local or args.model:
        return None
    if server_url():
        return server_url()
    async with HttpClient(
        DEFAULT_URL, api_key=args.api_key, timeout=LOOK_SECONDS, connect_timeout=LOOK_SECONDS
    ) as http:
        try:
            await first_model(http)
        except Unauthorized as error:
            raise Unauthorized(f"{error.message} With --local a model runs here instead.") from error
        except Unavailable:  # nobody there, or nobody who speaks this API
            return None
    console.print(f"talking to the server at {DEFAULT_URL}; --local runs a model here instead", style="dim")
    return DEFAULT_URL


async def answer_stdin(conversation: Conversation) -> int:
    question = sys.stdin.buffer.read().decode(errors="replace").strip()
    if not question:
        raise InvalidRequest("standard input is empty; pipe a prompt in, or run in a terminal", param="stdin")
    shown = PlainAnswer()
    try:
        await conversation.ask(question, Turn(), shown.write)
    finally:
        shown.close()
    return 0


def _end_on_signals() -> None:
    """A closed terminal or a polite kill must still stop the server this process started."""
    main = asyncio.current_task()
    assert main is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, main.cancel)


@asynccontextmanager
async def own_server(model: str) -> AsyncIterator[str]:
    """Run `penstock serve` on a free port for as long as the block lasts. Yields its URL."""
    with tempfile.TemporaryFile() as log:
        place = ("--host", "127.0.0.1", "--port", "0", "--state", "memory")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli.main", "serve", model, *place),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C in the terminal is for the chat alone
        )
        assert process.stdout is not None
        try:
            yield await _ready_url(process.stdout, log)
        finally:
            await _stop(process)


async def _ready_url(stdout: asyncio.StreamReader, log: IO[bytes]) -> str:
    async for line in stdout:
        if found := re.search(rb"https?://[^\s/]+", line):
            return found.group().decode()
    log.seek(0)
    tail = log.read()[-2000:].decode("utf-8", "replace").strip()
    raise StartupError(f"the server did not start:\n{tail}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
