"""Generates arrival times and classes of requests: Poisson or bursts at a rate, or from a trace file."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.bench.workloads import Job, Source, Workload, mix_workload
from penstock.core.errors import InvalidRequest
from penstock.core.request import Objective

# Bursts: of every 10 seconds the first 2 bring arrivals at three times the mean rate, the other 8 at half of it.
BURST_PERIOD, BURST_SECONDS, BURST_FACTOR = 10.0, 2.0, 3.0
CALM_FACTOR = (BURST_PERIOD - BURST_SECONDS * BURST_FACTOR) / (BURST_PERIOD - BURST_SECONDS)

TRACE_FIELDS = ("at", "prompt_tokens", "prompt", "messages", "output_tokens", "class", "tenant")


def burst_time(time: float) -> float:
    """Bends the time axis so that evenly spread arrivals come in bursts. Whole periods stay what they are."""
    periods, rest = divmod(time, BURST_PERIOD)
    in_burst = BURST_SECONDS * BURST_FACTOR
    bent = rest / BURST_FACTOR if rest < in_burst else BURST_SECONDS + (rest - in_burst) / CALM_FACTOR
    return periods * BURST_PERIOD + bent


@dataclass(frozen=True, slots=True)
class ArrivalPlan:
    """What the command line says about open loops. Without rates, a trace or a search, loops are closed."""

    rates: list[float]
    seconds: float
    bursts: bool
    shares: dict[str, float]  # of classes; empty: the workload's own
    objectives: dict[str, Objective]
    objective_scale: float
    trace: str | None
    attainment: float | None  # search the highest rate that holds it
    probes: int

    @classmethod
    def from_args(cls, args: Namespace) -> ArrivalPlan:
        if args.trace and (args.rate or args.find_capacity or args.mix or args.workload):
            raise InvalidRequest(
                "a trace has its own arrivals, prompts and classes; drop rate, find-capacity, mix and workload",
                param="trace",
            )
        return cls(
            rates=args.rate or ([1.0] if args.find_capacity else []),
            seconds=args.seconds,
            bursts=args.arrivals == "bursts",
            shares=parse_shares(args.mix) if args.mix else {},
            objectives=parse_objectives(args.objectives) if args.objectives else {},
            objective_scale=args.objective_scale,
            trace=args.trace,
            attainment=args.attainment if args.find_capacity else None,
            probes=args.probes,
        )

    @property
    def usual_objectives(self) -> bool:
        return not self.objectives and not self.shares and self.objective_scale == 1 and not self.bursts

    def workload(self, base: Workload | str, rate: float) -> Workload:
        """A named mix, or the jobs of a closed workload over and over, arriving at this rate."""
        if isinstance(base, str):
            workload = mix_workload(base, rate, self.seconds)
        else:
            workload = poisson_workload(base, rate, self.seconds)
        if self.bursts:
            workload = in_bursts(workload)
        if self.shares:
            workload = with_classes(workload, self.shares)
        return self._promised(workload)

    def workloads(self, bases: Sequence[Workload | str]) -> list[Workload]:
        """What to run: the trace, or each base at each rate, or the bases as they are in a closed loop."""
        if self.trace:
            return [self._promised(trace_workload(self.trace))]
        if self.rates:
            return [self.workload(base, rate) for base in bases for rate in self.rates]
        return [base for base in bases if isinstance(base, Workload)]

    def _promised(self, workload: Workload) -> Workload:
        for name in self.objectives:
            if name not in workload.classes:
                theirs = ", ".join(workload.classes) or "no class; give them some by mix"
                raise InvalidRequest(
                    f"objectives: no request is of class {name!r}; all are of {theirs}", param="objectives"
                )
        promised = with_objectives(workload, self.objectives, self.objective_scale)
        if self.attainment is not None and not promised.objectives:
            raise InvalidRequest(
                "find-capacity needs objectives, as in --mix chat=1 --objectives chat=200/50", param="objectives"
            )
        return promised


def mix_needs_rate(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} needs arrivals per second: --rate 10, or --rate 5,10,20", param="rate")


def poisson_workload(base: Workload, rate: float, seconds: float) -> Workload:
    def generate(source: Source) -> list[Job]:
        rng, jobs = source.random, base.endless(source.random.getrandbits(48), source.vocab)
        arrivals = []
        now = rng.expovariate(rate)
        while now <= seconds:
            arrivals.append(replace(next(jobs), arrival=now))
            now += rng.expovariate(rate)
        return arrivals

    about = f"Poisson, {rate:g}/s for {seconds:g} s, {base.about}"
    return replace(base, name=f"{base.name}@{rate:g}", about=about, generate=generate, rate=rate)


def in_bursts(workload: Workload) -> Workload:
    def generate(source: Source) -> list[Job]:
        return [replace(job, arrival=burst_time(job.arrival)) for job in workload.generate(source)]

    return replace(workload, about=workload.about.replace("Poisson", "bursts"), generate=generate)


def with_classes(workload: Workload, shares: Mapping[str, float]) -> Workload:
    """Each job gets a class at random."""
    names, weights = list(shares), list(shares.values())

    def generate(source: Source) -> list[Job]:
        jobs = workload.generate(source)
        return [replace(job, kind=source.random.choices(names, weights)[0]) for job in jobs]

    return replace(workload, generate=generate, classes=names, objectives={})


def with_objectives(workload: Workload, given: Mapping[str, Objective], scale: float) -> Workload:
    """What was given replaces the workload's own; both are multiplied. The share that meets them is then the metric."""
    merged = {name: _scaled(objective, scale) for name, objective in {**workload.objectives, **given}.items()}
    return replace(workload, objectives=merged, metric="share_met" if merged else workload.metric)


def _scaled(objective: Objective, scale: float) -> Objective:
    ttft, itl = (None if limit is None else limit * scale for limit in (objective.ttft, objective.itl))
    return replace(objective, ttft=ttft, itl=itl)


def parse_objectives(text: str) -> dict[str, Objective]:
    """`short=200/50,long=4000/-`: TTFT and ITL in ms by class; `-` means that there is none."""
    objectives = {}
    for part in text.split(","):
        name, _, limits = part.partition("=")
        try:
            ttft, itl = (None if limit == "-" else float(limit) / 1e3 for limit in limits.split("/"))
        except ValueError as error:
            raise InvalidRequest(
                f"objectives: {part!r} must look like short=200/50 (TTFT and ITL in ms, - for none)", param="objectives"
            ) from error
        objectives[name] = Objective(name, ttft, itl)
    return objectives


def parse_shares(text: str) -> dict[str, float]:
    """`interactive=0.9,batch=0.1`: how often each class occurs; they need not sum to 1."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.partition("=")
        try:
            shares[name] = float(share)
        except ValueError:
            shares[name] = math.nan
        if not name or not 0 < shares[name] < math.inf:
            raise InvalidRequest(f"mix: {part!r} must look like interactive=0.9", param="mix")
    return shares


def trace_workload(path: str) -> Workload:
    """The requests of a JSONL file, one a line, in order of arrival. See docs/benchmarks.md for the fields."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"trace {path}: {error}", param="trace") from error
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    entries = sorted((_trace_entry(f"{path}, line {number}", line) for number, line in lines), key=lambda e: e["at"])
    if not entries:
        raise InvalidRequest(f"trace {path} holds no request", param="trace")
    first, span = entries[0]["at"], entries[-1]["at"] - entries[0]["at"]

    def generate(source: Source) -> list[Job]:
        return [
            Job(
                prompt=source.ids(entry.get("prompt_tokens", 0)),
                output_len=entry["output_tokens"],
                arrival=entry["at"] - first,
                kind=entry.get("class", ""),
                tenant=entry.get("tenant", ""),
                content=entry.get("prompt", entry.get("messages")),
            )
            for entry in entries
        ]

    rate = len(entries) / span if span else float(len(entries))
    about = f"{len(entries)} requests in {span:g} s"
    classes = sorted({entry["class"] for entry in entries if "class" in entry})
    return Workload(f"trace {Path(path).stem}", about, "output_tok_s", generate, rate=rate, classes=classes)


def _trace_entry(where: str, line: str) -> dict[str, Any]:
    def require(condition: bool, message: str) -> None:
        if not condition:
            raise InvalidRequest(f"{where}: {message}", param="trace")

    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where}: not JSON ({error})", param="trace") from error
    require(isinstance(entry, dict), "must be an object")
    for name in entry:
        require(name in TRACE_FIELDS, f"{name} is not a field; known: {', '.join(TRACE_FIELDS)}")
    at = entry.get("at")
    require(
        isinstance(at, int | float) and not isinstance(at, bool) and 0 <= at < math.inf, "at must be seconds from 0 on"
    )
    for name in ("output_tokens", "prompt_tokens"):
        value = entry.get(name)
        missing_is_fine = name == "prompt_tokens" and value is None
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        require(missing_is_fine or whole, f"{name} must be a whole number from 1 on")
    given = [name for name in ("prompt_tokens", "prompt", "messages") if entry.get(name) is not None]
    require(len(given) == 1, "give exactly one of prompt_tokens, prompt and messages")
    for name in ("prompt", "class", "tenant"):
        require(entry.get(name) is None or (isinstance(entry[name], str) and bool(entry[name])), f"{name} must be text")
    messages = entry.get("messages")
    fits = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    require(messages is None or bool(fits), "messages must be a list of objects")
    return {name: value for name, value in entry.items() if value is not None}
