"""Penstock beside llama.cpp, vLLM, OpenVINO GenAI and transformers on this machine's CPU, with the same model and work.

    python benchmarks/cpu_peers.py --install-only        # once; up to an hour on two cores, 8 GB
    python benchmarks/cpu_peers.py --rounds 3 --json peers.json

Every peer is installed into an environment of its own outside this checkout. Rounds are interleaved: each starts every
system once, so that a slow spell of the machine hits all of them; ratios are taken within a round. A peer that cannot
be installed or started is reported with its log and skipped. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from peers.cases import CASES, COLUMNS, Case
from peers.process import PeerError, PeerProcess, end_on_signal, running
from peers.sessions import HttpSession, PipeSession, Session, load_of
from peers.systems import Launch, System, all_systems
from peers.tables import Figures, figures_table, ratios_table
from peers.workshop import InstallError

from penstock.bench.measure import Summary
from penstock.bench.report import describe_machine
from penstock.bench.serve import plan
from penstock.core import onednn
from penstock.core.errors import PenstockError

PEERS_DIR = Path("~/.cache/penstock/peers")
MIB = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    cases = [case.shortened() if args.smoke else case for case in chosen_cases(args.workloads)]
    peers_dir = args.peers_dir.expanduser()
    if line := onednn.cap_onednn():
        say(line)
    systems = chosen(all_systems(peers_dir, args.penstock_args), args.only, args.skip)
    ready = [system for system in systems if installed(system)]
    if args.install_only:
        return 0 if len(ready) == len(systems) else 1
    if not ready:
        raise SystemExit("cpu_peers: nothing to measure")
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    comparison = Comparison(ready, cases, seed, peers_dir / "logs", args.json)
    try:
        asyncio.run(comparison.run(args.rounds))
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("interrupted; the rounds so far:")
    print(comparison.report())
    return 0 if any(any(rounds) for rounds in comparison.rounds.values()) else 1


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-dir", type=Path, default=PEERS_DIR, help=f"where peers are installed ({PEERS_DIR})")
    names = "names or their beginnings, as in 'llama.cpp,vllm'"
    parser.add_argument("--only", type=_names, default=[], metavar="A,B", help=f"these systems alone: {names}")
    parser.add_argument("--skip", type=_names, default=[], metavar="A,B", help="all but these systems")
    workloads = ", ".join(case.name for case in CASES)
    parser.add_argument("--workloads", type=_names, default=[], metavar="A,B", help=f"of {workloads} (default all)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each system is started and measured (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures, written after every system")
    parser.add_argument("--penstock-args", default="", metavar="ARGS", help="further flags for `penstock serve`")
    parser.add_argument("--seed", type=int, help="of the prompts (default: a fresh one)")
    parser.add_argument("--install-only", action="store_true", help="install the peers and measure nothing")
    parser.add_argument("--smoke", action="store_true", help="a few tokens of each: shows what works, not how fast")
    return parser.parse_args(argv)


def _names(text: str) -> list[str]:
    return [name.strip().lower() for name in text.split(",") if name.strip()]


def chosen(systems: Sequence[System], only: Sequence[str], skip: Sequence[str]) -> list[System]:
    unknown = [name for name in (*only, *skip) if not any(_matches(system, [name]) for system in systems)]
    if unknown:
        known = ", ".join(system.name for system in systems)
        raise SystemExit(f"cpu_peers: no system begins with {', '.join(map(repr, unknown))}; there are: {known}")
    return [system for system in systems if (not only or _matches(system, only)) and not _matches(system, skip)]


def _matches(system: System, names: Iterable[str]) -> bool:
    return any(system.name.lower().startswith(name) for name in names)


def chosen_cases(names: Sequence[str]) -> list[Case]:
    known = {case.name: case for case in CASES}
    if unknown := set(names) - set(known):
        raise SystemExit(f"cpu_peers: no workload {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    return [case for case in CASES if not names or case.name in names]


def installed(system: System) -> bool:
    say(f"{system.name}: checking the installation")
    try:
        system.install()
    except (InstallError, PenstockError) as error:
        say(f"{system.name}: SKIPPED, not installed: {error}")
        return False
    return True


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


class Comparison:
    """The rounds so far, by system; a round in which a system failed has what it reached before, or nothing."""

    def __init__(self, systems: Sequence[System], cases: Sequence[Case], seed: int, logs: Path, json: Path | None):
        self.rounds: dict[str, list[Figures]] = {system.name: [] for system in systems}
        self._systems, self._cases, self._seed = systems, cases, seed
        self._logs, self._json = logs, json

    async def run(self, rounds: int) -> None:
        end_on_signal()
        for number in range(rounds):
            for system in self._systems:
                say(f"round {number + 1} of {rounds}: {system.name}")
                figures: Figures = {}
                self.rounds[system.name].append(figures)
                try:
                    await self._measure(system, self._seed + 1000 * number, figures)
                except PeerError as error:
                    say(f"{system.name}: FAILED in this round: {error}")
                self._save()

    async def _measure(self, system: System, seed: int, figures: Figures) -> None:
        """Into `figures` as they come, so that what precedes a failure is kept."""
        cold_starts: list[float] = []
        for launch in system.launches(self._cases):
            log = self._logs / f"{system.name.replace(' ', '-')}.log"
            async with running(launch.command, launch.environment, log, pipe=launch.port is None) as peer:
                session = await open_session(launch, peer, seed)
                cold_starts.append(session.cold_start)
                figures["cold"] = median(cold_starts)
                for case in launch.cases:
                    figures |= await measure_case(session, case, seed + 10 * self._cases.index(case))
                    figures["memory"] = max(figures.get("memory", 0.0), peer.resident_bytes() / MIB)
                await session.close()

    def _save(self) -> None:
        if self._json is None:
            return
        cases = {case.name: {"clients": case.clients, "requests": case.requests} for case in self._cases}
        report = {"machine": describe_machine(), "seed": self._seed, "cases": cases, "rounds": self.rounds}
        self._json.write_text(json.dumps(report, indent=2) + "\n")

    def report(self) -> str:
        own = next(iter(self.rounds))
        machine = describe_machine()
        about = f"{machine['cpu']}, {machine['cores']} cores; {max(map(len, self.rounds.values()))} rounds"
        ratios = [ratios_table(self.rounds, own)] if len(self.rounds) > 1 else []
        return "\n\n".join([about, figures_table(self.rounds), *ratios])


async def open_session(launch: Launch, peer: PeerProcess, seed: int) -> Session:
    if launch.port is None:
        return await PipeSession.open(peer, seed)
    return await HttpSession.open(peer, launch.port, seed)


async def measure_case(session: Session, case: Case, seed: int) -> Figures:
    await session.measure(case.warm_up(), seed + 1)
    summary = await session.measure(case, seed)
    if fault := fault_of(summary, case, seed):
        say(f"  {case.name}: no figure, {fault}")
        return {}
    figures = {key: value for key, value in case.figures(summary).items() if value is not None}
    say(f"  {case.name}: " + ", ".join(f"{COLUMNS[key].title} {value:,.1f}" for key, value in figures.items()))
    return figures


def fault_of(summary: Summary, case: Case, seed: int) -> str | None:
    """Why a run cannot be compared: requests failed, or outputs were not of the length asked for."""
    if summary.errors:
        return f"failed requests: {summary.errors}"
    wanted = sum(job.output_len for job in plan(case.workload, load_of(case, seed)))
    if summary.output_tokens != wanted:
        return f"{summary.output_tokens} output tokens instead of {wanted}"
    return None


if __name__ == "__main__":
    sys.exit(main())
