"""What is measured: the workloads of the CPU table, and the figures that are read from each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.bench.measure import Summary
from penstock.bench.workloads import WORKLOADS, Job, Source, Workload

SMOKE_OUTPUT = 8  # tokens


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    lower_wins: bool = False
    digits: int = 0


COLUMNS = {
    "single": Column("1 client tok/s"),
    "prefill": Column("prefill tok/s"),
    "clients8": Column("8 clients tok/s"),
    "gap8": Column("p99 ITL ms", lower_wins=True),
    "clients32": Column("32 clients tok/s"),
    "gap32": Column("p99 ITL ms", lower_wins=True),
    "prefix": Column("prefix tok/s"),
    "cold": Column("cold start s", lower_wins=True, digits=1),
    "memory": Column("resident MiB", lower_wins=True),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One workload as it is run here: in a closed loop, with a fixed number of requests."""

    workload: Workload
    clients: int
    requests: int
    longest: int  # tokens of a request, prompt and output
    figures: Callable[[Summary], dict[str, float | None]]

    @property
    def name(self) -> str:
        return self.workload.name

    def shortened(self) -> Case:
        """For a smoke run: as many clients, a request for each, few tokens. Checks that all works, measures nothing."""
        return replace(self, workload=_with_output(self.workload, SMOKE_OUTPUT), requests=self.clients)

    def warm_up(self) -> Case:
        """Two requests of the same length, so that what a peer sets up on first use is not in the figures."""
        return replace(self, workload=_with_output(self.workload, 2), clients=2, requests=2)


def _with_output(workload: Workload, longest: int) -> Workload:
    def generate(source: Source) -> list[Job]:
        return [replace(job, output_len=min(job.output_len, longest)) for job in workload.generate(source)]

    return replace(workload, generate=generate)


def _prefill_rate(summary: Summary) -> float | None:
    """Prompt tokens over the time to the first token, of the median request."""
    if summary.ttft_ms is None:
        return None
    return summary.prompt_tokens / summary.requests / (summary.ttft_ms.p50 / 1e3)


def _clients(count: int) -> Callable[[Summary], dict[str, float | None]]:
    def figures(summary: Summary) -> dict[str, float | None]:
        gap = summary.gap_ms.p99 if summary.gap_ms else None
        return {f"clients{count}": summary.output_tok_s, f"gap{count}": gap}

    return figures


CASES = [
    Case(WORKLOADS["cpu_single"], 1, 3, 256, lambda summary: {"single": summary.decode_tok_s}),
    Case(WORKLOADS["cpu_prefill"], 1, 5, 1025, lambda summary: {"prefill": _prefill_rate(summary)}),
    Case(WORKLOADS["cpu_clients8"], 8, 16, 256, _clients(8)),
    Case(WORKLOADS["cpu_clients32"], 32, 64, 256, _clients(32)),
    Case(WORKLOADS["cpu_prefix"], 32, 32, 832, lambda summary: {"prefix": summary.output_tok_s}),
]
