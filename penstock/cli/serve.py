"""`penstock serve`: the composition root. Settings in, a gateway in front of a worker process out."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from penstock.core.config import DEFAULT_MODEL, Device, Dtype, Quantization, Settings, settings_from_mapping
from penstock.core.errors import StartupError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

log = logging.getLogger(__name__)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("serve", help="serve a model over the OpenAI API")
    parser.add_argument(
        "model",
        nargs="?",
        help=f"built-in name, folder, GGUF file, Hugging Face id or dummy:FOLDER (default {DEFAULT_MODEL})",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML with model, engine and server; flags win over it")
    server = parser.add_argument_group("server")
    server.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    server.add_argument("--port", type=int, help="port to listen on, 0 for any free one (default 8000)")
    server.add_argument("--served-model-name", metavar="NAME", help="what clients call the model")
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
    """The file, then the flags on top of it."""
    values = _read_yaml(args.config) if args.config else {}
    if not isinstance(values, dict):
        raise StartupError(f"{args.config} must hold a mapping with model, engine and server", param="config")
    flags: dict[str, dict[str, Any]] = {
        "server": {name: getattr(args, name) for name in ("host", "port", "served_model_name", "log_level")},
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
            )
        },
    }
    merged = dict(values)
    for section, given in flags.items():
        given = {name: value for name, value in given.items() if value is not None}
        if given:
            merged[section] = {**(values.get(section) or {}), **given}
    if args.model is not None:
        merged["model"] = args.model
    return settings_from_mapping(merged)


def _read_yaml(path: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(Path(path).read_text()) or {}
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}", param="config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} is not valid YAML: {error}", param="config") from error


async def _serve(settings: Settings) -> int:
    from penstock.worker.supervisor import SupervisedWorker

    worker = SupervisedWorker(settings)
    starting = asyncio.create_task(worker.start())  # the longest part of a cold start, so it goes first
    await asyncio.sleep(0)
    try:
        from penstock.checkpoint.source import resolve
        from penstock.gateway.app import create_app
        from penstock.gateway.server import serve
        from penstock.text.tokenizer import load_tokenizer

        checkpoint = await asyncio.to_thread(resolve, settings.model)
        tokenizer = await asyncio.to_thread(load_tokenizer, checkpoint)
        await starting
        server = settings.server
        name = server.served_model_name or checkpoint.name
        app = create_app(worker, tokenizer, server, model_names=[name])
        return await serve(
            app, server.host, server.port, lambda host, port: _announce(host, port, name), server.drain_seconds
        )
    finally:
        starting.cancel()
        await worker.stop()


def _announce(host: str, port: int, model: str) -> None:
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    print(f"Penstock serves {model} at {url}\n\nTry it:\n  curl {url}/v1/chat/completions \\")
    print(f"    -H 'Content-Type: application/json' \\\n    -d '{body}'\n", flush=True)
    sys.stdout.flush()
