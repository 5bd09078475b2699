"""`penstock bench engine`: workloads straight through the engine loop in this process, without HTTP or text."""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import product
from pathlib import Path
from typing import Any

from penstock.bench.adapters import RandomAdapters
from penstock.bench.architectures import ARCHITECTURES, write_architecture
from penstock.bench.arrivals import ArrivalPlan, mix_needs_rate
from penstock.bench.capacity import CapacitySearch, holds
from penstock.bench.html_report import write_html
from penstock.bench.report import Result, announce, print_report, spoken_capacity, write_json
from penstock.bench.runs import LoadedEngine, Run, better_run, pooled
from penstock.bench.targets import COLD_START_GOALS, DeviceKind, find_target
from penstock.bench.workloads import MIXES, Workload, find_workload
from penstock.core.engine import EngineInfo
from penstock.core.errors import InvalidRequest
from penstock.engine.executor import LoadedExecutor
from penstock.engine.scheduler import Scheduler
from penstock.engine.settings import EngineConfig, Scheduling, SpeculationConfig
from penstock.engine.speculation import Speculation

DEFAULT_WORKLOADS = "cpu_single,cpu_prefill,cpu_clients8"
CLOSED_SEEDS, OPEN_SEEDS = 3, 1


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a workload, of several that are compared."""

    mode: Scheduling
    sampling: str
    drafts: str  # method of speculative decoding
    adapters: int  # LoRA adapters mixed in a batch


@dataclass(frozen=True, slots=True)
class Plan:
    """What the command line asks for."""

    modes: list[Scheduling]
    sampling: list[str]
    speculation: list[str]
    adapters: list[int]
    bases: list[Workload | str]  # a mix by its name
    arrivals: ArrivalPlan
    workloads: list[Workload]
    seeds: int | None
    targets: bool

    @classmethod
    def from_args(cls, args: Namespace) -> Plan:
        arrivals = ArrivalPlan.from_args(args)
        names = [] if arrivals.trace else (args.workload or DEFAULT_WORKLOADS).split(",")
        bases = [name if name in MIXES else find_workload(name) for name in names]
        for base in bases:
            if isinstance(base, str) and not arrivals.rates:
                raise mix_needs_rate(base)
        workloads = arrivals.workloads(bases)
        if arrivals.trace and any(job.content is not None for job in workloads[0].jobs(0)):
            raise InvalidRequest("a trace with texts needs a tokenizer: use bench serve", param="trace")
        compared = args.scheduling, args.sampling, args.speculation, args.adapters
        return cls(*compared, bases, arrivals, workloads, args.seeds, args.targets)

    @property
    def variants(self) -> list[Variant]:
        return [Variant(*each) for each in product(self.modes, self.sampling, self.speculation, self.adapters)]

    def name(self, variant: Variant) -> str:
        """What tells a variant from the others."""
        parts = (
            (variant.mode, self.modes),
            (variant.sampling, self.sampling),
            (variant.drafts, self.speculation),
            (f"{variant.adapters or 'no'} adapters", self.adapters),
        )
        return " ".join(name for name, compared in parts if len(compared) > 1)


@dataclass(slots=True)
class EngineBench:
    plan: Plan
    engine: LoadedEngine
    device: DeviceKind
    precision: str

    def run(self) -> list[Result]:
        results: list[Result] = []
        warm: set[str] = set()
        for workload in self.plan.workloads:
            kind = workload.name.partition("@")[0]
            if kind not in warm:
                self._warm_up(workload)
                warm.add(kind)
            results += self._measure(workload)
        return results

    def find_capacities(self) -> tuple[list[Result], dict[str, float | None]]:
        """All probes, and the highest rate that held by workload and scheduling."""
        results: list[Result] = []
        found: dict[str, float | None] = {}
        attainment = self.plan.arrivals.attainment
        assert attainment is not None
        for base in self.plan.bases:
            self._warm_up(self.plan.arrivals.workload(base, self.plan.arrivals.rates[0]))
            for variant in self.plan.variants:
                name = base if isinstance(base, str) else base.name
                label = f"{name} {self.plan.name(variant) or variant.mode}"
                found[label], probed = self._find_capacity(base, variant, attainment)
                results += probed
        return results, found

    def _warm_up(self, workload: Workload) -> None:
        for sampling, adapters in product(self.plan.sampling, self.plan.adapters):
            self.engine.warm_up(replace(workload, sampling=sampling, adapters=adapters))

    def _find_capacity(
        self, base: Workload | str, variant: Variant, attainment: float
    ) -> tuple[float | None, list[Result]]:
        arrivals = self.plan.arrivals
        search = CapacitySearch(arrivals.rates[0], arrivals.probes)
        results = []
        while (rate := search.next_rate()) is not None:
            workload = _as_in(variant, arrivals.workload(base, rate))
            run = self.engine.measure(variant.mode, workload, 0, attainment, variant.drafts)
            search.record(rate, held=not run.stopped_early and holds(run.summary.share_met, attainment))
            announce(f"{workload.name} {variant.mode}", workload.metric, run.summary, run.stopped_early)
            results.append(self._result(workload, variant, [run]))
        return search.held, results

    def _measure(self, workload: Workload) -> list[Result]:
        """Seed by seed in every variant, in alternating order so that a drifting machine favours none."""
        runs: dict[Variant, list[Run]] = {variant: [] for variant in self.plan.variants}
        for seed in range(self.plan.seeds or (CLOSED_SEEDS if workload.rate is None else OPEN_SEEDS)):
            for variant in self.plan.variants[:: -1 if seed % 2 else 1]:
                run = self.engine.measure(variant.mode, _as_in(variant, workload), seed, drafts=variant.drafts)
                runs[variant].append(run)
                name = self.plan.name(variant) or variant.mode
                announce(f"{workload.name} {name} seed {seed}", workload.metric, run.summary)
        return [self._result(workload, variant, runs[variant]) for variant in self.plan.variants]

    def _result(self, workload: Workload, variant: Variant, runs: list[Run]) -> Result:
        """A closed loop shows what the engine can do: its best run counts. Of an open one every request counts."""
        best = reduce(partial(better_run, workload.metric), runs) if workload.rate is None else pooled(runs)
        target = None
        usual = variant.sampling == "greedy" and not variant.adapters
        if self.plan.targets and self.plan.arrivals.usual_objectives and usual:
            target = find_target(self.engine.info.model, self.precision, workload.name, self.device)
        values = [run.summary.figure(workload.metric) for run in runs]
        label = f"{workload.name} {self.plan.name(variant)}".strip()
        detail = {
            "scheduling": variant.mode,
            "sampling": variant.sampling,
            "speculation": variant.drafts,
            "adapters": variant.adapters,
            "values": values,
            **best.detail(),
        }
        return Result(workload, best.summary, target, detail, label, best.timelines)


def _as_in(variant: Variant, workload: Workload) -> Workload:
    return replace(workload, sampling=variant.sampling, adapters=variant.adapters)


def run(args: Namespace) -> int:
    began = time.perf_counter()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    plan = Plan.from_args(args)
    config = EngineConfig(
        args.device,
        args.dtype,
        args.quantization,
        max_model_len=args.max_model_len,
        max_seqs=args.max_seqs,
        max_step_tokens=args.max_step_tokens,
        kv_memory_gib=args.kv_memory_gib,
        kv_dtype=args.kv_dtype,
        deterministic=args.deterministic,
        scheduling=plan.modes[0],
        speculation=_speculation(plan, args),
        max_adapters=max(plan.adapters),
        max_adapter_rank=args.adapter_rank,
    )
    scheduler, executor, info = _start(args.model, config)
    cold_start = time.perf_counter() - began
    device, precision = _placement(config)
    schedulers = {
        mode: Scheduler(replace(scheduler.limits, fcfs=mode == "fcfs"), scheduler.times) for mode in plan.modes
    }
    adapters = RandomAdapters(executor.adapter_modules, args.adapter_rank)
    engine = LoadedEngine(executor, info, schedulers, _speculations(plan, scheduler), adapters)
    bench = EngineBench(plan, engine, device, precision)
    results, capacities = bench.find_capacities() if args.find_capacity else (bench.run(), {})
    engine.check_integrity()
    goal = COLD_START_GOALS.get((info.model, device)) if plan.targets else None
    print(
        f"{info.model}, {precision} on {device}, ready after {cold_start:.1f} s"
        + (f" (goal* {goal:g} s)" if goal else "")
    )
    print_report(results)
    for name, rate in capacities.items():
        print(f"\n{name}: {spoken_capacity(rate, args.attainment)}")
    facts: dict[str, Any] = {"model": info.model, "precision": precision, "device": device, "cold_start_s": cold_start}
    facts |= {"max_seqs": args.max_seqs, "capacity": capacities, "attainment": plan.arrivals.attainment}
    if args.json:
        write_json(args.json, "engine", results, facts)
    if args.html:
        write_html(args.html, "engine", results, facts)
    return 1 if any(result.summary.errors for result in results) else 0


def _speculation(plan: Plan, args: Namespace) -> SpeculationConfig:
    """What the engine is started with: a draft model or early exit, if one is to be measured."""
    if "early_exit" in plan.speculation:
        return SpeculationConfig("early_exit", layers=args.exit_layers)
    if "draft" in plan.speculation:
        return SpeculationConfig("draft", args.draft_model, args.draft_quantization)
    return SpeculationConfig()


def _speculations(plan: Plan, scheduler: Scheduler) -> dict[str, Speculation | None]:
    from penstock.speculative.suffix import SuffixDrafter

    most = SpeculationConfig().max_tokens
    known = {"off": None, "suffix": Speculation(SuffixDrafter(), scheduler.times, most)}
    return {method: known.get(method, scheduler.speculation) for method in plan.speculation}


def _start(model: str, config: EngineConfig) -> tuple[Scheduler, LoadedExecutor, EngineInfo]:
    from penstock.runner.progress import LoadProgress  # numpy, and torch where it is needed, from here on
    from penstock.runner.startup import start

    with tempfile.TemporaryDirectory() as folder:
        name = model.removeprefix("dummy:")
        if model.startswith("dummy:") and name in ARCHITECTURES:
            model = f"dummy:{write_architecture(name, Path(folder) / name)}"
        return start(model, config, LoadProgress(sys.stderr))


def _placement(config: EngineConfig) -> tuple[DeviceKind, str]:
    """Where "auto" has led."""
    torch = sys.modules.get("torch")  # the native CPU kernels do without it
    device: DeviceKind = "cuda" if config.device != "cpu" and torch and torch.cuda.is_available() else "cpu"
    if config.quantization not in ("auto", "none"):
        return device, config.quantization
    if config.dtype != "auto":
        return device, config.dtype
    if torch is None and config.quantization == "auto":
        return device, "int8"
    return device, "float32" if torch and device == "cpu" else "bfloat16"
