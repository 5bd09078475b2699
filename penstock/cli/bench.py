"""`penstock bench engine` and `penstock bench serve`: the options; the work is in `penstock.bench`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, get_args

from penstock.core.config import DEFAULT_MODEL, Device, Dtype, Quantization

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

WORKLOADS_HELP = "NAME[,NAME...]: {names} or slo_mix@RATE (Poisson arrivals a second with latency objectives)"


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("bench", help="measure an engine in this process, or a server over HTTP")
    kinds = parser.add_subparsers(dest="benchmark", required=True, metavar="engine|serve")
    _add_engine(kinds)
    _add_serve(kinds)


def _add_engine(kinds: Subparsers) -> None:
    parser = kinds.add_parser("engine", help="workloads straight through the engine, without HTTP")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as for serve; dummy:NAME for random weights")
    parser.add_argument("--workload", default="cpu_single,cpu_prefill,cpu_clients8", help=_workloads_help())
    parser.add_argument("--seeds", type=positive_int, default=3, help="runs per workload; the best one counts")
    parser.add_argument("--device", choices=get_args(Device), default="auto")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="auto")
    parser.add_argument("--quantization", choices=get_args(Quantization), default="auto")
    parser.add_argument("--max-model-len", type=positive_int, help="prompt plus output of one request")
    parser.add_argument("--max-seqs", type=positive_int, default=512, help="sequences in one step (default 512)")
    parser.add_argument("--max-step-tokens", type=positive_int, help="tokens in one step")
    parser.add_argument("--json", metavar="FILE", help="write all figures here")
    parser.set_defaults(run=_run_engine)


def _add_serve(kinds: Subparsers) -> None:
    parser = kinds.add_parser("serve", help="load on any OpenAI-compatible server")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="root of the server (default %(default)s)")
    parser.add_argument("--model", help="name in the requests; default: the first of /v1/models")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--workload", help=_workloads_help())
    parser.add_argument("--prompt-tokens", type=positive_int, default=128, help="without --workload (default 128)")
    parser.add_argument("--output-tokens", type=positive_int, default=128, help="without --workload (default 128)")
    parser.add_argument("--concurrency", type=positive_int, help="closed loop: requests in flight (default 8)")
    parser.add_argument("--requests", type=positive_int, help="closed loop: how many in all (default 4 per client)")
    parser.add_argument("--rate", type=positive_float, help="open loop: Poisson arrivals per second")
    parser.add_argument("--duration", type=positive_float, default=60.0, help="open loop: seconds (default 60)")
    parser.add_argument("--prompts", choices=("words", "ids"), default="words", help="text, or raw token ids")
    parser.add_argument("--chat", action="store_true", help="use /v1/chat/completions instead of /v1/completions")
    parser.add_argument("--seed", type=int, help="of the prompts; default: a fresh one, so no cache helps")
    parser.add_argument("--timeout", type=positive_float, default=600.0, help="seconds without a byte (default 600)")
    parser.add_argument("--json", metavar="FILE", help="write all figures here")
    parser.set_defaults(run=_run_serve)


def _workloads_help() -> str:
    from penstock.bench.workloads import WORKLOADS

    return WORKLOADS_HELP.format(names=", ".join(WORKLOADS))


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _run_engine(args: argparse.Namespace) -> int:
    from penstock.bench import engine

    return engine.run(args)


def _run_serve(args: argparse.Namespace) -> int:
    from penstock.bench import serve

    return serve.run(args)
