"""Files and batches over HTTP, before a scripted engine: what OpenAI's client sees."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import threading
import time
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest

from penstock.batches.files import FILES
from penstock.batches.settings import BatchesConfig
from penstock.cli.main import main
from penstock.core.errors import EngineFailure, Failure, InvalidRequest
from penstock.core.request import GenerateRequest, SamplingParams
from penstock.gateway.settings import PriceConfig, ServerConfig, TenantConfig
from penstock.settings import Settings
from penstock.simulation.scripted_engine import MODEL, Action, hang
from penstock.text.tokenizer import Tokenizer
from tests.gateway.conftest import Gateway, serving
from tests.redis_server import RedisServer

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
SECONDS = 60.0  # a busy machine may take for what takes a moment


def settings_in(folder: Path, **batches: Any) -> Settings:
    return Settings(server=ServerConfig(max_body_mib=0.25), batches=BatchesConfig(folder=str(folder), **batches))


@pytest.fixture
def gateway(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Gateway]:
    with serving(tokenizer, settings_in(tmp_path)) as gateway:
        yield gateway


def line(custom_id: str, content: str = "Hi", url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in lines).encode()


def submitted(client: openai.OpenAI, content: bytes, **fields: Any) -> openai.types.Batch:
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    given: Any = {"endpoint": CHAT, "completion_window": "24h", **fields}
    return client.batches.create(input_file_id=file.id, **given)


def ended(client: openai.OpenAI, id: str) -> openai.types.Batch:
    deadline = time.monotonic() + SECONDS
    while (batch := client.batches.retrieve(id)).status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def lines_of(client: openai.OpenAI, file: str | None) -> dict[str, Any]:
    """By custom_id, each of which comes once."""
    assert file is not None
    found = [json.loads(text) for text in client.files.content(file).text.splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def test_openai_client_runs_a_batch(gateway: Gateway) -> None:
    client = gateway.client()
    batch = submitted(client, jsonl(*(line(f"l{n}") for n in range(20))), metadata={"night": "1"})
    assert batch.status == "validating"
    batch = ended(client, batch.id)
    assert (batch.status, batch.model, batch.metadata) == ("completed", MODEL, {"night": "1"})
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 20, "completed": 20, "failed": 0}
    answers = lines_of(client, batch.output_file_id)
    assert set(answers) == {f"l{n}" for n in range(20)}
    response = answers["l3"]["response"]
    assert response["status_code"] == 200
    assert response["body"]["choices"][0]["message"]["content"] == "Hello there, friend!"
    assert answers["l3"]["error"] is None
    assert batch.error_file_id is None
    assert [each.id for each in client.batches.list(limit=1)] == [batch.id]
    assert {request.objective.name for request in gateway.engine.requests} == {"batch"}


async def test_async_client_and_pages(gateway: Gateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        made = [
            (await client.files.create(file=(f"{n}.jsonl", jsonl(line("a"))), purpose="batch")).id for n in range(5)
        ]
        assert {file.id async for file in client.files.list(limit=2)} == set(made)
        batch = await client.batches.create(input_file_id=made[0], endpoint=CHAT, completion_window="24h")
        await asyncio.to_thread(ended, gateway.client(), batch.id)
        assert (await client.batches.retrieve(batch.id)).status == "completed"
        deleted = await client.files.delete(made[0])
        assert deleted.deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(made[0])


def test_bad_requests_go_to_the_error_file(gateway: Gateway) -> None:
    client = gateway.client()
    batch = ended(client, submitted(client, jsonl(line("good"), line("bad", temperature=-1))).id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 2, "completed": 1, "failed": 1}
    assert set(lines_of(client, batch.output_file_id)) == {"good"}
    (bad,) = lines_of(client, batch.error_file_id).values()
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["param"] == "temperature"


def test_a_file_with_mistakes_is_refused_by_line(gateway: Gateway) -> None:
    client = gateway.client()
    lines = [
        jsonl(line("a")),
        b"{not json}\n",
        b"\n",
        jsonl(line("a")),
        jsonl(line("b", url="/v1/embeddings")),
        jsonl({**line("c"), "method": "GET"}),
        jsonl(line("d", stream=True)),
        jsonl({**line("e"), "body": {"model": "another"}}),
        b'{"custom_id": "f", "url": "/v1/chat/completions"}\n',
        b'{"custom_id": "g", "url": "\xff"}\n',
        jsonl(line("h", background=True)),
    ]
    batch = ended(client, submitted(client, b"".join(lines)).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(error.line, error.code) for error in batch.errors.data or []] == [
        (2, "invalid_json_line"),
        (4, "duplicate_custom_id"),
        (5, "mismatched_url"),
        (6, "invalid_method"),
        (7, "unsupported_stream"),
        (8, "model_not_found"),
        (9, "invalid_line"),
        (10, "invalid_json_line"),
        (11, "unsupported_background"),
    ]
    assert ended(client, submitted(client, b"\n\n").id).errors.data[0].code == "empty_file"  # type: ignore[union-attr, index]
    long = submitted(client, jsonl(line("a", content="x" * 300_000)))
    assert ended(client, long.id).errors.data[0].code == "line_too_long"  # type: ignore[union-attr, index]


def test_what_fails_in_the_engine_is_tried_again_or_given_up(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.batches.decisions.FIRST_DELAY", 0.01)
    seen: dict[int, list[GenerateRequest]] = {}
    answer = gateway.engine.script

    def script(request: GenerateRequest) -> Any:
        attempts = seen.setdefault(len(request.prompt), [])
        attempts.append(request)
        hopeless = len(request.prompt) == max(seen) and len(seen) > 1
        if hopeless or len(attempts) == 1:
            return [Failure.of(EngineFailure("a step failed"))]
        return answer(request)

    gateway.runs(script)
    client = gateway.client()
    content = jsonl(line("once"), line("always", content="a much longer prompt"))
    batch = ended(client, submitted(client, content).id)
    assert set(lines_of(client, batch.output_file_id)) == {"once"}
    (given_up,) = lines_of(client, batch.error_file_id).values()
    assert given_up["response"]["status_code"] == 500
    for attempts in seen.values():
        assert len({request.seed for request in attempts}) == 1


@pytest.fixture(params=["sqlite", "redis"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Settings]:
    """Settings of servers that share files and batches."""
    if request.param == "sqlite":
        yield settings_in(tmp_path)
        return
    server = RedisServer()
    yield replace(settings_in(tmp_path), state=server.url)
    server.stop()


def test_a_server_that_is_started_again_goes_on(tokenizer: Tokenizer, kept: Settings) -> None:
    """From the tokens that a line had, and with its seed."""
    with serving(tokenizer, kept) as first:
        spoken = list(first.engine.script(GenerateRequest("x-0", [1], SamplingParams())))[:4]
        taken = threading.Event()

        async def hang_noticed() -> None:
            taken.set()
            await hang()

        first.runs(lambda request: [*spoken[:2], hang_noticed])
        batch = submitted(first.client(), jsonl(line("a", temperature=1.0)))
        assert taken.wait(SECONDS)
        (before,) = first.engine.requests
    with serving(tokenizer, kept) as second:
        eos = tokenizer.eos_ids[0]
        second.runs(lambda request: [*spoken[len(request.output) : 4], [eos]])
        client = second.client()
        answers = lines_of(client, ended(client, batch.id).output_file_id)
        (after,) = second.engine.requests
    assert after.seed == before.seed
    assert list(after.output) == [token for tokens in spoken[:2] for token in tokens]  # type: ignore[union-attr]
    body = answers["a"]["response"]["body"]
    whole = [token for tokens in spoken for token in tokens]  # type: ignore[union-attr]
    assert body["choices"][0]["message"]["content"] == tokenizer.decode(whole)
    assert body["usage"]["completion_tokens"] == len(whole) + 1


def test_lines_wait_for_a_spent_budget(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """There is a new one before the completion window is over."""
    settings = replace(
        settings_in(tmp_path),
        tenants={"poor": TenantConfig(budget_per_day=1e-9)},
        prices={MODEL: PriceConfig(input=1.0, output=1.0)},
    )
    with serving(tokenizer, settings) as gateway, gateway.http() as http:
        client = gateway.client(gateway.key("poor"))
        batch = submitted(client, jsonl(line("a"), line("b")))
        deadline, key = time.monotonic() + SECONDS, {"authorization": f"Bearer {gateway.key('')}"}
        while 'penstock_batch_lines_total{outcome="retried"} 2.0' not in http.get("/metrics", headers=key).text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        found = client.batches.retrieve(batch.id)
        assert found.status == "in_progress"
        assert found.request_counts is not None
        assert found.request_counts.failed == 0


def test_responses_of_lines_are_stored_if_they_say_so(gateway: Gateway) -> None:
    client = gateway.client()
    asked: dict[str, dict[str, Any]] = {
        "default": {},
        "null": {"store": None},
        "no": {"store": False},
        "yes": {"store": True},
    }
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/responses", "body": {"model": MODEL, "input": "Hi", **fields}}
        for name, fields in asked.items()
    ]
    batch = ended(client, submitted(client, jsonl(*lines), endpoint="/v1/responses").id)
    answers = {name: each["response"]["body"] for name, each in lines_of(client, batch.output_file_id).items()}
    assert {name: answer["store"] for name, answer in answers.items()} == {name: name == "yes" for name in asked}
    assert client.responses.retrieve(answers["yes"]["id"]).output_text == "Hello there, friend!"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answers["default"]["id"])


def test_cancelled_batches_keep_what_is_answered(gateway: Gateway) -> None:
    answer = gateway.engine.script
    first: list[str] = []

    def script(request: GenerateRequest) -> list[Action]:
        first.append(request.id)
        return list(answer(request)) if len(first) == 1 else [hang]

    gateway.runs(script)
    client = gateway.client()
    batch = submitted(client, jsonl(line("a"), line("b"), line("c")))
    deadline = time.monotonic() + SECONDS
    while (counts := client.batches.retrieve(batch.id).request_counts) is None or not counts.completed:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch.id)
    assert batch.status == "cancelled"
    assert len(lines_of(client, batch.output_file_id)) == 1
    errors = lines_of(client, batch.error_file_id).values()
    assert [each["error"]["code"] for each in errors] == ["batch_cancelled"] * 2
    with pytest.raises(openai.BadRequestError):
        client.batches.cancel(ended(client, submitted(client, b"\n").id).id)


def test_others_see_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    settings = Settings(tenants={"a": TenantConfig(), "b": TenantConfig()}, batches=BatchesConfig(folder=str(tmp_path)))
    with serving(tokenizer, settings) as gateway:
        mine, theirs = gateway.client(gateway.key("a")), gateway.client(gateway.key("b"))
        batch = submitted(mine, jsonl(line("x")))
        assert ended(mine, batch.id).status == "completed"
        assert {request.tenant for request in gateway.engine.requests} == {"a"}
        file = batch.input_file_id
        assert not theirs.files.list().data
        assert not theirs.batches.list().data
        for call in (
            lambda: theirs.files.retrieve(file),
            lambda: theirs.files.content(file),
            lambda: theirs.files.delete(file),
            lambda: theirs.batches.retrieve(batch.id),
            lambda: theirs.batches.cancel(batch.id),
            lambda: theirs.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                call()


@pytest.mark.parametrize("id", ["..%2f..%2fqueue.db", "file-..%2f..%2fx", "%00", "file-", "../queue.db", "x" * 5000])
def test_path_tricks_find_nothing(gateway: Gateway, id: str) -> None:
    with gateway.http() as http:
        for method, suffix in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            assert http.request(method, f"/v1/files/{id}{suffix}").status_code in (404, 405)
        body = {"input_file_id": "../" + id, "endpoint": CHAT, "completion_window": "24h"}
        assert http.post("/v1/batches", json=body).status_code == 404


def _multipart(boundary: str, *parts: str, end: bool = True) -> bytes:
    whole = "".join(f"--{boundary}\r\n{part}\r\n" for part in parts)
    return (whole + (f"--{boundary}--\r\n" if end else "")).encode()


PURPOSE = 'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
FILE = 'Content-Disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\n{}'


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("multipart/form-data", _multipart("b", PURPOSE, FILE), 400),
        ("multipart/form-data; boundary=b", b"nothing of the kind", 400),
        ("multipart/form-data; boundary=b", _multipart("b", PURPOSE, FILE, end=False), 400),
        ("multipart/form-data; boundary=b", _multipart("b", FILE), 400),
        ("multipart/form-data; boundary=b", _multipart("b", PURPOSE), 400),
        ("multipart/form-data; boundary=b", _multipart("b", PURPOSE, FILE, FILE), 400),
        ("multipart/form-data; boundary=b", _multipart("b", PURPOSE.replace("batch", "x" * 9000), FILE), 400),
        ("multipart/form-data; boundary=b", _multipart("b", *([PURPOSE] * 99), FILE), 200),
        ("multipart/form-data; boundary=b", _multipart("b", "X: " + "x" * 20_000 + "\r\n\r\n"), 400),
        ("multipart/form-data; boundary=b", _multipart("b", FILE, PURPOSE), 200),
    ],
)
def test_broken_uploads_are_refused_and_leave_nothing(
    gateway: Gateway, tmp_path: Path, kind: str, body: bytes, status: int
) -> None:
    with gateway.http() as http:
        answer = http.post("/v1/files", content=body, headers={"content-type": kind})
        assert answer.status_code == status, answer.text
        assert http.get("/v1/models").status_code == 200
    assert len(list((tmp_path / FILES).iterdir())) == (status == 200)


def test_uploads_have_limits(tokenizer: Tokenizer, tmp_path: Path) -> None:
    settings = settings_in(tmp_path, max_file_mib=1.0, max_files=2, max_lines=3)
    with serving(tokenizer, settings) as gateway:
        client = gateway.client()
        with pytest.raises(openai.APIStatusError) as refused:
            client.files.create(file=("x", b"x" * 1_200_000), purpose="batch")
        assert refused.value.status_code == 413

        def chunked() -> Iterator[bytes]:
            yield _multipart("b", PURPOSE, FILE, end=False)
            for _ in range(100):
                yield b"x" * 65_536

        with gateway.http() as http:
            form = {"content-type": "multipart/form-data; boundary=b"}
            answer = http.post("/v1/files", content=chunked(), headers=form)
            assert answer.status_code == 413
        many = submitted(client, jsonl(*(line(f"l{n}") for n in range(4))))
        errors = ended(client, many.id).errors
        assert errors is not None
        assert errors.data is not None
        assert errors.data[0].code == "too_many_lines"
        client.files.create(file=("x", b"x"), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="no more than 2"):
            client.files.create(file=("x", b"x"), purpose="batch")
        assert len(list((tmp_path / FILES).iterdir())) == 2


def test_a_large_file_passes_through_unchanged(gateway: Gateway) -> None:
    content = b"".join(b"%d %s\n" % (n, b"x" * 5000) for n in range(2000))
    client = gateway.client()
    file = client.files.create(file=("large", io.BytesIO(content)), purpose="batch")
    assert client.files.content(file.id).content == content
    with httpx.stream("GET", f"{gateway.url}/v1/files/{file.id}/content") as response:
        next(response.iter_bytes())  # and the client leaves
    assert client.files.retrieve(file.id).bytes == len(content)


def test_the_input_of_a_batch_that_runs_is_kept(gateway: Gateway) -> None:
    gateway.runs(lambda request: [hang])
    client = gateway.client()
    batch = submitted(client, jsonl(line("a")))
    with pytest.raises(openai.BadRequestError, match="cancel that first"):
        client.files.delete(batch.input_file_id)
    client.batches.cancel(batch.id)
    ended(client, batch.id)
    assert client.files.delete(batch.input_file_id).deleted


def test_contents_that_nobody_recorded_go_when_a_server_starts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Those of an upload that was killed between its last byte and its record."""
    settings = settings_in(tmp_path)
    with serving(tokenizer, settings) as gateway:
        file = gateway.client().files.create(file=io.BytesIO(b"{}\n"), purpose="batch")
    (folder,) = tmp_path.rglob(FILES)
    old, orphan, fresh = folder / file.id, folder / f"file-{'0' * 32}", folder / f"file-{'1' * 32}"
    for path in (orphan, fresh):
        path.write_bytes(b"{}\n")
    for path in (old, orphan):
        os.utime(path, (time.time() - 2 * 86400,) * 2)
    with serving(tokenizer, settings) as gateway:
        deadline = time.monotonic() + 20
        while orphan.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert gateway.client().files.content(file.id).content == b"{}\n"
        assert fresh.exists()


def test_without_a_folder_the_server_says_so(tokenizer: Tokenizer) -> None:
    with serving(tokenizer) as gateway, pytest.raises(openai.NotFoundError, match=r"batches\.folder"):
        gateway.client().files.create(file=("x", b"x"), purpose="batch")


def test_refused_for_good(gateway: Gateway) -> None:
    """What the engine itself refuses is the answer of the line."""
    gateway.runs(lambda request: [InvalidRequest("no such thing", param="grammar")])
    client = gateway.client()
    (refused,) = lines_of(client, ended(client, submitted(client, jsonl(line("a"))).id).error_file_id).values()
    assert refused["response"]["status_code"] == 400


def command(gateway: Gateway, *words: str) -> int:
    return main(["batch", *words, "--url", gateway.url])


def test_the_command_line(gateway: Gateway, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    requests, output, errors = (tmp_path / name for name in ("requests.jsonl", "answers.jsonl", "errors.jsonl"))
    requests.write_bytes(jsonl(line("a"), line("b", temperature=-1)))
    assert command(gateway, "submit", str(requests), "--wait") == 1
    shown = capfd.readouterr()
    id = shown.out.strip()
    assert "completed: 1 answered, 1 failed, of 2" in shown.err
    assert command(gateway, "fetch", id, "--output", str(output), "--errors", str(errors)) == 1
    assert json.loads(output.read_text())["custom_id"] == "a"
    assert json.loads(errors.read_text())["custom_id"] == "b"
    capfd.readouterr()
    assert command(gateway, "status", id) == 0
    assert json.loads(capfd.readouterr().out)["status"] == "completed"
    assert command(gateway, "list") == 0
    assert id in capfd.readouterr().out
    assert command(gateway, "cancel", id) == 1
    assert "cannot be cancelled" in capfd.readouterr().err
    submit = [sys.executable, "-m", "penstock.cli.main", "batch", "submit", "--wait", "--url", gateway.url]
    for file in ("-", "/dev/stdin"):  # a pipe, whose contents begin as files of some editors do
        piped = subprocess.run([*submit, file], input=BOM_UTF8 + b"\n" + jsonl(line("c")), capture_output=True)
        assert piped.returncode == 0, piped.stderr
        assert command(gateway, "fetch", piped.stdout.decode().strip()) == 0
        assert json.loads(capfd.readouterr().out)["custom_id"] == "c"
    requests.write_bytes(jsonl(line("d", temperature=-1)))
    assert command(gateway, "submit", str(requests), "--wait") == 1
    id = capfd.readouterr().out.strip()
    assert command(gateway, "fetch", id, "--output", str(output)) == 1
    assert output.read_bytes() == b"", "answers of an earlier batch"
    requests.write_bytes(b"{}\n")
    assert command(gateway, "submit", str(requests)) == 1
    assert "--endpoint" in capfd.readouterr().err
    requests.write_bytes(b"\n")
    assert command(gateway, "submit", str(requests)) == 1
    assert f"{requests} is empty" in capfd.readouterr().err
    requests.write_bytes(b"oops\n")
    assert command(gateway, "submit", str(requests), "--endpoint", CHAT, "--wait") == 1
    assert "line 1: invalid_json_line" in capfd.readouterr().err
