"""`penstock chaos`: the options; the work is in `penstock.bench.chaos`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli.bench import positive_float, positive_int
from penstock.cli.environment import add_server_arguments, output_file

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_COUNT = 20


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "chaos",
        help="break replicas of a running server under load, and see what its clients notice",
        description="Kills, freezes, slows and cuts off the replicas of a running server under a load of streams, and "
        "compares every answer with the one that the server gives when nothing is broken. Needs an admin key. Exit "
        "code 1 if a stream failed, lost or repeated a token, or changed its text.",
    )
    add_server_arguments(parser)
    parser.add_argument(
        "--tenant-key", metavar="KEY", help="for the load, where the server has tenants: admin keys cannot generate"
    )
    parser.add_argument("--model", help="as clients call it; default: the first one")
    parser.add_argument(
        "--faults",
        type=fault_kinds,
        default="kill,freeze,slow,cut",
        metavar="FAULT[,FAULT...]",
        help="kill: SIGKILL; freeze: SIGSTOP; slow: stopped four fifths of the time; cut: its connection goes dead "
        "(default %(default)s)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--count", type=positive_int, help=f"how many faults in all (default {DEFAULT_COUNT})")
    length.add_argument("--seconds", type=positive_float, metavar="S", help="for how long, instead of how many")
    parser.add_argument("--streams", type=positive_int, default=16, help="in flight at any time (default %(default)s)")
    parser.add_argument(
        "--output-tokens", type=positive_int, default=64, metavar="N", help="of an answer at most (default %(default)s)"
    )
    parser.add_argument(
        "--interval",
        type=positive_float,
        default=1.0,
        metavar="S",
        help="mean pause between a recovery and the next fault (default %(default)s)",
    )
    parser.add_argument(
        "--slow-seconds", type=positive_float, default=3.0, metavar="S", help="of a slow replica (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, help="of the requests and of the order of faults; default: a fresh one")
    parser.add_argument(
        "--timeout", type=positive_float, default=120.0, help="seconds without a byte (default %(default)s)"
    )
    parser.add_argument(
        "--tolerate-changed-text",
        action="store_true",
        help="pass although texts differ: for servers that do not repeat their own answers, as GPUs without "
        "deterministic kernels",
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures here")
    parser.add_argument(
        "--html", type=output_file, metavar="FILE", help="write a report with a plot here, complete in one file"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from penstock.bench.chaos.run import run as run_chaos

    if args.count is None and args.seconds is None:
        args.count = DEFAULT_COUNT
    return run_chaos(args)


def fault_kinds(text: str) -> list[str]:
    from penstock.bench.chaos.faults import FAULTS

    kinds = list(dict.fromkeys(text.split(",")))
    if unknown := [kind for kind in kinds if kind not in FAULTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(FAULTS)}")
    return kinds
