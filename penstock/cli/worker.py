"""`penstock worker`: a worker for gateways on other machines, which name it in the `workers` of a model."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import signal
from typing import TYPE_CHECKING

from penstock.cli.serve import add_engine_arguments, add_log_arguments, engine_values, log_values
from penstock.cli.settings import file_and_environment, merged
from penstock.core.errors import StartupError
from penstock.core.machine import ending_signals, process_began, raise_file_limit
from penstock.core.start_times import StartTimes, listed
from penstock.settings import settings_from_mapping

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

log = logging.getLogger(__name__)

_ADDRESS = re.compile(r"(?:\[([0-9a-fA-F:]+)\]|([\w.-]+)):([0-9]{1,5})")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("worker", help="compute for gateways on other machines", description=__doc__)
    parser.add_argument("model", nargs="?", help="as for serve; default: that of the settings")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="where gateways connect")
    parser.add_argument("--config", metavar="FILE", help="YAML with model and engine")
    add_log_arguments(parser)
    add_engine_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from penstock.gateway.http.listener import bind
    from penstock.grammar.compiler import grammars_of
    from penstock.grammar.trial import Trials
    from penstock.lora.host_memory import adapters_of
    from penstock.observability.logging import configure_logging
    from penstock.worker.main import load, serve
    from penstock.worker.protocol import Start
    from penstock.worker.remote import SECRET, Port

    values = merged(file_and_environment(args.config), {"engine": engine_values(args), "server": log_values(args)})
    if args.model is not None:
        values["model"] = args.model
    settings = settings_from_mapping(values)
    raise_file_limit()
    configure_logging(settings.server.logs)
    address = _ADDRESS.fullmatch(args.listen)
    if address is None:
        raise StartupError(f"--listen must be HOST:PORT, not {args.listen!r}", param="listen")
    secret = os.environ.get(SECRET)
    if not secret:
        raise StartupError(f"set {SECRET} to the same secret here and at the gateways")
    listener = bind(address[1] or address[2], int(address[3]))
    for sig in ending_signals():
        if sig != signal.SIGTERM:
            signal.signal(sig, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    times = StartTimes(process_began())
    scheduler, executor, info = load(Start(settings.model, settings.engine, settings.server.logs), times)
    host, port = listener.getsockname()[:2]
    print(f"Penstock computes {info.model} at tcp://{host}:{port}", flush=True)
    log.info("started: %s", listed(times.seconds))
    gateways = Port(listener, secret)
    grammars = grammars_of(scheduler.limits, settings.model, trials=Trials())
    adapters = adapters_of(executor, settings.engine.max_adapter_rank, settings.engine.adapter_memory_gib)
    drain_seconds = settings.server.drain_seconds
    asyncio.run(serve(scheduler, executor, info, gateways, times.seconds, drain_seconds, grammars, adapters))
    return 0
