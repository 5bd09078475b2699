from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.bench.adapters import adapter_of
from penstock.bench.driver import ClosedLoop, OpenLoop, make_request
from penstock.bench.sampling import SAMPLING
from penstock.bench.workloads import WORKLOADS, Job
from penstock.cli.main import main
from penstock.core.engine import EngineInfo
from penstock.core.request import Objective
from penstock.engine.executor import Step, StepResult, TokenMask
from penstock.engine.limits import SchedulerLimits
from penstock.engine.local import LocalEngine
from penstock.engine.scheduler import Scheduler

# The command as it runs where only the engine's own dependencies are installed.
WITHOUT_SERVER_PACKAGES = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"starlette", "uvicorn", "uvloop", "msgspec", "rich", "pydantic", "yaml"}:
            raise ModuleNotFoundError(f"{name} must not be needed", name=name)

sys.meta_path.insert(0, Absent())
from penstock.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class ConstantExecutor:
    """Computes nothing and samples the same token every time."""

    num_blocks = 64

    runs_ahead = True
    idle_seconds: float | None = None
    mask_memory: TokenMask | None = None

    def padded_tokens(self, tokens: int) -> int:
        return tokens

    def launch(self, step: Step) -> Step:
        return step

    def resample(self, handle: Step, masks: Mapping[int, TokenMask]) -> list[int]:
        return [7] * len(masks)

    def constrain(self, handle: Step, masks: TokenMask) -> None:
        pass

    def collect(self, handle: Step) -> StepResult:
        return StepResult([[7] * samples for samples in handle.samples])


def make_scheduler() -> Scheduler:
    limits = SchedulerLimits(
        num_blocks=64, block_size=16, max_seqs=8, max_step_tokens=64, max_model_len=256, vocab_size=100
    )
    return Scheduler(limits)


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine(make_scheduler(), ConstantExecutor(), EngineInfo("constant", 256, 100))
    yield engine
    engine.close()


def test_command_end_to_end_on_the_engine_half_alone(tiny_model: Path, tmp_path: Path) -> None:
    options = ["--model", f"dummy:{tiny_model}", "--workload", "cpu_single,cpu_prefill,cpu_clients8,cpu_prefix"]
    options += ["--seeds", "2", "--device", "cpu", "--json", str(tmp_path / "report.json")]
    command = [sys.executable, "-c", WITHOUT_SERVER_PACKAGES, "bench", "engine", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr

    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    single, prefill, clients, prefix = report["results"]
    assert (single["output_tokens"], single["steps"], len(single["values"])) == (128, 128, 2)
    assert single["value"] == max(single["values"])
    # Both begin with the same ids; a cache hit here would flatter whichever runs later.
    assert (prefill["prompt_tokens"], prefill["cached_tokens"]) == (1024, 0)
    assert (clients["requests"], clients["output_tokens"]) == (16, 16 * 128)
    assert clients["mean_batch"] <= 8
    assert prefix["cached_tokens"] == 31 * 768
    assert report["machine"]["cpu"]
    assert "cpu_prefix" in done.stdout
    assert "cpu_prefix deadline seed 1" in done.stderr


def test_open_loop_end_to_end_with_both_ways_of_scheduling(tiny_model: Path, tmp_path: Path) -> None:
    options = ["--model", f"dummy:{tiny_model}", "--workload", "cpu_prefill", "--rate", "30", "--seconds", "2"]
    options += ["--arrivals", "bursts", "--mix", "chat=0.6,hopeless=0.4", "--scheduling", "fcfs,deadline"]
    options += ["--objectives", "chat=20000/20000,hopeless=0.001/-", "--device", "cpu"]
    options += ["--json", str(tmp_path / "report.json"), "--html", str(tmp_path / "report.html")]
    command = [sys.executable, "-c", WITHOUT_SERVER_PACKAGES, "bench", "engine", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "deadline against fcfs: " in done.stdout

    fcfs, deadline = json.loads((tmp_path / "report.json").read_text())["results"]
    for result in (fcfs, deadline):
        chat, hopeless = result["classes"]["chat"], result["classes"]["hopeless"]
        assert chat["met"] == chat["requests"] > 0
        assert hopeless["met"] == 0
        assert result["requests"] == chat["requests"] + hopeless["requests"]
        assert result["lateness_ms"]["p50"] > 0
        for timeline in result["timelines"]:
            if not timeline["refused"]:
                assert timeline["ledger"]["output_tokens"] == timeline["output_tokens"] == 1
    assert fcfs["refused"] == 0  # it knows no promises
    assert deadline["refused"] == deadline["classes"]["hopeless"]["requests"] > 0
    assert deadline["share_met_admitted"] == 1
    assert deadline["retry_after_s"]["p50"] > 0
    assert "cpu_prefill@30 deadline" in (tmp_path / "report.html").read_text()


def test_kinds_of_sampling_are_compared_with_the_first(tiny_model: Path, tmp_path: Path) -> None:
    options = ["--model", f"dummy:{tiny_model}", "--workload", "cpu_clients8", "--seeds", "1", "--device", "cpu"]
    options += ["--sampling", "greedy,mixed", "--json", str(tmp_path / "report.json")]
    command = [sys.executable, "-c", WITHOUT_SERVER_PACKAGES, "bench", "engine", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "cpu_clients8: mixed against greedy: " in done.stdout
    greedy, mixed = json.loads((tmp_path / "report.json").read_text())["results"]
    assert (greedy["sampling"], mixed["sampling"]) == ("greedy", "mixed")
    assert greedy["output_tokens"] == mixed["output_tokens"] == 16 * 128


def test_a_mixed_batch_holds_every_kind_of_sampling() -> None:
    jobs = replace(WORKLOADS["cpu_clients8"], sampling="mixed").jobs(0)
    assert all(params in [job.sampling for job in jobs[:8]] for kind in SAMPLING.values() for params in kind)
    request = make_request(jobs[2], "id", "")
    assert request.params == replace(jobs[2].sampling, max_tokens=128, ignore_eos=True)


def test_closed_loop_keeps_its_number_of_requests_in_flight() -> None:
    driver = ClosedLoop(make_scheduler(), ConstantExecutor())
    seen: list[int] = []
    step = driver.loop.step

    def watched() -> bool:
        worked = step()
        seen.append(driver.loop.stats.running + driver.loop.stats.waiting)
        return worked

    driver.loop.step = watched  # type: ignore[method-assign]
    timelines = driver.run([Job([i + 10], 4) for i in range(9)], clients=3, salt="")
    assert max(seen) == 3
    assert [t.output_tokens for t in timelines] == [4] * 9
    assert all(t.error is None and t.finished is not None and t.ttft is not None for t in timelines)


def test_open_loop_counts_from_the_time_each_job_was_due(engine: LocalEngine) -> None:
    arrivals = (0.0, 0.02, 0.021, 0.06)
    jobs = [Job([10 + i], 3, arrival=arrival, kind="short") for i, arrival in enumerate(arrivals)]
    timelines = OpenLoop(engine, {"short": Objective("short", 10.0, 10.0)}).run(jobs, salt="")
    first = timelines[0].sent
    for job, timeline in zip(jobs, timelines, strict=True):
        assert abs(timeline.sent - first - job.arrival) < 1e-9
        assert timeline.late > 0
        assert timeline.ttft is not None
        assert timeline.ttft > timeline.late  # nothing starts before it was sent
        assert (timeline.output_tokens, timeline.met) == (3, True)


def test_open_loop_stops_when_too_many_have_missed(engine: LocalEngine) -> None:
    jobs = [Job([10], 2, arrival=0.05 * i, kind="short") for i in range(400)]  # 20 s, of which it takes a few steps
    impossible = {"short": Objective("short", ttft=1e-9)}
    timelines = OpenLoop(engine, impossible, allowed_misses=3).run(jobs, salt="")
    assert 4 <= len(timelines) < 400
    assert all(timeline.finished is not None for timeline in timelines)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--workload", "slo_mix"], "--rate"),
        (["--workload", "cpu_single", "--find-capacity"], "--objectives"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--workload", "slo_mix", "--rate", "1", "--objectives", "short=fast"], "objectives"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_loading(
    options: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "engine", "--model", "nowhere", *options]) == 1
    assert field in capsys.readouterr().err


def test_numbers_of_adapters_are_compared_with_the_first(tiny_model: Path, tmp_path: Path) -> None:
    options = ["--model", f"dummy:{tiny_model}", "--workload", "cpu_clients8", "--seeds", "1", "--device", "cpu"]
    options += ["--adapters", "0,3", "--adapter-rank", "4", "--json", str(tmp_path / "report.json")]
    assert main(["bench", "engine", *options]) == 0
    plain, adapted = json.loads((tmp_path / "report.json").read_text())["results"]
    assert (plain["adapters"], adapted["adapters"]) == (0, 3)
    assert plain["output_tokens"] == adapted["output_tokens"] == 16 * 128
    jobs = replace(WORKLOADS["cpu_clients8"], adapters=3).jobs(0)
    asked = {make_request(job, "id", "").adapter for job in jobs}
    assert asked == {adapter_of(number) for number in range(3)}
