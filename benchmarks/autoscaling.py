"""Autoscaling policies over a day of requests on a virtual clock, beside a plan by somebody who knew the day before.

    python benchmarks/autoscaling.py                  # consumer day with jobs; 20 runs of two minutes of a core each
    python benchmarks/autoscaling.py office --seed 2  # another shape, another seed
    python benchmarks/autoscaling.py no-jobs          # nothing that happens at the same time every day
    python benchmarks/autoscaling.py --warmup 3       # replicas that come from a standby

Replicas are the engine's own scheduler and loop, requests go through the fleet's own routing policy, and the number of
replicas is decided by the scaler that a fleet would have; only the executor is a formula. To make a day last minutes,
an hour of it lasts 5 minutes and steps are large: 80 ms without a token, so that a replica serves two to three requests
a second. Warm-up and objectives are not scaled, which makes it harder: 20 s of warm-up are 4 minutes of such a day. The
forecast has seen the three days before, which differ from this one in level, noise and bursts. Last-value is shown with
several margins: what counts is its replica-hours where it misses no more objectives than the predictive policy.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from virtual_day import DAY_SECONDS, Result, Scenario, clairvoyant_plan, learnt_times, planned, scaled, static

from penstock.autoscaling.settings import AutoscaleConfig
from penstock.engine.step_time import StepTimes
from penstock.simulation.traffic import CONSUMER, OFFICE, Traffic


@dataclass(frozen=True, slots=True)
class Plan:
    """A clairvoyant's. What is searched is the capacity that the dynamic program believes a replica to have."""

    capacity: float
    price: float = 8.0

    def run(self, scenario: Scenario, times: StepTimes) -> Result:
        return planned(scenario, times, clairvoyant_plan(scenario, self.capacity, self.price))


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    margin: float

    def run(self, scenario: Scenario, times: StepTimes) -> Result:
        return scaled(scenario, times, self.name, self.margin)


@dataclass(frozen=True, slots=True)
class Static:
    replicas: int

    def run(self, scenario: Scenario, times: StepTimes) -> Result:
        return static(scenario, times, self.replicas)


Decider = Plan | Policy | Static
PLANS = [Plan(round(0.48 + 0.02 * step, 2)) for step in range(9)]
MARGIN = AutoscaleConfig().margin
PREDICTIVE, REACTIVE = Policy("predictive", MARGIN), Policy("reactive", MARGIN)
LAST_VALUES = [Policy("last_value", margin) for margin in (MARGIN, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0)]
ATTAINMENT = 0.99


KINDS = {"consumer": (CONSUMER, 10, 8.0), "office": (OFFICE, 10, 8.0), "no-jobs": (CONSUMER, 0, 16.0)}


def day_of(kind: str, seed: int, warmup: float = 20.0, peak: float = 24.0) -> Scenario:
    hours, jobs, bursts = KINDS[kind]
    traffic = Traffic(
        peak=peak,
        seed=seed,
        seconds=DAY_SECONDS,
        hours=hours,
        jobs=jobs,
        job_seconds=(40.0, 120.0),
        bursts=bursts,
        burst_ramp=(20.0, 60.0),
        burst_seconds=(40.0, 150.0),
        drift_seconds=300.0,
    )
    return Scenario(traffic, warmup=warmup)


def report(name: str, scenario: Scenario, result: Result, best: Result) -> None:
    print(
        f"{name:28} {result.attainment:10.2%} {result.requests - result.met:7} "
        f"{result.replica_seconds / 3600:13.2f} {result.replica_seconds / best.replica_seconds:14.2f} "
        f"{len(result.sizes) - 1:8} {result.flaps(scenario.config.down_cooldown_seconds):6}",
        flush=True,
    )


def run_one(scenario: Scenario, decider: Decider) -> Result:
    return decider.run(scenario, learnt_times())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=KINDS, default="consumer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warmup", type=float, default=20.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one for each core)")
    args = parser.parse_args()
    scenario = day_of(args.kind, args.seed, args.warmup)
    peak = Static(max(clairvoyant_plan(scenario, 0.56, 8.0)))
    deciders: list[Decider] = [*PLANS, PREDICTIVE, REACTIVE, *LAST_VALUES, peak]
    with ProcessPoolExecutor(args.jobs) as pool:
        results = dict(zip(deciders, pool.map(partial(run_one, scenario), deciders), strict=True))
    enough = [results[plan] for plan in PLANS if results[plan].attainment >= ATTAINMENT]
    assert enough, "no plan keeps the attainment: too few replicas are allowed"
    best = min(enough, key=lambda result: result.replica_seconds)
    print("policy                       attainment  missed  replica-hours  of clairvoyant  changes  flaps")
    report("clairvoyant", scenario, best, best)
    report(f"static, {peak.replicas} replicas", scenario, results[peak], best)
    for policy in (PREDICTIVE, REACTIVE, *LAST_VALUES):
        report(f"{policy.name}, margin {policy.margin}", scenario, results[policy], best)


if __name__ == "__main__":
    main()
