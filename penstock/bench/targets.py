"""Targets of the workloads and figures of the best measured peer, which `--targets` shows beside results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.bench.workloads import Metric

DeviceKind = Literal["cpu", "cuda"]

# Where goals and peers come from. Other machines are not to be held to them.
MEASURED: dict[DeviceKind, str] = {
    "cuda": "one NVIDIA H200 with vLLM 0.26.0 as the peer, November 2026",
    "cpu": "two Zen 4 cores over HTTP with the best peer of each workload, November 2026",
}


@dataclass(frozen=True, slots=True)
class Target:
    model: str
    precision: str
    workload: str
    device: DeviceKind
    goal: float
    peer: float
    peer_name: str
    admitted_only: bool = False  # past capacity: a share of what was not refused

    def ratio(self, value: float, metric: Metric) -> float:
        """Above 1 the goal is met; for milliseconds less is better."""
        return self.goal / value if metric == "ms_per_token" else value / self.goal


_LLAMA, _QWEN, _SMOL = "llama-3.1-8b", "qwen3-0.6b", "smollm2-135m"

# model, precision, workload, vLLM, goal
_GPU: list[tuple[str, str, str, float, float]] = [
    (_LLAMA, "bfloat16", "single", 4.89, 3.9),
    (_LLAMA, "bfloat16", "batch32", 5_496, 7_200),
    (_LLAMA, "bfloat16", "throughput", 10_198, 11_200),
    (_LLAMA, "bfloat16", "mixed", 9_875, 11_500),
    (_LLAMA, "bfloat16", "prefix", 8_604, 14_000),
    (_LLAMA, "bfloat16", "prefill", 40_994, 42_000),
    (_LLAMA, "fp8", "single", 3.44, 2.3),
    (_LLAMA, "fp8", "batch32", 6_772, 10_000),
    (_LLAMA, "fp8", "throughput", 13_998, 16_000),
    (_LLAMA, "fp8", "mixed", 12_265, 15_500),
    (_QWEN, "bfloat16", "single", 1.79, 0.6),
    (_QWEN, "bfloat16", "batch32", 10_309, 35_000),
    (_QWEN, "bfloat16", "throughput", 30_008, 40_000),
    (_QWEN, "bfloat16", "mixed", 22_853, 32_000),
    (_QWEN, "bfloat16", "prefix", 13_553, 40_000),
    (_QWEN, "bfloat16", "prefill", 267_792, 320_000),
    # Share of requests that met both objectives; the peer is its best setting at that rate.
    (_LLAMA, "bfloat16", "slo_mix@5", 0.921, 0.995),
    (_LLAMA, "bfloat16", "slo_mix@10", 0.875, 0.995),
    (_LLAMA, "bfloat16", "slo_mix@20", 0.696, 0.99),
    (_LLAMA, "bfloat16", "slo_mix@30", 0.351, 0.95),
    (_LLAMA, "bfloat16", "slo_mix@40", 0.0, 0.95),  # of the admitted
]

# workload, best peer, its name, goal with int8 weights, goal with int4 weights
_CPU: list[tuple[str, float, str, float, float]] = [
    ("cpu_single", 133, "llama.cpp Q4_0", 195, 255),
    ("cpu_prefill", 1_574, "OpenVINO int8", 2_200, 2_000),
    ("cpu_clients8", 303, "OpenVINO int8", 550, 550),
    ("cpu_clients32", 460, "OpenVINO int8", 850, 850),
    ("cpu_prefix", 225, "vLLM bf16", 650, 650),
]

TARGETS = [
    Target(model, precision, workload, "cuda", goal, peer, "vLLM", admitted_only=workload == "slo_mix@40")
    for model, precision, workload, peer, goal in _GPU
] + [
    Target(_SMOL, precision, workload, "cpu", goal, peer, name)
    for workload, peer, name, int8, int4 in _CPU
    for precision, goal in (("int8", int8), ("int4", int4))
]

# Seconds from start to ready, by (model, device kind).
COLD_START_GOALS: dict[tuple[str, DeviceKind], float] = {(_LLAMA, "cuda"): 10, (_QWEN, "cuda"): 6, (_SMOL, "cpu"): 3}


def find_target(model: str, precision: str | None, workload: str, device: str | None) -> Target | None:
    """The target of this very precision, else the nearest stated one: a CPU run in float32 is held to the int8 goal.

    Over HTTP neither precision nor device is known.
    """
    found = [t for t in TARGETS if (t.model, t.workload) == (model, workload) and device in (t.device, None)]
    return next((t for t in found if t.precision == precision), found[0] if found else None)
