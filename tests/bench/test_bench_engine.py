from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from penstock.bench.engine import Driver
from penstock.bench.workloads import Job
from penstock.engine.executor import Step, StepResult
from penstock.engine.scheduler import Scheduler, SchedulerLimits

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
    idle_seconds = None

    def launch(self, step: Step) -> Step:
        return step

    def collect(self, handle: Step) -> StepResult:
        return StepResult([7 if sampled else -1 for sampled in handle.samples])


def make_driver() -> Driver:
    limits = SchedulerLimits(
        num_blocks=64, block_size=16, max_seqs=8, max_step_tokens=64, max_model_len=256, vocab_size=100
    )
    return Driver(Scheduler(limits), ConstantExecutor())


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
    assert report["machine"]["torch"]
    assert "cpu_prefix" in done.stdout
    assert "cpu_prefix seed 1" in done.stderr


def test_closed_loop_keeps_its_number_of_requests_in_flight() -> None:
    driver = make_driver()
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


def test_open_loop_sends_each_job_at_its_time() -> None:
    jobs = [Job([10 + i], 3, arrival=arrival, kind="short") for i, arrival in enumerate((0.0, 0.02, 0.021, 0.06))]
    timelines = make_driver().run_open_loop(jobs, salt="")
    first = timelines[0].sent
    for job, timeline in zip(jobs, timelines, strict=True):
        assert abs(timeline.sent - first - job.arrival) < 1e-9
        assert timeline.ttft is not None
        assert timeline.ttft > 0  # nothing starts before it has arrived
        assert timeline.output_tokens == 3
