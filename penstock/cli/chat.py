"""`penstock chat`: a conversation in the terminal, with a server that it starts itself or with one that is running.

With standard input piped, all of it is one prompt, the bare answer goes to standard output and the exit code is 0 or 1:
`git diff | penstock chat --system "Write a commit message."`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from penstock.core.config import DEFAULT_MODEL
from penstock.core.errors import InvalidRequest, PenstockError, StartupError, Unavailable
from penstock.http_client import HttpClient, first_model, openai_base

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from rich.console import Console

STOP_SECONDS = 10.0
HELP = """\
/clear         start over, keeping the system prompt
/system TEXT   set the system prompt and start over; without TEXT, show it
/retry         ask again for the last answer
/exit          leave (so does Ctrl-D)
Ctrl-C stops an answer. Alt-Enter starts a new line."""

# A model's output must not move the cursor, set the title or ring the bell.
_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("chat", help="talk to a model in the terminal", description=__doc__)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"what to serve (default {DEFAULT_MODEL}), or with --url which model to ask for",
    )
    parser.add_argument("--url", help="talk to this OpenAI-compatible server instead of starting one")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--temperature", type=float, help="default: the server's")
    parser.add_argument("--max-tokens", type=int, help="longest answer, in tokens")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        return asyncio.run(_run(args))
    except asyncio.CancelledError:  # by a signal, see _end_on_signals
        return 128 + signal.SIGTERM


async def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console(highlight=False, stderr=not sys.stdin.isatty())
    _end_on_signals()
    async with AsyncExitStack() as stack:
        if args.url is None:
            with console.status(f"Loading {args.model or DEFAULT_MODEL} …"):
                url = await stack.enter_async_context(own_server(args.model or DEFAULT_MODEL))
        else:
            url = openai_base(args.url)
        http = await stack.enter_async_context(HttpClient(url, api_key=args.api_key))
        model = args.model if args.url and args.model else await first_model(http)
        options = {"temperature": args.temperature, "max_tokens": args.max_tokens}
        conversation = Conversation(http, model, {k: v for k, v in options.items() if v is not None}, args.system)
        if not sys.stdin.isatty():
            return await answer_stdin(conversation)
        return await Terminal(conversation, console).run()


def _end_on_signals() -> None:
    """A closed terminal or a polite kill must still stop the server this process started."""
    main = asyncio.current_task()
    assert main is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, main.cancel)


# -- the server this command starts ------------------------------------------------------------------------------------


@asynccontextmanager
async def own_server(model: str) -> AsyncIterator[str]:
    """Run `penstock serve` on a free port for as long as the block lasts. Yields its URL."""
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli.main", "serve", model, "--port", "0", "--state", "memory"),
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
        if found := re.search(rb"http://[^\s/]+", line):
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


# -- the conversation --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Turn:
    """One streamed answer and how fast it came."""

    text: str = ""
    asked: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float = 0.0
    chunks: int = 0
    output_tokens: int | None = None  # as the server counts

    def take(self, event: str) -> str:
        """Note an event of the stream and return its text."""
        if event == "[DONE]":
            return ""
        try:
            chunk = json.loads(event)
        except ValueError as error:
            raise Unavailable(f"the server streams what is not JSON: {event[:80]!r}") from error
        if fault := chunk.get("error"):
            raise Unavailable(str(fault.get("message", fault) if isinstance(fault, dict) else fault))
        if usage := chunk.get("usage"):
            self.output_tokens = usage.get("completion_tokens")
        text = "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices") or ())
        if text:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.chunks += 1
            self.text += text
        return text

    def speed(self) -> str:
        if self.first is None:
            return "no answer"
        tokens = self.output_tokens or self.chunks
        parts = ["1 token" if tokens == 1 else f"{tokens} tokens"]
        if tokens > 1 and self.last > self.first:
            parts.append(f"{(tokens - 1) / (self.last - self.first):.1f} tok/s")
        parts.append(f"first after {(self.first - self.asked) * 1e3:.0f} ms")
        return " · ".join(parts)


class Conversation:
    """The messages so far. A turn without an answer leaves them as they were."""

    def __init__(self, http: HttpClient, model: str, options: dict[str, Any], system: str | None) -> None:
        self.model = model
        self.system = system
        self._http = http
        self._options = options
        self._messages: list[dict[str, str]] = []
        self._last_question: str | None = None
        self._answered = False

    def clear(self) -> None:
        self._messages.clear()
        self._last_question, self._answered = None, False

    def take_back(self) -> str | None:
        """Forget the last answer; returns the question that led to it."""
        if self._answered:
            del self._messages[-2:]
            self._answered = False
        return self._last_question

    async def ask(self, question: str, turn: Turn, write: Callable[[str], None]) -> None:
        """Stream the answer. What has come when this is cancelled counts as the answer."""
        messages = [*self._messages, {"role": "user", "content": question}]
        self._last_question, self._answered = question, False
        try:
            await self._stream(messages, turn, write)
        finally:
            if turn.text:
                self._messages = [*messages, {"role": "assistant", "content": turn.text}]
                self._answered = True

    async def _stream(self, messages: list[dict[str, str]], turn: Turn, write: Callable[[str], None]) -> None:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": system + messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        async with self._http.stream("POST", "/v1/chat/completions", body) as response:
            if response.status != 200:
                raise Unavailable(f"the server answers {response.status}: {await response.read_error()}")
            async for event in response.events():
                if text := turn.take(event):
                    write(text.translate(_CONTROL))


# -- the terminal ------------------------------------------------------------------------------------------------------


async def answer_stdin(conversation: Conversation) -> int:
    question = sys.stdin.read().strip()
    if not question:
        raise InvalidRequest("standard input is empty; pipe a prompt in, or run in a terminal", param="stdin")
    await conversation.ask(question, Turn(), _write)
    _write("\n")
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class Terminal:
    """Reads lines, shows answers as they come, obeys the slash commands."""

    def __init__(self, conversation: Conversation, console: Console) -> None:
        self._conversation = conversation
        self._console = console
        self._input = _line_editor()

    async def run(self) -> int:
        self._say(f"{self._conversation.model} · /help for commands, Ctrl-D to leave")
        while True:
            try:
                line = (await self._input.prompt_async("› ")).strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:  # clears the line
                continue
            if line in ("/exit", "/quit"):
                return 0
            if line.startswith("/"):
                await self._obey(line)
            elif line:
                await self._answer(line)

    async def _obey(self, line: str) -> None:
        command, _, text = line.partition(" ")
        conversation = self._conversation
        if command == "/help":
            self._say(HELP)
        elif command == "/clear":
            conversation.clear()
            self._say("starting over")
        elif command == "/system" and text.strip():
            conversation.system = text.strip()
            conversation.clear()
            self._say("system prompt set; starting over")
        elif command == "/system":
            self._say(conversation.system or "no system prompt")
        elif command == "/retry" and (question := conversation.take_back()) is not None:
            await self._answer(question)
        elif command == "/retry":
            self._say("nothing to retry yet")
        else:
            self._say(f"{command} is not a command; /help lists them")

    async def _answer(self, question: str) -> None:
        """Until it ends or Ctrl-C stops it. Errors are shown, and the conversation goes on."""
        turn = Turn()
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._conversation.ask(question, turn, _write))
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            await asyncio.wait([task])
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            task.cancel()
        if turn.text and not turn.text.endswith("\n"):
            _write("\n")
        if task.cancelled():
            self._say(f"stopped · {turn.speed()}")
        elif (error := task.exception()) is None:
            self._say(turn.speed())
        elif isinstance(error, PenstockError):
            self._say(error.message, style="red")
        else:
            raise error

    def _say(self, text: str, style: str = "dim") -> None:
        self._console.print(text, style=style, markup=False)


def _line_editor() -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    history: History
    try:
        folder = Path.home() / ".penstock"
        folder.mkdir(mode=0o700, exist_ok=True)
        history = FileHistory(str(folder / "chat_history"))
    except (OSError, RuntimeError):  # no home, or none that can be written to, costs the history and not the chat
        history = InMemoryHistory()
    return PromptSession(history=history, key_bindings=keys)
