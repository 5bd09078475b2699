from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest

from penstock.bench.report import error_lines
from penstock.bench.serve import Load, closed_loop, measure, open_loop
from penstock.bench.server import Call, Server, connect
from penstock.bench.workloads import Job, uniform_workload
from penstock.cli.main import main
from penstock.client.http import HttpClient
from penstock.core.errors import Unavailable
from tests.bench.scripted_server import ScriptedServer


def bench(server: ScriptedServer, folder: Path, *options: str) -> dict[str, Any]:
    file = folder / "report.json"
    assert main(["bench", "serve", "--url", server.url + "/v1", "--json", str(file), *options]) == 0
    report: dict[str, Any] = json.loads(file.read_text())
    return report


@pytest.mark.parametrize("chat", [False, True])
def test_closed_loop_counts_tokens_by_usage(
    scripted: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], chat: bool
) -> None:
    scripted.tokens_per_chunk = 2
    shape = ["--prompt-tokens", "41", "--output-tokens", "6", "--concurrency", "3", "--requests", "7"]
    if chat:
        scripted.answer = lambda body: ["word "] * body["max_tokens"]  # type: ignore[method-assign]
    report = bench(scripted, tmp_path, *shape, *["--chat"] * chat)
    (result,) = report["results"]
    assert (result["requests"], result["output_tokens"], result["errors"]) == (7, 42, {})
    assert result["prompt_tokens"] == 7 * 41  # the server counts two tokens a word and a few more; that was learnt
    assert result["gap_ms"]["p50"] > 0
    assert report["model"] == "scripted"
    body = scripted.bodies[-1]
    assert (body["temperature"], body["ignore_eos"], body["max_tokens"]) == (0, True, 6)
    assert "uniform" in capsys.readouterr().out


def test_progress_is_shown_on_a_terminal_and_nowhere_else(scripted: ScriptedServer) -> None:
    scripted.answer = lambda body: (["waiting "] if body["max_tokens"] > 2 else []) + ["word "]  # type: ignore[method-assign]
    command = ["-m", "penstock.cli.main", "bench", "serve", "--url", scripted.url, "--workload", "cpu_clients8"]
    child = pexpect.spawn(sys.executable, command, encoding="utf-8", timeout=60, dimensions=(24, 200))
    child.expect(r"cpu_clients8: 0 of 16 requests, 0\.0/s, \d+ s")
    scripted.release.set()
    child.expect(r"cpu_clients8: [\d,]+ output tok/s")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    piped = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60)
    assert " of 16 requests" not in piped.stderr
    assert len(piped.stderr.splitlines()) == 1


def test_results_of_other_machines_are_shown_on_request_only(
    scripted: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "smollm2-135m", "--workload", "cpu_clients8"]
    assert "target" not in bench(scripted, tmp_path, *options)["results"][0]
    assert "goal" not in capsys.readouterr().out
    target = bench(scripted, tmp_path, *options, "--targets")["results"][0]["target"]
    assert "Zen 4" in target["measured"]
    shown = capsys.readouterr().out
    assert "goal*" in shown
    assert "* not measured here, but on two Zen 4 cores" in shown
    assert "2026" in shown


def test_ignore_eos_is_dropped_for_a_server_that_refuses_it(scripted: ScriptedServer, tmp_path: Path) -> None:
    scripted.refuses_ignore_eos = True
    report = bench(scripted, tmp_path, "--requests", "2")
    assert report["ignore_eos"] is False
    assert report["results"][0]["errors"] == {}


def test_without_usage_chunks_are_counted(scripted: ScriptedServer, tmp_path: Path) -> None:
    scripted.reports_usage = False
    (result,) = bench(scripted, tmp_path, "--requests", "2", "--output-tokens", "5")["results"]
    assert (result["prompt_tokens"], result["output_tokens"]) == (256, 10)


def test_shared_prefixes_stay_shared_as_text(scripted: ScriptedServer, tmp_path: Path) -> None:
    bench(scripted, tmp_path, "--workload", "cpu_prefix")
    prompts = [body["prompt"].split() for body in scripted.bodies[-32:]]
    assert len({tuple(prompt[:382]) for prompt in prompts}) == 1  # of 398: 800 tokens, 768 of them shared
    assert len({tuple(prompt) for prompt in prompts}) == 32


def test_two_workloads_of_one_run_share_no_beginning(scripted: ScriptedServer, tmp_path: Path) -> None:
    bench(scripted, tmp_path, "--workload", "cpu_single,cpu_prefill", "--prompts", "ids", "--seed", "4")
    single, prefill = (body["prompt"] for body in scripted.bodies[-2:])
    assert single[:4] != prefill[:4]


async def test_closed_loop_keeps_its_clients_busy_and_no_more(scripted: ScriptedServer) -> None:
    scripted.hold_until = 3  # no answer ends before three are under way
    async with HttpClient(scripted.url, timeout=20) as http:
        timelines = await closed_loop(Server(http, "scripted"), [Call("some words", Job([1], 2))] * 8, clients=3)
    assert [t.error for t in timelines] == [None] * 8
    assert scripted.most_in_flight == 3


async def test_open_loop_sends_without_waiting_for_answers(scripted: ScriptedServer) -> None:
    scripted.hold_until = 5  # an answer ends only once all five were sent
    calls = [Call("some words", Job([1], 2, arrival=0.005 * i)) for i in range(5)]
    async with HttpClient(scripted.url, timeout=20) as http:
        timelines = await open_loop(Server(http, "scripted"), calls, {})
    assert [t.error for t in timelines] == [None] * 5


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ({"fail_with": 500}, "http 500", "scripted failure"),
        ({"error_event": True}, "in stream", "the engine tripped"),
    ],
)
async def test_failures_are_counted_by_kind_and_add_no_tokens(
    scripted: ScriptedServer, fault: dict[str, Any], kind: str, message: str
) -> None:
    async with HttpClient(scripted.url) as http:
        server = await connect(http, None, chat=False, seed=0)
        for name, value in fault.items():
            setattr(scripted, name, value)
        result = await measure(server, uniform_workload(8, 4, count=3, clients=2), Load(seed=0))
    assert result.summary.errors == {kind: 3}
    assert error_lines([result]) == [f"uniform: {kind}, 3 times; the first one: {message}"]
    assert (result.summary.output_tokens, result.summary.ttft_ms) == (0, None)


def test_a_class_that_the_server_does_not_know_ends_the_run_before_it_begins(
    scripted: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.unknown_class = "foo"
    options = ["--workload", "slo_mix", "--mix", "a=0.5,foo=0.5", "--rate", "50", "--seconds", "60"]
    assert main(["bench", "serve", "--url", scripted.url, *options]) == 1
    assert "x-penstock-class cannot be 'foo'" in capsys.readouterr().err


async def test_refusals_are_counted_apart_with_their_retry_after(scripted: ScriptedServer) -> None:
    async with HttpClient(scripted.url) as http:
        server = await connect(http, None, chat=False, seed=0)
        scripted.fail_with, scripted.headers = 429, {"Retry-After": "7"}
        result = await measure(server, uniform_workload(8, 4, count=3, clients=2), Load(seed=0))
    summary = result.summary
    assert (summary.refused, summary.errors, summary.output_tokens) == (3, {}, 0)
    assert summary.retry_after_s is not None
    assert summary.retry_after_s.p50 == 7
    assert summary.refusal_ms is not None


def test_classes_are_named_to_the_server_and_judged_apart(scripted: ScriptedServer, tmp_path: Path) -> None:
    options = ["--rate", "40", "--seconds", "1", "--seed", "3", "--output-tokens", "3"]
    options += ["--mix", "interactive=0.8,batch=0.2", "--objectives", "interactive=0.001/5000,batch=-/-"]
    (result,) = bench(scripted, tmp_path, *options)["results"]
    named = [headers["x-penstock-class"] for headers in scripted.headers_seen if "x-penstock-class" in headers]
    classes = result["classes"]
    # Each is asked for once before.
    assert {name: named.count(name) - 1 for name in classes} == {name: c["requests"] for name, c in classes.items()}
    assert classes["batch"]["met"] == classes["batch"]["requests"] > 0  # nothing was promised, all was answered
    assert classes["interactive"]["met"] == 0  # a microsecond
    assert result["share_met"] == pytest.approx(classes["batch"]["met"] / result["requests"])


def test_classes_are_judged_by_what_the_server_promises(scripted: ScriptedServer, tmp_path: Path) -> None:
    promised = {"ttft_ms": 0.001, "itl_ms": 5000.0}
    scripted.card = {"classes": {"interactive": promised, "batch": {"ttft_ms": None, "itl_ms": None}}}
    options = ["--rate", "40", "--seconds", "1", "--seed", "3", "--output-tokens", "3"]
    (result,) = bench(scripted, tmp_path, *options, "--mix", "interactive=0.8,batch=0.2")["results"]
    classes = result["classes"]
    assert classes["batch"]["met"] == classes["batch"]["requests"] > 0
    assert classes["interactive"]["met"] == 0


def test_a_trace_is_sent_as_written(scripted: ScriptedServer, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"at": 5.02, "prompt": "as it is", "output_tokens": 2, "class": "batch"},
        {"at": 5.0, "prompt_tokens": 41, "output_tokens": 3},
        {"at": 5.01, "messages": [{"role": "user", "content": "hello"}], "output_tokens": 4, "tenant": "acme"},
    ]
    file = tmp_path / "day.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    (result,) = bench(scripted, tmp_path, "--trace", str(file), "--api-key", "k0", "--tenant-key", "acme=k1")["results"]
    # By length: sent milliseconds apart, they may arrive in any order.
    text, words, chat = sorted(scripted.bodies[-3:], key=lambda body: body["max_tokens"])
    assert [body["max_tokens"] for body in (words, chat, text)] == [3, 4, 2]
    assert (chat["messages"], text["prompt"]) == (lines[2]["messages"], "as it is")
    assert [timeline["sent"] for timeline in result["timelines"]] == pytest.approx([0.0, 0.01, 0.02])
    seen = [headers.get("x-penstock-class") for headers in scripted.headers_seen]
    assert seen.count("batch") == 1 + 1  # it is asked for once before
    assert [headers["authorization"] for headers in scripted.headers_seen].count("Bearer k1") == 1
    assert result["timelines"][0]["prompt_tokens"] == 41


def test_capacity_search_prints_its_answer_and_stops_hopeless_probes(
    scripted: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--find-capacity", "--rate", "40", "--output-tokens", "2", "--mix", "chat=1"]
    kept = ["--objectives", "chat=20000/20000", "--probes", "2", "--seconds", "1"]
    report = bench(scripted, tmp_path, *options, *kept)
    assert [result["rate"] for result in report["results"]] == [40, 80]
    assert report["capacity"] == {"uniform": 80}
    assert "up to 80 arrivals a second" in capsys.readouterr().out
    hopeless = ["--objectives", "chat=0.001/-", "--seconds", "20"]  # as long as the first answers may take
    report = bench(scripted, tmp_path, *options, *hopeless, "--html", str(tmp_path / "r.html"))
    assert report["capacity"] == {"uniform": None}
    assert [result["rate"] for result in report["results"]] == [40, 20, 10, 5, 2.5]
    assert report["results"][0]["stopped_early"]
    assert "no rate tried holds 99.0%" in (tmp_path / "r.html").read_text()


def test_a_capacity_search_goes_on_where_no_request_with_an_objective_came(
    scripted: ScriptedServer, tmp_path: Path
) -> None:
    options = ["--find-capacity", "--rate", "10", "--output-tokens", "2", "--probes", "3", "--seconds", "1"]
    options += ["--mix", "rare=1e-9,usual=1", "--objectives", "rare=20000/20000"]
    assert [result["rate"] for result in bench(scripted, tmp_path, *options)["results"]] == [10, 20, 40]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mix", "chat=1", "--objectives", "chat=9/9,interactve=9/9"], "class 'interactve'; all are of chat"),
        (["--objectives", "chat=9/9"], "class 'chat'; all are of no class; give them some by mix"),
        (["--workload", "slo_mix", "--objectives", "chat=9/9"], "class 'chat'; all are of short, long"),
    ],
)
def test_an_objective_of_a_class_without_requests_is_named(
    scripted: ScriptedServer, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["bench", "serve", "--url", scripted.url, "--find-capacity", *options]) == 1
    assert f"penstock: objectives: no request is of {said}\n" in capsys.readouterr().err


async def test_a_vanished_server_is_an_error_of_each_request_not_of_the_run() -> None:
    async with HttpClient("http://127.0.0.1:9") as http:
        timelines = await closed_loop(Server(http, "m"), [Call("x", Job([1], 1))] * 2, clients=1)
    assert [t.error for t in timelines] == ["connect", "connect"]


def test_a_server_that_fails_from_the_start_is_reported_in_its_own_words(
    scripted: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.fail_with = 503
    assert main(["bench", "serve", "--url", scripted.url]) == 1
    assert "503: scripted failure" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--rate", "1", "--concurrency", "2"],
        ["--workload", "slo_mix"],
        ["--workload", "cpu_single,nothing"],
        ["--prompts", "ids", "--chat"],
        ["--rate", "0.001", "--seconds", "0.001"],
        ["--find-capacity"],
        ["--trace", "/nowhere.jsonl"],
        ["--trace", "trace.jsonl", "--rate", "3"],
        ["--rate", "3", "--mix", "interactive=none"],
    ],
)
def test_options_that_contradict_each_other_are_refused(
    scripted: ScriptedServer, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert main(["bench", "serve", "--url", scripted.url, "--seed", "0", *options]) == 1
    assert capsys.readouterr().err.count("penstock: ") == 1


async def test_a_server_without_models_asks_for_a_name(scripted: ScriptedServer) -> None:
    async with HttpClient(scripted.url + "/elsewhere") as http:
        with pytest.raises(Unavailable, match="/v1/models answers 404"):
            await connect(http, None, chat=False, seed=0)
