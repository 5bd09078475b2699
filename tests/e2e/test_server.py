"""`penstock serve` as its users run it: many clients at once, a worker that dies, a clean end."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.conftest import Server, start_server

MODEL = "smollm2-135m"


def worker_pid(server: Server) -> int:
    listing = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True, check=True)
    return int(listing.stdout.split()[0])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


async def test_two_hundred_streams_finish(server: Server) -> None:
    client = openai.AsyncOpenAI(base_url=server.base_url, api_key="none", timeout=250, max_retries=0)

    async def stream(number: int) -> tuple[int, str | None]:
        chunks = await client.completions.create(
            model=MODEL,
            prompt=f"Number {number} is",
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        tokens, reason = 0, None
        async for chunk in chunks:
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
            elif chunk.choices[0].finish_reason is not None:
                reason = chunk.choices[0].finish_reason
        return tokens, reason

    results = await asyncio.gather(*(stream(number) for number in range(200)))
    assert results == [(8, "length")] * 200


def test_models_say_how_they_sample(server: Server) -> None:
    with httpx.Client(base_url=server.base_url) as http:
        (card,) = http.get("/models").json()["data"]
    assert (card["sampling_defaults"]["temperature"], card["sampling_defaults"]["top_p"]) == (0.2, 0.9)


def test_streams_outlive_the_only_worker() -> None:
    server = start_server("--kv-memory-gib", "0.2", "--max-model-len", "2048")
    try:
        client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=60)

        def stream() -> openai.Stream[openai.types.Completion]:
            return client.completions.create(
                model=MODEL, prompt="Go on", max_tokens=300, seed=1, stream=True, extra_body={"ignore_eos": True}
            )

        undisturbed = "".join(chunk.choices[0].text for chunk in stream())
        disturbed = stream()
        text = next(disturbed).choices[0].text
        os.kill(worker_pid(server), signal.SIGKILL)
        # A request that comes meanwhile waits for the next worker.
        answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2
        assert text + "".join(chunk.choices[0].text for chunk in disturbed) == undisturbed
        with httpx.Client(base_url=server.url, timeout=60) as http:
            assert http.get("/health").status_code == 200
    finally:
        pid = worker_pid(server)
        server.stop()
        assert not is_alive(pid)


def test_a_frozen_worker_is_replaced_and_a_suspended_machine_is_left_alone() -> None:
    server = start_server("--kv-memory-gib", "0.2", "--max-model-len", "8192")
    try:
        client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=60)
        stream = client.completions.create(
            model=MODEL, prompt="Go on", max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        frozen = worker_pid(server)
        for pid in (frozen, server.process.pid):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(4)  # twice as long as a worker may be silent
        for pid in (server.process.pid, frozen):
            os.kill(pid, signal.SIGCONT)
        for _ in range(50):
            next(stream)
        assert worker_pid(server) == frozen
        end = os.pidfd_open(frozen)
        os.kill(frozen, signal.SIGSTOP)
        assert select.select([end], [], [], 60)[0], "it was not killed"
        os.close(end)
        for _ in range(50):
            next(stream)
    finally:
        server.stop()
    assert [line for line in server.log if "was lost: nothing heard from it for 0.5 s; starting another" in line]


def test_a_killed_gateway_takes_its_worker_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = start_server("--kv-memory-gib", "0.2")
    pid = worker_pid(server)
    end = os.pidfd_open(pid)
    server.process.kill()
    server.process.wait()
    assert select.select([end], [], [], 60)[0], "the worker outlived its gateway"
    os.close(end)
    assert not list(tmp_path.iterdir()), "something stayed on disk"


def test_a_server_with_tenants_wants_keys_and_keeps_accounts(tmp_path: Path) -> None:
    def penstock(*arguments: str) -> str:
        command = [sys.executable, "-m", "penstock.cli.main", *arguments, "--state", state]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    state, settings = f"sqlite:///{tmp_path}/state.db", tmp_path / "penstock.yaml"
    tenants = {"acme": {"tokens_per_minute": 1000, "default_class": "batch"}}
    settings.write_text(json.dumps({"tenants": tenants, "prices": {MODEL: {"input": 1}}}))  # is YAML too
    key = penstock("keys", "create", "acme").strip()
    server = start_server("--kv-memory-gib", "0.2", "--config", str(settings), "--state", state)
    try:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=server.base_url, api_key="sk-wrong", max_retries=0).models.list()
        client = openai.OpenAI(base_url=server.base_url, api_key=key, max_retries=0, timeout=60)
        answer = client.completions.with_raw_response.create(model=MODEL, prompt="Hello", max_tokens=2)
        usage = answer.parse().usage
        assert usage is not None
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) == 1000 - usage.prompt_tokens - 2
    finally:
        server.stop()
    assert [line for line in server.log if "tenant=acme class=batch" in line]
    _, *row, cost = penstock("usage", "--csv").splitlines()[1].split(",")
    assert row == ["acme", MODEL, "1", str(usage.prompt_tokens), "0", "2"]
    assert float(cost) == usage.prompt_tokens / 1e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "no model found for 'no-such-model'"),
        (["--max-model-len", "1000000"], "lower max_model_len"),
        (["--config", "/does/not/exist.yaml"], "cannot read"),
        (["--host", "0.0.0.0"], "no tenant is configured: create a key"),
        (["--kv-memory-gib", "-1"], "kv_memory_gib must be above 0"),
    ],
)
def test_a_server_that_cannot_start_says_why_and_exits(arguments: list[str], message: str) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        start_server(*arguments)
    assert "exit code 1" in str(caught.value)
    assert "Traceback" not in str(caught.value)
