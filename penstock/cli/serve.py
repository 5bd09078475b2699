"""`penstock serve`, the composition root: from the settings it builds a gateway in front of fleets of workers."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from penstock.checkpoint.source import DEFAULT_MODEL
from penstock.cli.environment import API_KEY
from penstock.cli.settings import file_and_environment
from penstock.engine.settings import Device, Dtype, KVDtype, Quantization
from penstock.settings import Settings, settings_from_mapping

if TYPE_CHECKING:
    from penstock.checkpoint.source import Checkpoint
    from penstock.fleet.fleet import Fleet
    from penstock.fleet.launcher import Launcher
    from penstock.fleet.settings import ModelConfig
    from penstock.text.tokenizer import Tokenizer

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

log = logging.getLogger(__name__)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("serve", help="serve a model over the OpenAI API")
    parser.add_argument(
        "model",
        nargs="?",
        help=f"built-in name, folder, GGUF file, Hugging Face id or dummy:FOLDER (default {DEFAULT_MODEL})",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML with model, engine and server; see 'penstock check'")
    server = parser.add_argument_group("server")
    server.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    server.add_argument("--port", type=int, help="port to listen on, 0 for any free one (default 8000)")
    server.add_argument("--replicas", type=int, metavar="N", help="worker processes that serve it (default 1)")
    server.add_argument("--served-model-name", metavar="NAME", help="what clients call the model")
    server.add_argument("--open", action="store_true", default=None, help="need no key, even where others can connect")
    server.add_argument("--state", metavar="URL", help="memory, sqlite:///PATH or redis://HOST:PORT/DB")
    server.add_argument("--log-level", help="debug, info, warning or error (default info)")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--device", choices=get_args(Device), help="default: cuda if there is one")
    engine.add_argument("--dtype", choices=get_args(Dtype), help="default: float32 on CPU, bfloat16 on CUDA")
    engine.add_argument(
        "--quantization", choices=get_args(Quantization), help="of the weights; default: int8 on CPU, none on CUDA"
    )
    engine.add_argument("--max-model-len", type=int, metavar="TOKENS", help="prompt plus output of one request")
    engine.add_argument("--max-seqs", type=int, metavar="N", help="sequences computed together (default 256)")
    engine.add_argument("--max-step-tokens", type=int, metavar="TOKENS", help="tokens computed together")
    engine.add_argument(
        "--kv-dtype",
        choices=get_args(KVDtype),
        help="of the KV cache; half the bytes: int8 on CPU, where it is the default beside int8 and int4, fp8 on CUDA",
    )
    engine.add_argument("--kv-memory-gib", type=float, metavar="GIB", help="size of the KV cache")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = read_settings(args)
    import uvloop

    from penstock.observability.logging import configure_logging

    configure_logging(settings.server.log_level)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings))


def read_settings(args: argparse.Namespace) -> Settings:
    """Merge the settings: flags win over environment variables, and those over the file."""
    values = file_and_environment(args.config)
    flags: dict[str, dict[str, Any]] = {
        "server": {name: getattr(args, name) for name in ("host", "port", "served_model_name", "open", "log_level")},
        "engine": {
            name: getattr(args, name)
            for name in (
                "device",
                "dtype",
                "quantization",
                "max_model_len",
                "max_seqs",
                "max_step_tokens",
                "kv_memory_gib",
                "kv_dtype",
            )
        },
    }
    merged = dict(values)
    for section, given in flags.items():
        given = {name: value for name, value in given.items() if value is not None}
        if given:
            merged[section] = {**(values.get(section) or {}), **given}
    for name in ("model", "replicas", "state"):
        if getattr(args, name) is not None:
            merged[name] = getattr(args, name)
    return settings_from_mapping(merged)


async def _serve(settings: Settings) -> int:
    from penstock.cli.requirements import check_requirements
    from penstock.fleet.build import launchers
    from penstock.fleet.fleet import Fleet
    from penstock.gateway.http.listener import bind

    server = settings.server
    check_requirements(settings)
    listener = bind(server.host, server.port)
    fleets = {
        name: Fleet(name or Path(config.model or "").stem, config.routing, config.failover)
        for name, config in settings.served.items()
    }
    _end_at_signals(list(fleets.values()))
    async with AsyncExitStack() as stack:
        starts = []
        for name, config in settings.served.items():
            stack.push_async_callback(fleets[name].stop)
            # The longest part of a cold start, so all else is done meanwhile. Upstreams need a tokenizer first.
            checkpoint = config.model or name
            ready = None if config.upstreams else launchers(checkpoint, config, None, server.log_level)
            starting = asyncio.create_task(_start(fleets[name], checkpoint, config, ready, server.log_level))
            stack.callback(starting.cancel)
            starts.append(starting)
        await asyncio.sleep(0)
        return await _serve_fleets(settings, fleets, starts, listener, stack)


async def _serve_fleets(
    settings: Settings,
    fleets: Mapping[str, Fleet],
    starts: Sequence[asyncio.Task[None]],
    listener: socket.socket,
    stack: AsyncExitStack,
) -> int:
    from penstock.cache.build import open_cache
    from penstock.fleet.control import FleetControl
    from penstock.fleet.metrics import FleetMetrics
    from penstock.gateway.api.models import ServedModel
    from penstock.gateway.app import create_app
    from penstock.gateway.http.server import serve, tune_interpreter
    from penstock.gateway.tenancy.tenants import open_directory
    from penstock.state.open import open_store

    store = await stack.enter_async_context(open_store(settings.state))
    directory = await stack.enter_async_context(open_directory(settings, store))
    cache = await stack.enter_async_context(open_cache(settings.cache, settings.state))
    models = []
    for name, config in settings.served.items():
        checkpoint, tokenizer = await asyncio.to_thread(_tokenizer, config.model or name)
        names = [name or checkpoint.name, *config.aliases]
        models.append(ServedModel(names, tokenizer, cache.before(fleets[name], tokenizer)))
    configs = dict(zip((model.names[0] for model in models), settings.served.values(), strict=True))
    control = FleetControl(dict(zip(configs, fleets.values(), strict=True)), configs, settings.server.log_level)
    collectors = [*cache.collectors, FleetMetrics(fleets.values())]
    app = create_app(models, settings, directory=directory, collectors=collectors, control=control)
    await asyncio.gather(*starts)

    virtual = [name for name, config in settings.models.items() if config.is_virtual]

    def announce(host: str, port: int) -> None:
        _announce(host, port, [*(model.names[0] for model in models), *virtual], directory.open)

    tune_interpreter()
    warming = asyncio.create_task(app.long_requests.warm_up())
    stack.callback(warming.cancel)
    return await serve(app, listener, announce, settings.server.drain_seconds)


async def _start(
    fleet: Fleet, checkpoint: str, config: ModelConfig, ready: list[Launcher] | None, log_level: str
) -> None:
    from penstock.fleet.build import launchers

    if ready is None:
        _, tokenizer = await asyncio.to_thread(_tokenizer, checkpoint)
        ready = launchers(checkpoint, config, tokenizer, log_level)
    await fleet.start(ready)


def _tokenizer(model: str) -> tuple[Checkpoint, Tokenizer]:
    from penstock.checkpoint.source import resolve
    from penstock.text.tokenizer import load_tokenizer

    checkpoint = resolve(model)
    return checkpoint, load_tokenizer(checkpoint)


def _end_at_signals(fleets: Sequence[Fleet]) -> None:
    """Until the server drains at signals instead. Nothing can be lost yet, so nothing is waited for: a thread that
    downloads a model would take its time."""

    def end(sig: signal.Signals) -> None:
        for fleet in fleets:
            fleet.kill()
        print(f"penstock: ended by {sig.name} while starting", file=sys.stderr, flush=True)
        os._exit(128 + sig)

    for sig in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sig, end, sig)


def _announce(host: str, port: int, models: Sequence[str], open: bool) -> None:
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    body = json.dumps({"model": models[0], "messages": [{"role": "user", "content": "Hello!"}]})
    print(f"Penstock serves {', '.join(models)} at {url}\n\nTry it:\n  curl {url}/v1/chat/completions \\")
    if not open:
        print(f'    -H "Authorization: Bearer ${API_KEY}" \\')  # of 'penstock keys create'
    print(f"    -H 'Content-Type: application/json' \\\n    -d '{body}'\n", flush=True)
    sys.stdout.flush()
