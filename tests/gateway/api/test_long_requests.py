"""Long requests are read in a process of their own: with the same results, and without anybody waiting for them."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.core.errors import ContextTooLong
from penstock.gateway.api.bounds import Bounds
from penstock.gateway.api.chat import ChatReader
from penstock.gateway.api.completions import CompletionReader
from penstock.gateway.api.reading import INLINE_BYTES, ModelText, Terms
from penstock.gateway.settings import ServerConfig
from penstock.settings import Settings
from penstock.simulation.scripted_engine import MAX_MODEL_LEN, MODEL
from penstock.text.tokenizer import Tokenizer
from tests.gateway.api.test_bad_input import check_error
from tests.gateway.conftest import Gateway, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = "It is a long way down to the harbour, and 12 steps back. "
JSON = {"Content-Type": "application/json"}
PADDING = " " * INLINE_BYTES  # between the tokens of JSON, so that a short request counts as a long one


@pytest.fixture(scope="module")
def roomy(tokenizer: Tokenizer) -> Iterator[Gateway]:
    with serving(tokenizer, Settings(server=ServerConfig(max_body_mib=16))) as gateway:
        yield gateway


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 5, **fields}


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat("Hi")),
    (CHAT, chat("Hi", seed=7, stop=["x"], logit_bias={"5": 1}, cache_salt="s", n=2)),
    (CHAT, {"model": MODEL, "messages": [{"role": "system", "content": "Be"}, {"role": "user", "content": "é中"}]}),
    (TEXT, {"model": MODEL, "prompt": ["Hello", "there"], "echo": True, "max_tokens": 3}),
    (TEXT, {"model": MODEL, "prompt": [[1, 2, 3], [4]], "max_tokens": 3}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_long_and_short_are_read_alike(gateway: Gateway, path: str, body: dict[str, Any]) -> None:
    answers = []
    with gateway.http() as http:
        for padding in ("", PADDING):
            response = http.post(path, content=json.dumps(body) + padding)
            assert response.status_code == 200, response.text
            answers.append(response.json()["choices"])
    assert answers[0] == answers[1]
    half = len(gateway.engine.requests) // 2
    short, long = gateway.engine.requests[:half], gateway.engine.requests[half:]
    for one, other in zip(short, long, strict=True):
        assert (one.prompt, one.params, one.cache_salt) == (other.prompt, other.params, other.cache_salt)


def test_what_is_wrong_is_named_all_the_same(gateway: Gateway) -> None:
    with gateway.http() as http:
        for change, status, param in (
            ({"messages": [{"role": "king", "content": "Hi"}]}, 400, "messages[0].role"),
            ({"temperature": -1}, 400, "temperature"),
            ({"model": "other"}, 404, "model"),
            ({"stop_token_ids": [5] * 50_000}, 400, "stop_token_ids"),
        ):
            check_error(http.post(CHAT, content=json.dumps({**chat("Hi"), **change}) + PADDING), status, param)
        check_error(http.post(CHAT, content=b"{" * 3000), 400, None)


def test_scores_of_prompts_are_bounded_over_all_choices(gateway: Gateway) -> None:
    prompts = [[100] * 400] * 64
    with gateway.http() as http:
        body = {"model": MODEL, "prompt": prompts, "max_tokens": 1, "echo": True}
        assert http.post(TEXT, json={**body, "logprobs": 9}).status_code == 200
        check_error(http.post(TEXT, json={**body, "logprobs": 10}), 400, "prompt_logprobs")
        check_error(http.post(TEXT, json={**body, "logprobs": 4, "n": 3}), 400, "prompt_logprobs")


HOSTILE = {
    "digits": chat("1" * 15_000_000),
    "prose": chat(WORDS * 14_000),
    "messages": {"model": MODEL, "messages": [{"role": "user", "content": "a"}] * 100_000},
    "token ids": {"model": MODEL, "prompt": [1] * 5_000_000},
    "arrays": chat("Hi", chat_template_kwargs={"x": [[]] * 3_000_000}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_can_never_fit_is_refused_without_work(tokenizer: Tokenizer, name: str) -> None:
    """In no more than a few times what decoding its JSON takes, where tokenising all of it took minutes."""
    body = json.dumps(HOSTILE[name]).encode()
    texts = {MODEL: ModelText(tokenizer)}
    reader = CompletionReader(texts) if "prompt" in HOSTILE[name] else ChatReader(texts)
    terms = Terms({MODEL: Bounds(MAX_MODEL_LEN - 1, MAX_MODEL_LEN, tokenizer.vocab_size)}, [MODEL])
    encoded = 0

    def count(text: str, **options: Any) -> list[int]:
        nonlocal encoded
        encoded += len(text) if options["at_most"] * tokenizer.max_token_bytes >= len(text) else 0
        return Tokenizer.encode(tokenizer, text, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "encode", count)
        with pytest.raises(ContextTooLong, match="tokens"):
            reader.read(body, terms)
    assert encoded <= MAX_MODEL_LEN * tokenizer.max_token_bytes


@contextmanager
def watched(loop: asyncio.AbstractEventLoop) -> Iterator[list[float]]:
    """How long the event loop waited for the GIL, or ran somebody else's work, each time it wanted to run."""
    late: list[float] = []
    done = threading.Event()

    async def watch() -> None:
        while not done.is_set():
            before = time.thread_time()
            await asyncio.sleep(0.001)
            late.append(time.thread_time() - before)

    watching = asyncio.run_coroutine_threadsafe(watch(), loop)
    try:
        yield late
    finally:
        done.set()
        watching.result(20)


@pytest.mark.parametrize("name", HOSTILE)
def test_nobody_waits_for_a_hostile_request(roomy: Gateway, name: str) -> None:
    """By the processor time of the event loop between two of its turns: what other processes take does not count."""
    body = json.dumps(HOSTILE[name]).encode()
    with roomy.http() as http, watched(roomy.loop) as late:
        response = http.post(TEXT if "prompt" in HOSTILE[name] else CHAT, content=body)
    error = check_error(response, 400, "prompt" if "prompt" in HOSTILE[name] else "messages")
    assert error["code"] == "context_length_exceeded"
    assert max(late) < 0.1, "it took seconds on the loop"
    assert roomy.engine.requests == []


def test_a_reader_that_dies_is_replaced(gateway: Gateway) -> None:
    body = json.dumps(chat("Hi")) + PADDING
    lane = gateway.edge.long_requests._lanes[0][1]
    with gateway.http() as http:
        assert http.post(CHAT, content=body).status_code == 200
        assert lane._process is not None
        os.kill(lane._process.pid, signal.SIGSTOP)
        waiting = threading.Thread(target=lambda: answers.append(http.post(CHAT, content=body)))
        answers: list[httpx.Response] = []
        waiting.start()
        os.kill(lane._process.pid, signal.SIGKILL)
        waiting.join(20)
        check_error(answers[0], 503, None)
        assert answers[0].headers["retry-after"]
        assert http.post(CHAT, content=body).status_code == 200


def test_a_reader_whose_gateway_ends_at_once_says_nothing() -> None:
    command = [sys.executable, "-m", "penstock.gateway.api.reader_process"]
    reader = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert (reader.returncode, reader.stdout, reader.stderr) == (0, b"", b"")


def test_a_reader_ends_with_its_gateway() -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.gateway.scripted_server", "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with server:
        assert server.stdout is not None
        with closing(HTTPConnection("127.0.0.1", int(server.stdout.readline()), timeout=20)) as connection:
            connection.request("POST", "/tokenize", json.dumps({"prompt": WORDS * 100}), JSON)
            assert connection.getresponse().status == 200
        (reader,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        ended = os.pidfd_open(int(reader))
        server.kill()
    assert select.select([ended], [], [], 20)[0], "it is still there"
    os.close(ended)


@contextmanager
def out_of_descriptors() -> Iterator[HTTPConnection]:
    """A server whose descriptors are all taken by connections, and one of these."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gateway.scripted_server", "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48)),
    )
    assert process.stdout is not None
    log = process.stderr
    assert log is not None
    port = int(process.stdout.readline())
    full = threading.Event()

    def watch() -> None:
        for line in log:
            if b"out of system resource" in line:
                full.set()

    watching = threading.Thread(target=watch)
    watching.start()
    with ExitStack() as stack:
        stack.callback(process.kill)
        first = stack.enter_context(closing(HTTPConnection("127.0.0.1", port, timeout=20)))
        first.request("GET", "/health")
        assert first.getresponse().read()
        for _ in range(48):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert full.wait(20)
        yield first
    process.wait()
    watching.join()


@pytest.mark.parametrize("padding", ["", PADDING], ids=["the chat template", "a long request"])
def test_running_out_of_file_descriptors_is_said_so(padding: str) -> None:
    """Of what needs a file at the first request: a module of Python's for the template, and pipes to the reader."""
    with out_of_descriptors() as connection:
        connection.request("POST", CHAT, json.dumps(chat("Hi")) + padding, JSON)
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
    assert response.status == 503, error
    assert "file descriptors" in error["message"]
    assert "ulimit -n" in error["message"]


@pytest.mark.parametrize("depth", [500, 700, 950])
def test_fields_that_are_nested_too_deeply_are_refused(roomy: Gateway, depth: int) -> None:
    """They would end the process that reads them, which hands on what it has read."""
    nested = '{"items":' * depth + "{}" + "}" * depth
    schema = f'"tools":[{{"type":"function","function":{{"name":"f","parameters":{nested}}}}}]'
    with roomy.http() as http:
        for field, name in ((f'"guided_json":{nested}', "guided_json"), (schema, None)):
            body = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"Hi"}}],{field}}}{PADDING}'
            answer = http.post(CHAT, content=body.encode(), headers=JSON)
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 400 and name:
                check_error(answer, 400, name)
