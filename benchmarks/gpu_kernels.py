"""Check and time the GPU kernels at full size on one GPU, against the device's limits and torch's own kernels.

    PYTHONPATH=. python3 benchmarks/gpu_kernels.py [--only decode prefill ...] [--json FILE]

Every variant runs inside a CUDA graph over rotating inputs larger than the L2 cache, so launch gaps are counted and
cache hits are not. Child processes compile all variants first, since compiling one by one would take minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import triton
from gpu_cases.attention import decode_case, prefill_case, prefix_case, rope_case
from gpu_cases.case import BF16, FP8, Case
from gpu_cases.linear import deferred_norm_case, gemm_section, moe_case, norm_case, silu_case, swiglu_case
from gpu_cases.step import sampling_case, step_case

SECTIONS: dict[str, list[Callable[..., Case]]] = {
    "decode": [
        partial(decode_case, heads, dtype, contexts, name)
        for heads, dtype, (contexts, name) in product(
            (32, 16),
            (BF16, FP8),
            [
                ([16384], "1 x 16384"),
                ([384], "1 x 384"),
                ([384] * 32, "32 x 384"),
                ([512 + i // 2 for i in range(512)], "512 x 512..768"),
                ([200 + (i * 769) % 1849 for i in range(192)], "192 x 200..2048"),
            ],
        )
    ],
    "prefix": [partial(prefix_case, heads, 256, 2048, 96) for heads in (32, 16)],
    "prefill": [
        partial(prefill_case, *batch)
        for batch in [(32, 2, 4096, 4096), (32, 16, 512, 512), (32, 1, 512, 16384), (16, 2, 4096, 4096)]
    ],
    "fused": [
        *(partial(norm_case, rows, width) for rows, width in [(1, 1024), (1, 4096), (32, 4096), (8192, 4096)]),
        *(partial(silu_case, rows, width) for rows, width in [(1, 3072), (1, 14336), (32, 14336), (8192, 14336)]),
        *(partial(rope_case, rows, heads) for rows, heads in [(1, 16), (1, 32), (32, 32), (8192, 32)]),
    ],
    "experts": [partial(moe_case, tokens, dtype) for tokens, dtype in product((1, 32, 512, 8192), (BF16, FP8))],
    "gemv": gemm_section(1),
    "gemm": gemm_section(4, 16, 32, 64),
    "large_gemm": [
        *gemm_section(96, 160, 224),
        *(partial(deferred_norm_case, rows, 1024, 3072) for rows in (8, 32, 128)),
    ],
    "prompts": [
        *(
            partial(swiglu_case, "llama gate_up", dtype, rows)
            for dtype, rows in product((BF16, FP8), (512, 1024, 8192))
        ),
        *(partial(swiglu_case, "qwen gate_up", BF16, rows) for rows in (512, 1024, 8192)),
    ],
    "step": [
        partial(step_case, *c)
        for c in [
            ("llama", BF16, 1, 256),
            ("llama", BF16, 32, 256),
            ("llama", FP8, 1, 256),
            ("llama", FP8, 32, 256),
            ("qwen", BF16, 1, 256),
            ("qwen", BF16, 32, 256),
        ]
    ],
    "sampling": [
        partial(sampling_case, rows, 128256, dtype) for rows, dtype in product((1, 32, 256), (torch.float32, BF16))
    ],
}


def seconds(run: Callable[[int], object], sets: int) -> float:
    """Median over replays of a graph that runs every input set, per launch."""
    for i in range(min(sets, 2)):
        run(i)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    launches = sets if sets > 1 else 4
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(i % sets)
    graph.replay()
    times: list[float] = []
    for _ in range(5):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / launches)
    return sorted(times)[2]


def compile_all(sections: list[str], jobs: int) -> None:
    arguments = [sys.executable, __file__, "--only", *sections]
    children = [
        subprocess.Popen([*arguments, "--compile-part", str(i), "--jobs", str(jobs)], env=dict(os.environ))
        for i in range(jobs)
    ]
    for child in children:
        child.wait()


def compile_part(sections: list[str], part: int, jobs: int) -> None:
    """Launch every jobs-th variant once, which leaves its binary in Triton's cache on disk."""
    count = 0
    for section in sections:
        for make in SECTIONS[section]:
            case = make(most_layers=1) if section == "step" else make()
            for variant in case.variants:
                count += 1
                if count % jobs != part or variant.label.startswith("*"):
                    continue
                try:
                    variant.run(0)
                except triton.runtime.errors.OutOfResources:
                    continue
    torch.cuda.synchronize()


def measure(sections: list[str]) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for section in sections:
        for make in SECTIONS[section]:
            case = make()
            for variant in case.variants:
                entry: dict[str, object] = {"section": section, "case": case.name, "variant": variant.label}
                try:
                    variant.run(0)
                    entry["error"] = variant.error() if variant.error else None
                    microseconds = seconds(variant.run, case.sets) * 1e6
                    entry |= {"us": microseconds, "share": case.floor_s * 1e6 / microseconds}
                except (RuntimeError, ValueError, TypeError, triton.runtime.errors.OutOfResources) as failure:
                    entry["failed"] = str(failure).splitlines()[0][:100]
                results.append(entry)
    return results


def print_table(results: list[dict[str, object]]) -> None:
    """Best variant of each case, the library's time beside it, and everything that failed or is wrong."""
    by_case: dict[str, list[dict[str, object]]] = {}
    for entry in results:
        by_case.setdefault(str(entry["case"]), []).append(entry)
        error = entry.get("error")
        wrong = isinstance(error, float | int) and error > 1e-2
        if wrong or ("failed" in entry and "OutOfResources" not in str(entry["failed"])):
            print("BAD", entry["case"], "|", entry["variant"], "|", entry.get("failed", entry.get("error")))
    for name, entries in by_case.items():
        timed = sorted((e for e in entries if "us" in e), key=lambda e: float(e["us"]))  # type: ignore[arg-type]
        ours = [e for e in timed if not str(e["variant"]).startswith("*")]
        theirs = [e for e in timed if str(e["variant"]).startswith("*")]
        shown = ours[:2] + theirs[:2] if len(ours) > 8 else timed
        print(name, *(f"| {e['variant']}: {e['us']:.1f} us {e['share']:.0%}" for e in shown))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--json")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--compile-part", type=int)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.compile_part is not None:
        compile_part(options.only, options.compile_part, options.jobs)
        return
    begin = time.perf_counter()
    compile_all(options.only, options.jobs)
    compiled = time.perf_counter()
    results = measure(options.only)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file)
    print_table(results)
    print(f"compiled in {compiled - begin:.0f} s, measured in {time.perf_counter() - compiled:.0f} s")


if __name__ == "__main__":
    main()
