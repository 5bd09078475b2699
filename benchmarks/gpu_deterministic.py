"""Proves `engine.deterministic` on a Hopper GPU bit by bit, and measures what it costs.

    PYTHONPATH=. python3 benchmarks/gpu_deterministic.py [--architecture qwen3-0.6b,llama-3.1-8b] [--parts proof,cost]

Operators: every GEMM of the model for 1 to 512 rows and some thousands, attention of a position as a prompt and as a
decode token, norm and RoPE. A trace names the first operator of the first layer that differs between ways to compute
one position. Requests: logits (as checksums of their bits) and tokens of the same requests alone, in batches, in small
chunks, preempted, from the prefix cache, and resumed. Cost: workloads with the setting and without, interleaved.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_cases.determinism import BLOCK, MODEL_LEN, check_attention, check_layers, check_operators, time_operators

from penstock.bench.architectures import write_architecture
from penstock.bench.runs import LoadedEngine
from penstock.bench.workloads import WORKLOADS, Workload
from penstock.core.engine import EngineInfo
from penstock.core.request import Chunk, GenerateRequest, SamplingParams
from penstock.engine.executor import Step
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.engine.settings import EngineConfig, Quantization
from penstock.runner.cuda_runner import CudaRunner
from penstock.runner.fused_forward import FusedForward
from penstock.runner.startup import start

MAX_SEQS = 160
PROMPTS = (5, 17, 64, 130, 257, 511, 700, 1023, 1025, 1600, 2100, 3100)  # tokens of the requests that are compared
OUTPUT = 20
COST = ("single", "batch32", "mixed128", "prefill")
MIXED = Workload("mixed128", "128 x 100-1024 in and out", "output_tok_s", lambda source: source.mixed(128, 100, 1024))

lines: list[str] = []  # the summary


def report(line: str) -> None:
    print(line, flush=True)
    lines.append(line)


@dataclass(frozen=True, slots=True)
class Loaded:
    scheduler: Scheduler
    runner: CudaRunner
    info: EngineInfo

    @property
    def forward(self) -> FusedForward:
        return self.runner._forward


def load(architecture: str, quantization: Quantization, *, deterministic: bool) -> Loaded:
    began = time.perf_counter()
    config = EngineConfig(
        "cuda", quantization=quantization, max_seqs=MAX_SEQS, max_model_len=MODEL_LEN, kv_memory_gib=20.0,
        deterministic=deterministic,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = write_architecture(architecture, Path(folder) / architecture)
        scheduler, executor, info = start(f"dummy:{path}", config)
    assert isinstance(executor, CudaRunner)
    mode = "deterministic" if deterministic else "default"
    report(f"{architecture} {mode}: ready after {time.perf_counter() - began:.1f} s")
    return Loaded(scheduler, executor, info)


# -- requests ---------------------------------------------------------------------------------------------------------


class Recorder:
    """Checksums of the logits that requests were sampled from, by (seed of the request, position)."""

    def __init__(self, runner: CudaRunner) -> None:
        self._owners: dict[int, int] = {}
        self._kept: list[tuple[list[tuple[int, int]], torch.Tensor]] = []
        vocab = runner._logits.shape[1]
        generator = torch.Generator().manual_seed(5)
        self._weights = torch.randint(-(2**62), 2**62, (vocab,), generator=generator).to(runner._logits.device) | 1
        hooked: Any = runner
        launch, sample = runner.launch, runner._sample

        def launching(step: Step) -> Any:
            self._owners.update({setup.row: setup.seed for setup in step.setups})
            return launch(step)

        def sampling(flight: Any) -> None:
            logits, step = runner._logits[: len(flight.rows)], flight.step
            sums = (logits.view(torch.int32).long() * self._weights).sum(-1)
            places = [(step.rows[i], step.starts[i] + step.counts[i]) for i in flight.sampled]
            self._kept.append(([(self._owners[row], position) for row, position in places], sums))
            sample(flight)

        hooked.launch, hooked._sample = launching, sampling
        self._hooked = hooked

    def remove(self) -> None:
        del self._hooked.launch, self._hooked._sample

    def take(self) -> dict[tuple[int, int], int]:
        found: dict[tuple[int, int], int] = {}
        for owners, sums in self._kept:
            found |= zip(owners, sums.tolist(), strict=True)
        self._kept.clear()
        return found


def requests() -> list[GenerateRequest]:
    """Greedy and sampled, one after the other."""
    draw, made = random.Random(7), []
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
        {"temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    ]  # fmt: skip
    for number, length in enumerate(PROMPTS * 2):
        params = SamplingParams(**kinds[number % 4], max_tokens=OUTPUT, ignore_eos=True)
        prompt = [draw.randrange(100, 50_000) for _ in range(length)]
        made.append(GenerateRequest(f"r{number}", prompt, params, seed=number + 1))
    return made


def fillers(count: int) -> list[GenerateRequest]:
    draw = random.Random(count)
    return [
        GenerateRequest(
            f"f{number}",
            [draw.randrange(100, 50_000) for _ in range(draw.randint(3, 1400))],
            SamplingParams(temperature=0.0, max_tokens=draw.randint(1, 40), ignore_eos=True),
            seed=1_000_000 + number,
        )
        for number in range(count)
    ]


@dataclass(slots=True)
class Answers:
    tokens: dict[str, list[int]] = field(default_factory=dict)  # by request
    sums: dict[tuple[int, int], int] = field(default_factory=dict)  # of logits: by the request's seed and position
    preemptions: int = 0

    def add(self, other: Answers) -> None:
        self.tokens |= other.tokens
        self.sums |= other.sums


class Engine:
    def __init__(self, loaded: Loaded) -> None:
        self._loaded, self.recorder, self._salt = loaded, Recorder(loaded.runner), 0

    def run(self, *groups: Iterable[GenerateRequest], **limits: Any) -> Answers:
        """Each group at once, one after the other; the answers of the last one."""
        self._salt += 1
        answers = Answers()

        def take(chunks: list[Chunk]) -> None:
            for chunk in chunks:
                answers.tokens.setdefault(chunk.request_id, []).extend(chunk.token_ids)

        limits = {"prefix_caching": False, **limits}
        scheduler = Scheduler(replace(self._loaded.scheduler.limits, **limits), self._loaded.scheduler.times)
        loop = EngineLoop(scheduler, self._loaded.runner, take)
        for group in groups:
            self.recorder.take()
            answers.tokens.clear()
            for request in group:
                answers.tokens[request.id] = list(request.output)
                loop.submit(replace(request, cache_salt=str(self._salt)))
            while loop.step():
                pass
        answers.sums, answers.preemptions = self.recorder.take(), scheduler.stats().preemptions
        return answers


def check_requests(loaded: Loaded) -> None:
    engine = Engine(loaded)
    try:
        compare_requests(engine, requests())
    finally:
        engine.recorder.remove()


def compare_requests(engine: Engine, all_requests: list[GenerateRequest]) -> None:
    alone = Answers()
    for request in all_requests:
        alone.add(engine.run([request]))
    distinct = len({token for output in alone.tokens.values() for token in output})
    report(f"  {len(all_requests)} requests alone: {len(alone.sums)} positions, {distinct} distinct tokens")

    def compare(name: str, found: Answers) -> None:
        common = found.sums.keys() & alone.sums.keys()
        wrong = sorted(key for key in common if found.sums[key] != alone.sums[key])
        texts = [r.id for r in all_requests if found.tokens.get(r.id, alone.tokens[r.id]) != alone.tokens[r.id]]
        verdict = f"same bits in {len(common)} positions"
        if wrong or texts:
            verdict = f"DIFFERENT in {len(wrong)} of {len(common)}, first {wrong[:3]}, other tokens in {len(texts)}"
        report(f"  {name}: {verdict}")

    pairs = Answers()
    for a, b in zip(all_requests[::2], all_requests[1::2], strict=True):
        pairs.add(engine.run([a, b]))
    compare("in pairs", pairs)
    for size in (8, 32, 64, 128):
        chosen = all_requests[4:9] if size == 8 else all_requests
        compare(f"batch of {size}", engine.run([*fillers(size - len(chosen)), *chosen]))
    for tokens in (2048, 300, 112):
        compare(f"steps of {tokens} tokens", engine.run([*all_requests, *fillers(8)], max_step_tokens=tokens))
    blocks = sum(-(-len(request.prompt) // BLOCK) + 1 for request in all_requests)
    scarce = engine.run(all_requests, num_blocks=blocks)
    compare(f"{scarce.preemptions} preemptions", scarce)
    compare("from the prefix cache", engine.run(all_requests, all_requests, prefix_caching=True))
    for count in (1, 7, OUTPUT - 1):
        again = [replace(r, output=alone.tokens[r.id][:count], resumed=True) for r in all_requests]
        compare(f"resumed after {count} tokens", engine.run([*again, *fillers(20)]))


# -- cost -------------------------------------------------------------------------------------------------------------


def measure_cost(architecture: str, default: Loaded, deterministic: Loaded, seeds: int) -> None:
    engines = [
        LoadedEngine(
            loaded.runner, loaded.info, {"deadline": Scheduler(loaded.scheduler.limits, loaded.scheduler.times)}
        )
        for loaded in (default, deterministic)
    ]
    report(f"{'':24}{'default':>12}{'deterministic':>15}{'ratio of speed':>16}")
    for name in COST:
        workload = MIXED if name == MIXED.name else WORKLOADS[name]
        for engine in engines:
            engine.warm_up(workload)
        figures: list[list[float]] = [[], []]
        for seed in range(1 if name == MIXED.name else seeds):
            for which in (0, 1) if seed % 2 == 0 else (1, 0):
                figure = engines[which].measure("deadline", workload, seed).summary.figure(workload.metric)
                figures[which].append(figure or 0.0)
        lower = workload.metric == "ms_per_token"
        best = [min(values) if lower else max(values) for values in figures]
        ratio = best[0] / best[1] if lower else best[1] / best[0]
        report(f"{architecture + ' ' + name:24}{best[0]:12.2f}{best[1]:15.2f}{ratio:16.3f}")


def attempt(name: str, check: Callable[[], None]) -> None:
    """A check that fails does not keep the others from being made."""
    report(f"{name}:")
    began = time.perf_counter()
    try:
        with torch.inference_mode():
            check()
            torch.cuda.synchronize()
    except Exception:
        traceback.print_exc()
        report("  FAILED")
    print(f"  ({time.perf_counter() - began:.1f} s)", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", default="qwen3-0.6b,llama-3.1-8b")
    parser.add_argument("--quantization", choices=["none", "fp8"], default="none")
    parser.add_argument("--parts", default="proof,operators,cost")
    parser.add_argument("--seeds", type=int, default=2, help="runs of a workload, of which the best counts")
    args = parser.parse_args()
    for architecture in args.architecture.split(","):
        ours = load(architecture, args.quantization, deterministic=True)
        if "proof" in args.parts:
            attempt(f"{architecture}, operators", partial(check_operators, ours.forward, report))
            attempt(f"{architecture}, attention", partial(check_attention, ours.forward, report))
            attempt(f"{architecture}, layers", partial(check_layers, ours.forward, report))
            attempt(f"{architecture}, requests", partial(check_requests, ours))
        default = None
        if "operators" in args.parts or "cost" in args.parts:
            default = load(architecture, args.quantization, deterministic=False)
        if default and "operators" in args.parts:
            attempt(f"{architecture}, times", partial(time_operators, default.forward, ours.forward, report))
        if default and "cost" in args.parts:
            attempt(f"{architecture}, workloads", partial(measure_cost, architecture, default, ours, args.seeds))
        del ours, default
        torch.cuda.empty_cache()
    print("\n" + "\n".join(lines))
    return 1 if any("DIFFERENT" in line or "FAILED" in line for line in lines) else 0


if __name__ == "__main__":
    raise SystemExit(main())
