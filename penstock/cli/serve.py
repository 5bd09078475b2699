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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from penstock.checkpoint.source import DEFAULT_MODEL
from penstock.cli import vllm_flags
from penstock.cli.checkpoints import for_others, label_of, tokenizer_of
from penstock.cli.environment import API_KEY, RAY_ADDRESS, ray_address
from penstock.cli.parser import Parser
from penstock.cli.settings import file_and_environment
from penstock.core.errors import StartupError
from penstock.core.machine import ending_signals, raise_file_limit
from penstock.engine.settings import Device, Dtype, KVDtype, Quantization
from penstock.observability.settings import LogFormat, LogLevel
from penstock.settings import Settings, settings_from_mapping

if TYPE_CHECKING:
    from penstock.cache.build import AnswerCache
    from penstock.cache.tier import Tier
    from penstock.core.engine import Task
    from penstock.fleet.build import LocalLaunchers, NewLauncher
    from penstock.fleet.control import FleetControl
    from penstock.fleet.fleet import Fleet
    from penstock.fleet.launcher import Launcher
    from penstock.fleet.ray.launcher import RayLaunchers
    from penstock.fleet.settings import ModelConfig
    from penstock.gateway.api.adapters import NamedAdapter
    from penstock.gateway.api.fleet import Control
    from penstock.gateway.api.models import ServedModel
    from penstock.gateway.api.siblings import Siblings
    from penstock.gateway.edge import Edge
    from penstock.gateway.settings import ServerConfig
    from penstock.state.store import Store

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

log = logging.getLogger(__name__)

Place = Literal["local", "ray"]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("serve", help="serve a model over the OpenAI API")
    if isinstance(parser, Parser):
        parser.instead_of = vllm_flags.instead_of
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    server.add_argument("--processes", type=int, metavar="N", help="gateway processes on the port (default 1)")
    server.add_argument("--served-model-name", metavar="NAME", help="what clients call the model")
    server.add_argument("--open", action="store_true", default=None, help="need no key, even where others can connect")
    server.add_argument("--state", metavar="URL", help="memory, sqlite:///PATH or redis://HOST:PORT/DB")
    add_log_arguments(server)
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--on", choices=get_args(Place), default="local", help="where replicas run (default local)")
    fleet.add_argument("--ray-address", metavar="HOST:PORT", help=f"head of the Ray cluster (default: {RAY_ADDRESS})")
    add_engine_arguments(parser)


def add_log_arguments(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--log-level", choices=get_args(LogLevel), help="default info")
    parser.add_argument("--log-format", choices=get_args(LogFormat), help="json: an object a line (default text)")


def log_values(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of logging that were given."""
    return {name: value for name in ("log_level", "log_format") if (value := getattr(args, name)) is not None}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument("--device", choices=get_args(Device), help="default: cuda if there is one")
    engine.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        help="of weights that are not quantised; default on CUDA: bfloat16. On CPU weights are int8 by default, and a "
        "dtype that is given turns that off",
    )
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


def engine_values(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's flags that were given."""
    names = (
        "device",
        "dtype",
        "quantization",
        "max_model_len",
        "max_seqs",
        "max_step_tokens",
        "kv_memory_gib",
        "kv_dtype",
    )
    return {name: value for name in names if (value := getattr(args, name)) is not None}


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What a gateway process has in common with the others."""

    store: Store | None  # None: it opens the one of the settings itself
    answers: Tier | None  # None: the state has them
    control: Control
    siblings: Siblings
    adapters: Sequence[NamedAdapter]  # that are there from the start
    on_ready: Callable[[Edge, FleetControl, AnswerCache, dict[str, Task], bool], None]


def run(args: argparse.Namespace) -> int:
    return serve_settings(read_values(args), args.on)


def serve_settings(values: dict[str, Any], on: Place) -> int:
    """`values` are the settings as a file holds them."""
    settings = settings_from_mapping(values)
    import uvloop

    from penstock.observability.logging import configure_logging

    raise_file_limit()
    configure_logging(settings.server.logs)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, values, on))


def read_settings(args: argparse.Namespace) -> Settings:
    return settings_from_mapping(read_values(args))


def read_values(args: argparse.Namespace) -> dict[str, Any]:
    """Merge the settings: flags win over environment variables, and those over the file."""
    values = file_and_environment(args.config)
    flags: dict[str, dict[str, Any]] = {
        "server": {name: getattr(args, name) for name in ("host", "port", "processes", "served_model_name", "open")}
        | log_values(args),
        "ray": {"address": args.ray_address},
        "engine": engine_values(args),
    }
    merged = dict(values)
    for section, given in flags.items():
        given = {name: value for name, value in given.items() if value is not None}
        if given:
            merged[section] = {**(values.get(section) or {}), **given}
    for name in ("model", "replicas", "state"):
        if getattr(args, name) is not None:
            merged[name] = getattr(args, name)
    return merged


def pinned_models(values: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """The same settings, in which models on the Hugging Face hub have their commit: replicas that are started later are
    of the same one, and start without asking the hub."""
    from penstock.checkpoint.source import pinned

    if not settings.models:
        return {**values, "model": pinned(settings.model)}
    models = dict(values["models"])
    for name, config in settings.served.items():
        models[name] = {**(models[name] or {}), "model": pinned(config.model or name)}
    return {**values, "models": models}


async def _serve(settings: Settings, values: dict[str, Any], on: Place) -> int:
    """`values` are the settings as a file holds them."""
    from penstock.cli.requirements import check_requirements

    check_requirements(settings, on)
    values = await asyncio.to_thread(pinned_models, values, settings)
    settings = settings_from_mapping(values)
    if settings.server.processes > 1 or (on == "ray" and settings.ray.gateways > 1):
        from penstock.cli.processes import serve_in_processes

        return await serve_in_processes(settings, values, on)
    return await _serve_here(settings, on)


async def _serve_here(settings: Settings, on: Place) -> int:
    from penstock.fleet.build import launchers
    from penstock.fleet.fleet import Fleet
    from penstock.gateway.http.listener import bind

    server = settings.server
    listener = bind(server.host, server.port)
    fleets = {
        name: Fleet(label_of(name, config), config.routing, config.failover, config.standby)
        for name, config in settings.served.items()
    }
    end_at_signals(list(fleets.values()))
    async with AsyncExitStack() as stack:
        new_launcher = (await stack.enter_async_context(launchers_on(on, settings))).replica
        starts = []
        for name, config in settings.served.items():
            stack.push_async_callback(fleets[name].stop)
            # The longest part of a cold start, so all else is done meanwhile. Others' replicas need a tokenizer first.
            checkpoint = config.model or name
            here = config.local_replicas and not config.upstreams
            ready = launchers(checkpoint, config, None, server.logs, new_launcher) if here else None
            starting = asyncio.create_task(_start(fleets[name], checkpoint, config, ready, server, new_launcher))
            stack.callback(starting.cancel)
            starts.append(starting)
        await asyncio.sleep(0)
        return await serve_fleets(settings, fleets, starts, listener, stack, new_launcher)


async def serve_fleets(
    settings: Settings,
    fleets: Mapping[str, Fleet],
    starts: Sequence[asyncio.Task[str]],
    listener: socket.socket,
    stack: AsyncExitStack,
    new_launcher: NewLauncher,
    shared: SharedParts | None = None,
) -> int:
    """Serve HTTP in this process, once these fleets have started. `shared`: it is one of several gateway processes."""
    from penstock.batches.place import open_batches
    from penstock.cache.build import open_cache
    from penstock.cli.autoscaling import autoscalers, running
    from penstock.cli.served_adapters import adapters_at_start
    from penstock.fleet.control import FleetControl
    from penstock.fleet.metrics import fleet_metrics
    from penstock.gateway.app import create_app
    from penstock.gateway.http.server import serve, tune_interpreter
    from penstock.gateway.queue_consumer import background_work
    from penstock.gateway.tenancy.tenants import open_directory
    from penstock.state.open import open_store

    opening = open_store(settings.state) if shared is None or shared.store is None else nullcontext(shared.store)
    store = await stack.enter_async_context(opening)
    directory = await stack.enter_async_context(open_directory(settings, store))
    answers = None if shared is None else shared.answers
    cache = await stack.enter_async_context(open_cache(settings.cache, settings.state, answers))
    batches = await stack.enter_async_context(open_batches(settings.batches, settings.state))
    models = [model async for model in _served_models(settings, fleets, cache)]
    configs = {fleets[name].model: config for name, config in settings.served.items()}
    own = FleetControl({f.model: f for f in fleets.values()}, configs, settings.server.logs, new_launcher)
    if shared is None:
        own.autoscalers = autoscalers(settings, fleets, own)
    app = create_app(
        models,
        settings,
        directory=directory,
        collectors=[*cache.collectors, *fleet_metrics(fleets.values(), own.autoscalers.values())],
        control=own if shared is None else shared.control,
        siblings=None if shared is None else shared.siblings,
        adapters=await adapters_at_start(settings) if shared is None else shared.adapters,
        cache=cache,
        batches=batches,
        profiler=own.profiler,
    )
    check_some_started(await asyncio.gather(*starts))
    await stack.enter_async_context(running(own.autoscalers.values()))
    await stack.enter_async_context(background_work(settings.consume, batches, app, directory))
    virtual = (name for name, config in settings.models.items() if config.is_virtual)
    names = {model.names[0]: model.engine.info.task for model in models} | dict.fromkeys(virtual, "generate")

    def on_ready(host: str, port: int) -> None:
        if shared is None:
            announce(settings.server, host, port, names, open=directory.open)
        else:
            shared.on_ready(app, own, cache, names, directory.open)

    tune_interpreter()
    stack.callback(asyncio.create_task(app.long_requests.warm_up()).cancel)
    return await serve(app, listener, on_ready, settings.server.drain_seconds, settings.server.tls)


async def _served_models(
    settings: Settings, fleets: Mapping[str, Fleet], cache: AnswerCache
) -> AsyncIterator[ServedModel]:
    from penstock.cli.served_adapters import adapter_base
    from penstock.gateway.api.models import ServedModel

    for name, config in settings.served.items():
        checkpoint, tokenizer = await asyncio.to_thread(tokenizer_of, config.model or name)
        names = [name or checkpoint.name, *config.aliases]
        base = adapter_base(checkpoint, config, tokenizer)
        yield ServedModel(names, tokenizer, cache.before(fleets[name], tokenizer), base)


@asynccontextmanager
async def launchers_on(on: Place, settings: Settings) -> AsyncIterator[LocalLaunchers | RayLaunchers]:
    """What makes the launchers of replicas that run there."""
    if on == "local":
        from penstock.fleet.build import LocalLaunchers

        yield LocalLaunchers()
    else:
        from penstock.fleet.ray.launcher import ray_launchers

        async with ray_launchers(replace(settings.ray, address=settings.ray.address or ray_address())) as launchers:
            yield launchers


async def _start(
    fleet: Fleet,
    checkpoint: str,
    config: ModelConfig,
    ready: list[Launcher] | None,
    server: ServerConfig,
    new_launcher: NewLauncher,
) -> str:
    from penstock.fleet.build import launchers, start

    expected = None
    if ready is None:
        tokenizer, expected = await asyncio.to_thread(for_others, checkpoint, config)
        ready = launchers(checkpoint, config, tokenizer, server.logs, new_launcher)
    return await start(fleet, ready, config, server.drain_seconds, expected=expected)


def check_some_started(unavailable: Sequence[str]) -> None:
    """A model that others serve may come later, and must not keep the rest from being served. `unavailable`: of each
    model, why it does not serve yet, if so."""
    if all(unavailable):
        raise StartupError(f"no model can start: {'; '.join(unavailable)}")
    for reason in filter(None, unavailable):
        log.warning("serving without %s; it is tried again", reason)


def end_at_signals(fleets: Sequence[Fleet]) -> None:
    """Until the server drains at signals instead. Nothing can be lost yet, so nothing is waited for: a thread that
    downloads a model would take its time."""

    def end(sig: signal.Signals) -> None:
        for fleet in fleets:
            fleet.kill()
        logging.shutdown()
        with suppress(OSError):  # the terminal may be closed
            print(f"penstock: ended by {sig.name} while starting", file=sys.stderr, flush=True)
        os._exit(128 + sig)

    for sig in ending_signals():
        asyncio.get_running_loop().add_signal_handler(sig, end, sig)


_EXAMPLES: dict[Task, tuple[str, dict[str, Any]]] = {
    "generate": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}),
    "embed": ("/v1/embeddings", {"input": "Hello!"}),
    "score": ("/v1/rerank", {"query": "rain", "documents": ["The sun shines.", "It is raining."]}),
}


def url_of(host: str, port: int, *, tls: bool) -> str:
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def announce(server: ServerConfig, host: str, port: int, models: Mapping[str, Task], *, open: bool) -> None:
    """`host` and `port` as they are bound. For people, with a request to try; where programs read the log, an event."""
    url = url_of(host, port, tls=server.tls is not None)
    if server.log_format == "json":
        from penstock.observability.logging import log_event

        log_event(log, logging.INFO, "serving", {"models": ",".join(models), "url": url})
        return
    model, task = next(iter(models.items()))
    path, fields = _EXAMPLES[task]
    body = json.dumps({"model": model, **fields})
    print(f"Penstock serves {', '.join(models)} at {url}\n\nTry it:\n  curl {url}{path} \\")
    if not open:
        print(f'    -H "Authorization: Bearer ${API_KEY}" \\')  # of 'penstock keys create'
    print(f"    -H 'Content-Type: application/json' \\\n    -d '{body}'\n", flush=True)
    sys.stdout.flush()
