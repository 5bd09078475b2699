"""`penstock bench engine` and `penstock bench serve`: the options; the work is in `penstock.bench`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, get_args

from penstock.checkpoint.source import DEFAULT_MODEL
from penstock.cli.environment import add_server_arguments, output_file
from penstock.engine.settings import Device, Dtype, KVDtype, Quantization, Scheduling, SpeculationMethod

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("bench", help="measure an engine in this process, or a server over HTTP")
    kinds = parser.add_subparsers(dest="benchmark", required=True, metavar="engine|serve")
    _add_engine(kinds)
    _add_serve(kinds)


def _add_engine(kinds: Subparsers) -> None:
    parser = kinds.add_parser("engine", help="workloads straight through the engine, without HTTP")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as for serve; dummy:NAME for random weights")
    parser.add_argument("--workload", help=f"{_workloads_help()} (default cpu_single,cpu_prefill,cpu_clients8)")
    parser.add_argument(
        "--seeds",
        type=positive_int,
        help="runs per workload (default 3, the best one counts; mixes 1, all of them count)",
    )
    parser.add_argument(
        "--scheduling",
        type=scheduling_modes,
        default=["deadline"],
        metavar="MODE[,MODE]",
        help="deadline, fcfs, or both interleaved to compare them (default deadline)",
    )
    parser.add_argument(
        "--sampling",
        type=sampling_kinds,
        default=["greedy"],
        metavar="KIND[,KIND...]",
        help=f"{_sampling_help()}, or several interleaved to compare them with the first (default greedy)",
    )
    parser.add_argument(
        "--speculation",
        type=speculation_methods,
        default=["off"],
        metavar="METHOD[,METHOD...]",
        help="off, suffix, draft or early_exit, or several interleaved to compare them with the first (default off)",
    )
    parser.add_argument("--draft-model", metavar="MODEL", default="", help="for --speculation draft")
    parser.add_argument("--draft-quantization", choices=("auto", "none", "int8", "int4"), default="auto")
    parser.add_argument("--exit-layers", type=int, metavar="N", help="for --speculation early_exit")
    parser.add_argument(
        "--adapters",
        type=adapter_counts,
        default=[0],
        metavar="N[,N...]",
        help="LoRA adapters with random weights that requests use in turn, or several numbers interleaved to compare "
        "them with the first (default 0)",
    )
    parser.add_argument("--adapter-rank", type=positive_int, default=16, help="for --adapters (default 16)")
    _add_open_loop(parser)
    parser.add_argument("--device", choices=get_args(Device), default="auto")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="auto")
    parser.add_argument("--quantization", choices=get_args(Quantization), default="auto")
    parser.add_argument("--kv-dtype", choices=get_args(KVDtype), default="auto", help="of the KV cache")
    parser.add_argument("--deterministic", action="store_true", help="the same bits of a request in any batch")
    parser.add_argument("--max-model-len", type=positive_int, help="prompt plus output of one request")
    parser.add_argument("--max-seqs", type=positive_int, default=512, help="sequences in one step (default 512)")
    parser.add_argument("--max-step-tokens", type=positive_int, help="tokens in one step")
    parser.add_argument("--kv-memory-gib", type=positive_float, help="size of the KV cache")
    _add_report(parser)
    parser.set_defaults(run=_run_engine)


def _add_serve(kinds: Subparsers) -> None:
    parser = kinds.add_parser("serve", help="load on any OpenAI-compatible server")
    add_server_arguments(parser)
    parser.add_argument("--model", help="name in the requests; default: the first of /v1/models")
    parser.add_argument(
        "--tenant-key",
        action="append",
        type=tenant_key,
        default=[],
        metavar="TENANT=KEY",
        help="the key of a tenant that a trace names; may be repeated",
    )
    parser.add_argument("--workload", help=_workloads_help())
    parser.add_argument("--prompt-tokens", type=positive_int, default=128, help="without --workload (default 128)")
    parser.add_argument("--output-tokens", type=positive_int, default=128, help="without --workload (default 128)")
    parser.add_argument("--concurrency", type=positive_int, help="closed loop: requests in flight (default 8)")
    parser.add_argument("--requests", type=positive_int, help="closed loop: how many in all (default 4 per client)")
    _add_open_loop(parser)
    parser.add_argument(
        "--send-classes", action="store_true", help="name the classes of slo_mix to the server too; it must know them"
    )
    parser.add_argument("--prompts", choices=("words", "ids"), default="words", help="text, or raw token ids")
    parser.add_argument("--chat", action="store_true", help="use /v1/chat/completions instead of /v1/completions")
    parser.add_argument("--seed", type=int, help="of the prompts; default: a fresh one, so no cache helps")
    parser.add_argument("--timeout", type=positive_float, default=600.0, help="seconds without a byte (default 600)")
    _add_report(parser)
    parser.set_defaults(run=_run_serve)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--targets", action="store_true", help="show goals and the best peers beside the results, from other machines"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures here")
    parser.add_argument(
        "--html", type=output_file, metavar="FILE", help="write a report with plots here, complete in one file"
    )


def _add_open_loop(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("open loop", "requests arrive whatever has become of the others")
    group.add_argument("--rate", type=rates, metavar="R[,R...]", help="arrivals a second, of one run or several")
    group.add_argument("--seconds", type=positive_float, default=60.0, help="of arrivals (default 60)")
    group.add_argument(
        "--arrivals",
        choices=("poisson", "bursts"),
        default="poisson",
        help="bursts: 2 seconds at three times the rate, then 8 at half of it, and again",
    )
    group.add_argument("--trace", metavar="FILE.jsonl", help="requests with their times; see docs/benchmarks.md")
    group.add_argument(
        "--mix", metavar="CLASS=SHARE[,...]", help="classes of requests, as in interactive=0.9,batch=0.1"
    )
    group.add_argument(
        "--objectives",
        metavar="CLASS=TTFT/ITL[,...]",
        help="in ms, as in short=200/50,long=4000/50; - promises nothing (default: the workload's own, or with --mix "
        "what the server promises)",
    )
    group.add_argument("--objective-scale", type=positive_float, default=1.0, help="multiplies all objectives")
    group.add_argument("--find-capacity", action="store_true", help="search the highest rate that holds the attainment")
    group.add_argument("--attainment", type=share, default=0.99, help="share of requests that must meet (default 0.99)")
    group.add_argument("--probes", type=positive_int, default=10, help="rates tried at most (default 10)")


def _workloads_help() -> str:
    from penstock.bench.workloads import MIXES, WORKLOADS

    return f"NAME[,NAME...]: {', '.join(WORKLOADS)}; {', '.join(MIXES)} (arrivals at a rate, with latency objectives)"


def _sampling_help() -> str:
    from penstock.bench.sampling import SAMPLING

    return ", ".join(SAMPLING)


def rates(text: str) -> list[float]:
    return [positive_float(part) for part in text.split(",")]


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share between 0 and 1")
    return value


def tenant_key(text: str) -> tuple[str, str]:
    tenant, _, key = text.partition("=")
    if not tenant or not key:
        raise argparse.ArgumentTypeError(f"{text} does not look like TENANT=KEY")
    return tenant, key


def scheduling_modes(text: str) -> list[str]:
    modes = text.split(",")
    if not set(modes) <= set(get_args(Scheduling)) or len(set(modes)) < len(modes):
        raise argparse.ArgumentTypeError(f"{text} is not {' or '.join(get_args(Scheduling))}, or both once")
    return modes


def speculation_methods(text: str) -> list[str]:
    methods = text.split(",")
    if not set(methods) <= set(get_args(SpeculationMethod)) or len(set(methods)) < len(methods):
        raise argparse.ArgumentTypeError(f"{text} is not {' or '.join(get_args(SpeculationMethod))}, each once")
    if {"draft", "early_exit"} <= set(methods):
        raise argparse.ArgumentTypeError("draft and early_exit are measured one at a time")
    return methods


def adapter_counts(text: str) -> list[int]:
    counts = [int(number) for number in text.split(",")]
    if min(counts) < 0 or len(set(counts)) < len(counts):
        raise argparse.ArgumentTypeError(f"{text} is not a list of numbers, each once")
    return counts


def sampling_kinds(text: str) -> list[str]:
    from penstock.bench.sampling import SAMPLING

    kinds = text.split(",")
    if not set(kinds) <= set(SAMPLING) or len(set(kinds)) < len(kinds):
        raise argparse.ArgumentTypeError(f"{text} is not one of {', '.join(SAMPLING)}, or several of them once each")
    return kinds


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
