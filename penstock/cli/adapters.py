"""`penstock adapters`: the LoRA adapters of a running server, and what is in an adapter's folder."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.source import DEFAULT_MODEL
from penstock.cli.environment import add_server_arguments
from penstock.client.http import HttpClient, Response, failure, openai_base
from penstock.core.errors import InvalidRequest
from penstock.engine.settings import EngineConfig

if TYPE_CHECKING:
    from rich.console import RenderableType

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_SECONDS = 60.0  # that a load may take


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("adapters", help="list, load, unload and check LoRA adapters")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="show the adapters of a running server")
    load = actions.add_parser("load", help="serve an adapter, in place of another one if the name is taken")
    load.add_argument("name", help="what clients are to put in model")
    load.add_argument("path", nargs="?", help="its folder, as the server sees it (default: NAME in adapter_folder)")
    load.add_argument("--base-model", metavar="MODEL", help="which model it is for (default: the one that it fits)")
    unload = actions.add_parser("unload", help="serve an adapter no longer; requests that are running go on")
    unload.add_argument("name", help="as in the list")
    for action, work in ((listing, _list), (load, _load), (unload, _unload)):
        add_server_arguments(action)
        action.set_defaults(run=lambda args, work=work: run(args, work))
    check = actions.add_parser("check", help="say what is in a folder, and whether it fits a model; needs no server")
    check.add_argument("folder", help="as PEFT wrote it")
    check.add_argument("--model", default=DEFAULT_MODEL, help="as for 'penstock serve' (default %(default)s)")
    most = EngineConfig().max_adapter_rank
    check.add_argument("--max-rank", type=int, default=most, metavar="R", help="that is served (default %(default)s)")
    check.set_defaults(run=run_check)


def run(args: argparse.Namespace, work: Callable[[HttpClient, argparse.Namespace], Awaitable[RenderableType]]) -> int:
    from penstock.cli.fleet import TABLE_WIDTH, plain_console

    async def ask() -> RenderableType:
        async with HttpClient(openai_base(args.url), api_key=args.api_key, timeout=_SECONDS) as http:
            return await work(http, args)

    plain_console(least_width=TABLE_WIDTH).print(asyncio.run(ask()))
    return 0


async def _list(http: HttpClient, args: argparse.Namespace) -> RenderableType:
    return adapter_table(_checked(http, await http.get("/v1/lora_adapters"))["data"])


async def _load(http: HttpClient, args: argparse.Namespace) -> RenderableType:
    body = {"lora_name": args.name, "lora_path": args.path or args.name}
    if args.base_model is not None:
        body["base_model"] = args.base_model
    found = _checked(http, await http.post("/v1/load_lora_adapter", body))
    return f"{found['id']} is an adapter of {found['model']}, digest {found['digest']}"


async def _unload(http: HttpClient, args: argparse.Namespace) -> RenderableType:
    _checked(http, await http.post("/v1/unload_lora_adapter", {"lora_name": args.name}))
    return f"{args.name} is no longer served"


def _checked(http: HttpClient, response: Response) -> dict[str, Any]:
    if response.status != 200:
        raise failure(http.url, response.status, response.error_message)
    found: dict[str, Any] = response.json()
    return found


def adapter_table(adapters: list[dict[str, Any]]) -> RenderableType:
    from rich.table import Table

    if not adapters:
        return "there are no adapters; 'penstock adapters load NAME PATH' serves one"
    table = Table(box=None, pad_edge=False)
    for heading in ("adapter", "model", "digest", "loaded", "from", "folder"):
        table.add_column(heading, no_wrap=True)
    for one in adapters:
        loaded = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["loaded"]))
        table.add_row(one["id"], one["model"], one["digest"][:12], loaded, one["source"], one["folder"])
    return table


def run_check(args: argparse.Namespace) -> int:
    from penstock.checkpoint.source import resolve
    from penstock.cli.served_adapters import same_model
    from penstock.lora.checkpoint import adapter_digest, read_adapter, summarize_adapter
    from penstock.lora.fit import check_fit, projections
    from penstock.lora.tokenizer import check_tokenizer
    from penstock.models.config import read_config
    from penstock.text.tokenizer import load_tokenizer

    folder = Path(args.folder).expanduser()
    found = summarize_adapter(folder)
    config = found.config
    kinds = sorted({name.rpartition(".")[2] for name in found.modules})
    print(f"rank      {found.rank}, alpha {config.alpha:g}{', rsLoRA' if config.rslora else ''}")
    print(f"modules   {len(found.modules)}: {', '.join(kinds)}")
    print(f"weights   {found.weight_bytes / 1e6:.1f} MB, {', '.join(found.dtypes)}")
    print(f"digest    {adapter_digest(folder)}")
    if config.base_model:
        print(f"base      {config.base_model}")
    checkpoint = resolve(args.model, weights=False)
    try:
        check_fit(found.modules, projections(read_config(checkpoint)), args.max_rank)
        check_tokenizer(folder, lambda: load_tokenizer(checkpoint).vocabulary)
        read_adapter(folder)  # which looks at every value
    except InvalidRequest as error:
        print(f"It does not fit {checkpoint.name}: {error.message}")
        return 1
    doubt = "" if same_model(config.base_model, checkpoint) else ", though it was trained on another by its name"
    print(f"It fits {checkpoint.name}{doubt}.")
    return 0
