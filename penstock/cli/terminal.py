"""The terminal's side of `penstock chat`: lines in, answers out as they come, slash commands."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Protocol

from penstock.cli.conversation import PARAMETERS, Conversation, Turn, parse_parameter
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.machine import state_folder
from penstock.core.suggest import did_you_mean

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from rich.console import Console

HELP = """\
/clear            start over, keeping the system prompt (also /reset)
/system TEXT      set the system prompt and start over; without TEXT, show it
/set NAME VALUE   set a sampling parameter, as in /set temperature 0.5; VALUE "default" leaves it to the server;
                  without NAME, show them all
/retry            ask again for the last answer
/exit             leave (so does Ctrl-D)
Ctrl-C stops an answer. Alt-Enter starts a new line."""
COMMANDS = ("/help", "/clear", "/reset", "/system", "/set", "/retry", "/exit", "/quit")
FRAMES_PER_SECOND = 12


class Shown(Protocol):
    """Shows one answer on the screen."""

    def write(self, text: str) -> None: ...

    def close(self) -> None: ...


class PlainAnswer:
    """Prints the raw text as it arrives, for pipes and for `--plain`."""

    def __init__(self) -> None:
        self._last = "\n"

    def write(self, text: str) -> None:
        self._last = text[-1:] or self._last
        sys.stdout.write(text)
        sys.stdout.flush()

    def close(self) -> None:
        if self._last != "\n":
            self.write("\n")


class MarkdownAnswer:
    """A block is rendered once it is complete; until then its text is shown as it comes."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, transient=True, refresh_per_second=FRAMES_PER_SECOND)
        self._live.start()
        self._text = ""
        self._printed = False

    def write(self, text: str) -> None:
        from rich.text import Text

        done, self._text = complete_blocks(self._text + text)
        rows = max(1, self._console.height - 2)
        self._live.update(Text("\n".join(self._text.splitlines()[-rows:])))
        self._print(done)  # after: the live text is drawn again below what is printed

    def close(self) -> None:
        self._live.stop()
        self._print(self._text)

    def _print(self, text: str) -> None:
        from rich.markdown import Markdown

        if text.strip():
            if self._printed:
                self._console.print()
            self._console.print(Markdown(text, hyperlinks=False))  # a link would hide where it leads
            self._printed = True


def complete_blocks(text: str) -> tuple[str, str]:
    """What nothing that follows can change, and the rest. An empty line ends a block, unless it stands in code or an
    indented line follows."""
    end = fences = start = 0
    while (line_end := text.find("\n", start)) >= 0:
        line = text[start:line_end]
        fences += line.lstrip().startswith(("```", "~~~"))
        start = line_end + 1
        if not line.strip() and fences % 2 == 0 and text[start : start + 1].strip():
            end = start
    return text[:end], text[end:]


class Terminal:
    """Reads lines, shows answers as they come, obeys the slash commands."""

    def __init__(self, conversation: Conversation, console: Console, *, plain: bool = False) -> None:
        self._conversation = conversation
        self._console = console
        self._plain = plain or not console.is_terminal or console.is_dumb_terminal
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
        elif command in ("/clear", "/reset"):
            conversation.clear()
            self._say("starting over")
        elif command == "/system" and text.strip():
            conversation.system = text.strip()
            conversation.clear()
            self._say("system prompt set; starting over")
        elif command == "/system":
            self._say(conversation.system or "no system prompt")
        elif command == "/set":
            self._set(*text.split(maxsplit=1))
        elif command == "/retry" and (question := conversation.take_back()) is not None:
            await self._answer(question)
        elif command == "/retry":
            self._say("nothing to retry yet")
        else:
            self._say(f"{command} is not a command{did_you_mean(command, COMMANDS)}; /help lists them")

    def _set(self, name: str = "", value: str = "") -> None:
        parameters = self._conversation.parameters
        try:
            if value == "default" and name in PARAMETERS:
                parameters.pop(name, None)
            elif name and (value or name not in PARAMETERS):
                parameters[name] = parse_parameter(name, value)
        except InvalidRequest as error:
            self._say(error.message, style="red")
            return
        for known in [name] if name else PARAMETERS:
            self._say(f"{known} {parameters.get(known, 'default')}")

    async def _answer(self, question: str) -> None:
        """Show an answer until it ends or Ctrl-C stops it. After an error the conversation goes on."""
        turn = Turn(shows_reasoning=True)
        shown: Shown = PlainAnswer() if self._plain else MarkdownAnswer(self._console)
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._conversation.ask(question, turn, shown.write))
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            await asyncio.wait([task])
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            task.cancel()
            shown.close()
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
        file = state_folder() / "chat_history"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        history = FileHistory(str(file))
    except OSError:  # a home that cannot be written to costs the history and not the chat
        history = InMemoryHistory()
    return PromptSession(history=history, key_bindings=keys)
