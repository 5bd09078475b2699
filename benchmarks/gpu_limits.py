"""Does it fail well on a GPU? Too little memory is reported before serving, with a number that works; SIGTERM frees it.

    python benchmarks/gpu_limits.py [--architecture qwen3-0.6b]

Another tenant of the GPU is played by memory that this process holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from penstock.bench.architectures import write_architecture
from penstock.core.errors import StartupError
from penstock.core.request import Chunk, GenerateRequest, SamplingParams
from penstock.engine.loop import EngineLoop
from penstock.engine.settings import EngineConfig
from penstock.runner.startup import start

GIB = 2**30


def try_with(model: str, free_gib: float, config: EngineConfig) -> str | None:
    """The complaint of a start with so much memory free; None if it starts and serves its fill."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    held = torch.empty(max(0, free - int(free_gib * GIB)), dtype=torch.uint8, device="cuda")
    try:
        scheduler, executor, info = start(model, config)
        failed: list[str] = []

        def take(chunks: list[Chunk]) -> None:
            failed.extend(chunk.error.message for chunk in chunks if chunk.error is not None)

        loop = EngineLoop(scheduler, executor, take)
        length = min(info.max_model_len - 9, 1000)
        for number in range(2 * config.max_seqs):
            params = SamplingParams(
                temperature=0.7, top_p=0.9, repetition_penalty=1.1, logprobs=5, max_tokens=8, ignore_eos=True
            )
            prompt = [100 + (number * 7919 + i) % 20_000 for i in range(length)]
            loop.submit(GenerateRequest(str(number), prompt, params))
        while loop.step():
            pass
        return f"{len(failed)} requests failed: {failed[0]}" if failed else None
    except StartupError as error:
        return f"refused: {error}"
    finally:
        del held


def check_memory(model: str) -> None:
    small = EngineConfig(max_seqs=64, max_step_tokens=4096, max_model_len=2048)
    cases = [
        ("plenty", 20.0, small),
        ("kv_memory_gib too large", 20.0, dataclasses.replace(small, kv_memory_gib=30.0)),
        ("hardly more than the weights", 2.2, dataclasses.replace(small, max_step_tokens=65536)),
        ("too many sequences", 2.5, dataclasses.replace(small, max_seqs=2048)),
        ("less than the weights", 0.5, small),
    ]
    for label, free, config in cases:
        complaint = try_with(model, free, config)
        print(f"{label}, {free} GiB free: {complaint or 'starts and serves'}", flush=True)
        found = re.search(r"set (\w+) to at most ([\d.]+)", complaint or "")
        if found:
            kind = float if found[1] == "kv_memory_gib" else int
            change: dict[str, Any] = {found[1]: kind(found[2])}
            advised = dataclasses.replace(config, **change)
            print(f"    as advised: {try_with(model, free, advised) or 'starts and serves'}", flush=True)


def check_termination(model: str) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    command = [sys.executable, "-m", "penstock.cli.main", "bench", "engine", "--model", model, "--workload", "mixed"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while torch.cuda.mem_get_info()[0] > before / 2:  # until its KV cache is there
        time.sleep(0.2)
    time.sleep(4)
    during = torch.cuda.mem_get_info()[0]
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(30)
    while torch.cuda.mem_get_info()[0] < before - GIB and time.monotonic() < began + 30:
        time.sleep(0.05)
    after = torch.cuda.mem_get_info()[0]
    print(
        f"SIGTERM: exit code {code}; free {before / GIB:.1f} GiB before, {during / GIB:.1f} while it ran, "
        f"{after / GIB:.1f} after {time.monotonic() - began:.1f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", default="qwen3-0.6b")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write_architecture(args.architecture, Path(folder) / args.architecture)
        check_memory(f"dummy:{path}")
    check_termination(f"dummy:{args.architecture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
