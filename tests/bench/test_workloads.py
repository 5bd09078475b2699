from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest

from penstock.bench.architectures import ARCHITECTURES, write_architecture
from penstock.bench.measure import Timeline, summarise
from penstock.bench.targets import TARGETS, find_target
from penstock.bench.workloads import (
    MIXES,
    WORKLOADS,
    Job,
    Workload,
    find_workload,
    mix_workload,
)
from penstock.core.errors import InvalidRequest

GPU_WORKLOADS = ("single", "batch32", "throughput", "mixed", "prefix", "prefill")
ORIGINAL = Path(__file__).parents[3] / "shared" / "gpu" / "workloads.py"

# The figures of other engines were taken with these very prompts; a change here makes every comparison void.
FROZEN = {
    "single": "24c6d799fa0a271e",
    "batch32": "dd478e8010886d14",
    "throughput": "a1dc6b0332c51763",
    "mixed": "c559a89edb062dc2",
    "prefix": "55212318273e550a",
    "prefill": "840a29f3ea0cc24a",
    "cpu_single": "c28ebc2d9c478724",
    "cpu_prefill": "639029994433ccd6",
    "cpu_clients8": "2b92383eafe675f7",
    "cpu_clients32": "cbd3225a23ab98b2",
    "cpu_prefix": "710a1160659aa82c",
    "slo_mix@10": "78870f2a3dab92f5",
}


def workload_named(name: str) -> Workload:
    base, _, rate = name.partition("@")
    return mix_workload(base, float(rate), 60.0) if rate else find_workload(name)


def checksum(jobs: Sequence[Job]) -> str:
    text = json.dumps([[job.prompt, job.output_len, job.arrival, job.kind] for job in jobs])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def original() -> ModuleType:
    if not ORIGINAL.is_file():
        pytest.skip("the original generator is not beside this repository")
    spec = importlib.util.spec_from_file_location("original_workloads", ORIGINAL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", FROZEN)
def test_jobs_of_seed_0_never_change(name: str) -> None:
    assert checksum(workload_named(name).jobs(0)) == FROZEN[name]


@pytest.mark.parametrize("name", GPU_WORKLOADS)
def test_jobs_equal_the_original_generator(original: ModuleType, name: str) -> None:
    jobs = WORKLOADS[name].jobs(seed=5, vocab=7000)
    assert [(job.prompt, job.output_len) for job in jobs] == original.requests(name, vocab=7000, seed=5)


def test_arrivals_and_architectures_equal_the_original(original: ModuleType) -> None:
    jobs = mix_workload("slo_mix", rate=7.5, seconds=20).jobs(seed=3)
    assert [(j.arrival, j.kind, j.prompt, j.output_len) for j in jobs] == original.slo_mix(7.5, 20, seed=3)
    assert original.MODELS.items() <= ARCHITECTURES.items()


def test_share_of_objectives_met_equals_the_original(original: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        ("short", 0.1, [0.01] * 99 + [0.2]),  # one late token in 100 is its 99th percentile
        ("short", 0.1, [0.01] * 200 + [0.2]),
        ("short", 0.2, []),
        ("short", 0.21, [0.01]),
        ("long", 3.9, [0.05]),
        ("long", 4.1, [0.05]),
        ("short", None, []),
    ]
    original.slo_report("test", records)
    timelines = []
    for kind, ttft, gaps in records:
        timeline = Timeline(sent=0.0, kind=kind, objective=MIXES["slo_mix"].objectives[kind], refused=ttft is None)
        for step in [] if ttft is None else [ttft, *gaps]:
            timeline.token_times.append(step + (timeline.token_times[-1] if timeline.token_times else 0.0))
        timelines.append(timeline)
    summary = summarise(timelines, wall_s=1.0)
    assert f"= {summary.share_met:.1%}" in capsys.readouterr().out
    assert (summary.refused, summary.share_met_admitted) == (1, 3 / 6)
    assert {name: (c.met, c.requests) for name, c in summary.classes.items()} == {"short": (2, 5), "long": (1, 2)}


def test_endless_jobs_keep_the_shape_and_never_repeat() -> None:
    jobs = list(islice(WORKLOADS["cpu_clients8"].endless(seed=0), 50))
    assert {(len(job.prompt), job.output_len) for job in jobs} == {(128, 128)}
    assert len({tuple(job.prompt) for job in jobs}) == 50


def test_an_unknown_workload_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"single.*slo_mix"):
        find_workload("nothing")


def test_every_target_belongs_to_a_workload_and_an_architecture() -> None:
    for target in TARGETS:
        workload_named(target.workload)
        assert target.model in {*ARCHITECTURES, "smollm2-135m"}


def test_targets_by_precision_and_device() -> None:
    fp8 = find_target("llama-3.1-8b", "fp8", "single", "cuda")
    assert fp8 is not None
    assert fp8.ratio(4.6, "ms_per_token") == pytest.approx(0.5)  # twice the milliseconds, half the goal
    unquantised = find_target("smollm2-135m", "float32", "cpu_single", "cpu")
    assert unquantised is not None
    assert (unquantised.precision, unquantised.ratio(390, "decode_tok_s")) == ("int8", 2.0)
    assert find_target("llama-3.1-8b", "bfloat16", "single", "cpu") is None


def test_write_architecture(tmp_path: Path) -> None:
    folder = write_architecture("qwen3-0.6b", tmp_path / "new" / "qwen3-0.6b")
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 28
    with pytest.raises(InvalidRequest, match=r"llama-3.1-8b, qwen3-0.6b"):
        write_architecture("gpt-5", tmp_path)
