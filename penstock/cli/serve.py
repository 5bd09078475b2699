"""`penstock serve`, the composition root: from the settings it builds a gateway in front of a worker process."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, get_args

from penstock.checkpoint.source import DEFAULT_MODEL
from penstock.cli.environment import API_KEY
from penstock.cli.settings import file_and_environment
from penstock.engine.settings import Device, Dtype, KVDtype, Quantization
from penstock.settings import Settings, settings_from_mapping

if TYPE_CHECKING:
    from penstock.fleet.fleet import Fleet

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
    for name in ("model", "state"):
        if getattr(args, name) is not None:
            merged[name] = getattr(args, name)
    return settings_from_mapping(merged)


async def _serve(settings: Settings) -> int:
    from penstock.cli.requirements import check_requirements
    from penstock.fleet.fleet import Fleet
    from penstock.fleet.launcher import LocalLauncher
    from penstock.gateway.http.listener import bind
    from penstock.worker.protocol import Start

    server = settings.server
    check_requirements(settings)
    listener = bind(server.host, server.port)
    fleet = Fleet(settings.model)
    _end_at_signals(fleet)
    launcher = LocalLauncher(Start(settings.model, settings.engine, server.log_level))
    starting = asyncio.create_task(
        fleet.start([launcher])
    )  # the longest part of a cold start, so all else is done meanwhile
    await asyncio.sleep(0)
    try:
        from penstock.cache.build import open_cache
        from penstock.checkpoint.source import resolve
        from penstock.gateway.api.models import ServedModel
        from penstock.gateway.app import create_app
        from penstock.gateway.http.server import serve, tune_interpreter
        from penstock.gateway.tenancy.tenants import open_directory
        from penstock.state.open import open_store
        from penstock.text.tokenizer import load_tokenizer

        async with AsyncExitStack() as stack:
            store = await stack.enter_async_context(open_store(settings.state))
            directory = await stack.enter_async_context(open_directory(settings, store))
            checkpoint = await asyncio.to_thread(resolve, settings.model)
            tokenizer = await asyncio.to_thread(load_tokenizer, checkpoint)
            name = server.served_model_name or checkpoint.name
            caching = open_cache(fleet, tokenizer, settings.cache, settings.state)
            engine, collectors = await stack.enter_async_context(caching)
            model = ServedModel([name], tokenizer, engine)
            app = create_app([model], settings, directory=directory, collectors=collectors)
            await starting

            def announce(host: str, port: int) -> None:
                _announce(host, port, name, directory.open)

            tune_interpreter()
            warming = asyncio.create_task(app.long_requests.warm_up())
            stack.callback(warming.cancel)
            return await serve(app, listener, announce, server.drain_seconds)
    finally:
        starting.cancel()
        await fleet.stop()


def _end_at_signals(fleet: Fleet) -> None:
    """Until the server drains at signals instead. Nothing can be lost yet, so nothing is waited for: a thread that
    downloads a model would take its time."""

    def end(sig: signal.Signals) -> None:
        fleet.kill()
        print(f"penstock: ended by {sig.name} while starting", file=sys.stderr, flush=True)
        os._exit(128 + sig)

    for sig in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sig, end, sig)


def _announce(host: str, port: int, model: str, open: bool) -> None:
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    print(f"Penstock serves {model} at {url}\n\nTry it:\n  curl {url}/v1/chat/completions \\")
    if not open:
        print(f'    -H "Authorization: Bearer ${API_KEY}" \\')  # of 'penstock keys create'
    print(f"    -H 'Content-Type: application/json' \\\n    -d '{body}'\n", flush=True)
    sys.stdout.flush()
