"""`penstock profile`: a trace of a running server, and where the time of its steps goes. Needs an admin key where the
server has tenants."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import TYPE_CHECKING, Any

from penstock.cli.environment import add_server_arguments, output_file
from penstock.cli.fleet import plain_console
from penstock.client.http import HttpClient, failure, openai_base

if TYPE_CHECKING:
    from rich.console import RenderableType

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_LONGEST_WAIT = 120.0  # seconds beside those that are recorded: for the profiler of a GPU to start, and for the trace


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("profile", help="record what a running server does, and where its time goes")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="to record (default %(default)s)")
    parser.add_argument(
        "--output",
        type=output_file,
        default="trace.json",
        metavar="FILE",
        help="the trace, for https://ui.perfetto.dev (default %(default)s)",
    )
    add_server_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    trace = asyncio.run(_take(args))
    args.output.write_bytes(trace)
    console = plain_console()
    summary = json.loads(trace)["summary"]
    for replica in summary["replicas"]:
        console.print(heading(replica))
        console.print(step_table(replica))
        for note in replica["notes"]:
            console.print(f"note: {note}")
        console.print()
    for note in summary["notes"]:
        console.print(f"note: {note}")
    console.print(f"{args.output} ({len(trace) / 1e6:.1f} MB): open it at https://ui.perfetto.dev")
    return 0


async def _take(args: argparse.Namespace) -> bytes:
    timeout = args.seconds + _LONGEST_WAIT
    async with HttpClient(openai_base(args.url), api_key=args.api_key, timeout=timeout) as http:
        response = await http.post(f"/admin/profile?seconds={args.seconds}", {})
        if response.status != 200:
            raise failure(http.url, response.status, response.error_message)
        return response.body


def heading(replica: dict[str, Any]) -> str:
    """What was measured, and against what."""
    lines = [
        f"{replica['replica']}: {replica['model']} on {replica['device']}",
        f"{replica['steps']} steps in {replica['seconds']:.1f} s, {replica['busy']:.0%} of which the engine had work; "
        f"a step takes {replica['step_seconds'] * 1e3:.2f} ms and has {replica['rows']:.1f} rows, "
        f"{replica['prefill_tokens']:.1f} prefill tokens, {replica['decode_tokens']:.1f} decode tokens; "
        f"{replica['waiting']:.1f} requests wait",
    ]
    bandwidth, peak = replica["bytes_per_second"], replica["flops_per_second"]
    if bandwidth and peak:
        lines.append(
            f"limits: {bandwidth / 1e9:.4g} GB/s, {peak / 1e12:.3g} TFLOP/s ({replica['limits_source']})",
        )
    return "\n".join(lines)


def step_table(replica: dict[str, Any]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("of a step", no_wrap=True)
    for name in ("ms", "share", "MB", "GFLOP", "limit ms", "of limit"):
        table.add_column(name, justify="right")
    for part in replica["kernels"]:
        table.add_row(*_row(part))
    if replica["engine"]:
        beside = "the engine's thread, beside the kernels:" if replica["overlapped"] else "the engine's thread:"
        table.add_row(beside)
    for part in replica["engine"]:
        table.add_row(*_row(part))
    return table


def _row(part: dict[str, Any]) -> list[str]:
    seconds, limit = part["seconds"], part["limit_seconds"]
    row = [part["name"], f"{seconds * 1e3:.3f}", f"{part['share']:.1%}"]
    if part["bytes"] is None:
        return row
    row += [f"{part['bytes'] / 1e6:.2f}", f"{part['flops'] / 1e9:.3f}"]
    return row if limit is None or not seconds else [*row, f"{limit * 1e3:.3f}", f"{limit / seconds:.0%}"]
