from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from penstock.cli import chat
from penstock.cli.conversation import Turn
from penstock.cli.main import make_parser
from penstock.cli.terminal import complete_blocks
from penstock.core.errors import Unauthorized
from tests.bench.scripted_server import ScriptedServer

CHAT = [sys.executable, "-m", "penstock.cli.main", "chat"]
CTRL_C, CTRL_D = "\x03", "\x04"


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with an empty home and a terminal that answers no cursor queries. The terminal says how
    wide it is: readline, once imported, has its own idea and puts it into the environment."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    own = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"), "PENSTOCK_API_KEY": "psk-mine"}
    return {**inherited, **own, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}


@pytest.mark.parametrize(("shows", "expected"), [(True, "So. I see.\n\n---\n\nHello!"), (False, "Hello!")])
def test_reasoning_is_shown_before_the_answer_and_is_no_part_of_it(shows: bool, expected: str) -> None:
    turn, shown = Turn(shows_reasoning=shows), ""
    for delta in (
        {"role": "assistant", "content": None},
        {"reasoning_content": "So."},
        {"reasoning_content": " I see."},
    ):
        shown += turn.take(json.dumps({"choices": [{"delta": delta}]}))
    for text in ("Hel", "lo!"):
        shown += turn.take(json.dumps({"choices": [{"delta": {"content": text}}]}))
    assert (shown, turn.text, turn.chunks) == (expected, "Hello!", 4)


@pytest.fixture
def terminal(scripted: ScriptedServer, home: dict[str, str]) -> Iterator[pexpect.spawn]:
    command = [*CHAT[1:], "--url", scripted.url, "--system", "Be brief.", "--max-tokens", "99"]
    child = pexpect.spawn(CHAT[0], command, env=home, encoding="utf-8", timeout=60, dimensions=(24, 200))
    child.expect("scripted · /help")
    yield child
    scripted.release.set()
    child.close(force=True)


def say(terminal: pexpect.spawn, keys: str) -> None:
    """Once it listens: what is typed before, the terminal itself would interpret."""
    terminal.expect("›")
    terminal.send(keys)


def enter(terminal: pexpect.spawn, line: str) -> None:
    say(terminal, line + "\r")


def test_a_conversation_with_commands(terminal: pexpect.spawn, scripted: ScriptedServer) -> None:
    enter(terminal, "first")
    terminal.expect(re.escape("turn 1: system=Be brief. | user=first"))
    terminal.expect(r"2 tokens · .*tok/s · first after \d+ ms")
    enter(terminal, "second")
    terminal.expect(re.escape("user=first | assistant=turn 1: system=Be brief. | user=first | user=second"))
    enter(terminal, "/retry")
    terminal.expect("turn 3: .*user=second")
    enter(terminal, "/system Rhyme.")
    terminal.expect("starting over")
    enter(terminal, "third")
    terminal.expect(re.escape("turn 4: system=Rhyme. | user=third"))
    enter(terminal, "/clear")
    terminal.expect("starting over")
    enter(terminal, "/retry")
    terminal.expect("nothing to retry")
    enter(terminal, "/bogus")
    terminal.expect("/bogus is not a command")
    say(terminal, CTRL_D)
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
    assert [len(body["messages"]) for body in scripted.bodies] == [2, 4, 4, 2]  # a retry replaces, it does not add
    assert scripted.bodies[0]["max_tokens"] == 99
    assert scripted.headers_seen[0]["authorization"] == "Bearer psk-mine"


def test_parameters_are_set_shown_and_checked(terminal: pexpect.spawn, scripted: ScriptedServer) -> None:
    enter(terminal, "/set temperature 0.5")
    terminal.expect("temperature 0.5")
    enter(terminal, "/set")
    for shown in ("temperature 0.5", "top_p default", "max_tokens 99"):
        terminal.expect(re.escape(shown))
    for line, complaint in (
        ("/set temperature hot", "temperature must be a number, not 'hot'"),
        ("/set top_p 2", "top_p must be above 0 and at most 1"),
        ("/set temprature 1", r"temprature is not a parameter \(did you mean temperature\?\)"),
        ("/sett", r"/sett is not a command \(did you mean /set\?\)"),
    ):
        enter(terminal, line)
        terminal.expect(complaint)
    enter(terminal, "/set max_tokens default")
    terminal.expect("max_tokens default")
    enter(terminal, "hello")
    terminal.expect(r"\d+ tokens")
    (body,) = scripted.bodies
    assert body["temperature"] == 0.5
    assert not {"top_p", "temprature", "max_tokens"} & set(body)


def test_markdown_is_rendered(terminal: pexpect.spawn) -> None:
    enter(terminal, "markdown")
    terminal.expect(r"Some \x1b\[1mbold\x1b\[0m text")
    terminal.expect(r" • \S*one")
    terminal.expect(r"\d+ tokens")


def test_questions_are_remembered(scripted: ScriptedServer, home: dict[str, str]) -> None:
    command = [*CHAT[1:], "--url", scripted.url, "--plain"]
    for keys in ("remember me\r", "\x1b[A\r"):  # the second time: arrow up
        child = pexpect.spawn(CHAT[0], command, env=home, encoding="utf-8", timeout=60, dimensions=(24, 200))
        say(child, keys)
        child.expect("turn .*user=remember me")
        say(child, CTRL_D)
        child.expect(pexpect.EOF)
        child.close()
    assert len(scripted.bodies) == 2
    history = Path(home["XDG_STATE_HOME"]) / "penstock/chat_history"
    assert history.stat().st_mode & 0o777 == 0o600


@given(st.text(st.sampled_from("ab \n`"), max_size=60), st.integers(0, 60))
def test_a_block_is_shown_once_nothing_can_change_it(text: str, cut: int) -> None:
    done, rest = complete_blocks(text)
    assert done + rest == text
    assert done.startswith(complete_blocks(text[:cut])[0])


async def test_a_running_server_is_used_unless_told_otherwise(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    monkeypatch.delenv("PENSTOCK_URL", raising=False)
    monkeypatch.setattr(chat, "DEFAULT_URL", scripted.url)

    async def find(*words: str) -> str | None:
        return await chat.find_server(make_parser().parse_args(["chat", *words]), Console(file=shown))

    assert await find() == scripted.url
    assert "talking to the server at" in shown.getvalue()
    assert await find("--local") is None
    assert await find("some-model") is None
    assert await find("some-model", "--url", "http://elsewhere") == "http://elsewhere"
    scripted.fail_with = 401
    with pytest.raises(Unauthorized, match=r"(?s)scripted failure.*PENSTOCK_API_KEY.*--local"):
        await find()
    scripted.fail_with = 404
    assert await find() is None, "whatever listens there does not speak this API"
    monkeypatch.setattr(chat, "DEFAULT_URL", "http://127.0.0.1:9")
    assert await find() is None
    monkeypatch.setenv("PENSTOCK_URL", scripted.url)
    assert await find() == scripted.url


def test_ctrl_c_stops_the_answer_and_not_the_chat(terminal: pexpect.spawn, scripted: ScriptedServer) -> None:
    enter(terminal, "wait")
    terminal.expect("waiting ")
    terminal.send(CTRL_C)
    terminal.expect("stopped · 1 token ")
    assert scripted.dropped.wait(20), "the server was not told that the reader left"
    enter(terminal, "again")
    terminal.expect(re.escape("user=wait | assistant=waiting  | user=again"))  # what was read is remembered
    enter(terminal, "/exit")
    terminal.expect(pexpect.EOF)


def test_an_error_is_shown_and_the_chat_goes_on(terminal: pexpect.spawn, scripted: ScriptedServer) -> None:
    scripted.fail_with = 400
    enter(terminal, "too much")
    terminal.expect("400: scripted failure")
    scripted.fail_with = None
    enter(terminal, "/retry")
    terminal.expect(re.escape("turn 2: system=Be brief. | user=too much"))


def test_output_cannot_drive_the_terminal(terminal: pexpect.spawn) -> None:
    enter(terminal, "attack")
    terminal.expect(r"\]0;ownedharmless é2J")
    assert "\x1b]0;owned" not in terminal.before + terminal.after


def test_piped_input_is_one_prompt_and_only_the_answer_is_output(
    scripted: ScriptedServer, home: dict[str, str]
) -> None:
    command = [*CHAT, "--url", scripted.url, "--temperature", "0"]
    done = subprocess.run(command, input="two\nlines\n", env=home, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "turn 1: user=two\nlines\n", "")
    assert scripted.bodies[0]["temperature"] == 0


def test_a_url_that_does_not_answer_is_a_clear_error(home: dict[str, str]) -> None:
    command = [*CHAT, "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, input="hello", env=home, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "cannot connect to http://127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_cannot_be_served_shows_why(home: dict[str, str]) -> None:
    done = subprocess.run(
        [*CHAT, "/no/such/model"], input="hello", env=home, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "/no/such/model" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_server_it_starts_ends_with_it(home: dict[str, str], tiny_model: Path) -> None:
    """Even when the terminal goes away: an orphan would hold the model's memory for ever."""
    child = pexpect.spawn(
        CHAT[0],
        [*CHAT[1:], f"dummy:{tiny_model}", "--max-tokens", "8"],
        env=home,
        encoding="utf-8",
        timeout=60,
        dimensions=(24, 200),
    )
    child.expect("tiny · /help for commands")
    enter(child, "hello")
    child.expect(r"\d+ tokens")
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
    (server,) = [int(pid) for pid in children.read_text().split()]
    workers = [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]
    assert workers
    child.kill(signal.SIGHUP)
    child.expect(pexpect.EOF)
    child.wait()
    assert [pid for pid in (server, *workers) if Path(f"/proc/{pid}").exists()] == []


def test_piped_text_need_not_be_utf8_and_nobody_need_read_the_answer(
    scripted: ScriptedServer, home: dict[str, str]
) -> None:
    command = [*CHAT, "--url", scripted.url]
    answered = subprocess.run(command, input=b"caf\xe9", capture_output=True, env=home, timeout=60)
    assert (answered.returncode, answered.stderr) == (0, b"")
    assert scripted.bodies[-1]["messages"][-1]["content"] == "caf�"
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(command, input=b"Hi", stdout=writing, stderr=subprocess.PIPE, env=home, timeout=60)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")
    with Path("/dev/full").open("wb") as full:
        failed = subprocess.run(command, input=b"Hi", stdout=full, stderr=subprocess.PIPE, env=home, timeout=60)
    assert (failed.returncode, failed.stderr) == (1, b"penstock: standard output: No space left on device\n")
