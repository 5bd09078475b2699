"""`penstock keys`: create, list and revoke API keys in the store that servers share."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from penstock.cli.environment import API_KEY, printable
from penstock.cli.settings import file_and_environment
from penstock.core.errors import StartupError
from penstock.gateway.settings import tenant_config
from penstock.settings import Settings, settings_from_mapping

if TYPE_CHECKING:
    from penstock.state.store import Store

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("keys", help="create, list and revoke API keys")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = actions.add_parser("create", help="make a key and show it, once")
    create.add_argument("tenant", nargs="?", help="whose key it is; a new tenant has no limits but tenant_defaults")
    create.add_argument("--admin", action="store_true", help="a key for /admin instead")
    create.add_argument("--note", default="", help="to recognise it by")
    create.set_defaults(run=lambda args: run_on_store(args, lambda settings, store: _create(args, settings, store)))
    listing = actions.add_parser("list", help="show what is known of all keys; never the keys themselves")
    listing.set_defaults(run=lambda args: run_on_store(args, lambda settings, store: _list(store)))
    revoke = actions.add_parser("revoke", help="refuse a key from now on, on all servers within a second")
    revoke.add_argument("id", help="as in the list")
    revoke.set_defaults(run=lambda args: run_on_store(args, lambda settings, store: _revoke(args.id, store)))
    for action in (create, listing, revoke):
        add_store_arguments(action)


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="the server's settings")
    parser.add_argument("--state", metavar="URL", help="sqlite:///PATH or redis://HOST:PORT/DB; default: the server's")


def run_on_store(args: argparse.Namespace, work: Callable[[Settings, Store], Awaitable[int]]) -> int:
    from penstock.state.open import open_store

    values = file_and_environment(args.config)
    if args.state is not None:
        values["state"] = args.state
    settings = settings_from_mapping(values)
    if settings.state == "memory":
        raise StartupError("with state: memory, keys and spend are in the server alone; ask its /admin", param="state")

    async def run() -> int:
        async with open_store(settings.state, lasting=True) as store:
            return await work(settings, store)

    return asyncio.run(run())


async def _create(args: argparse.Namespace, settings: Settings, store: Store) -> int:
    from penstock.gateway.tenancy import tenants
    from penstock.gateway.tenancy.keys import create_key

    if args.admin == bool(args.tenant):
        raise StartupError("name a tenant, or say --admin", param="tenant")
    if args.tenant and args.tenant not in settings.tenants:
        tenant_config(args.tenant, {}, {})
        if args.tenant not in await store.records(tenants.KIND):
            await store.put(tenants.KIND, args.tenant, "{}")
    key, record = await create_key(store, args.tenant or "", args.note)
    print(key, flush=True)
    whose = f"Tenant {record.tenant}'s key" if record.tenant else "The admin key"
    print(f"{whose} {record.prefix} is kept as a hash: this is the only time it is shown.", file=sys.stderr)
    shown = key if sys.stdout.isatty() else "KEY"  # what is piped away must not be shown after all
    scheme = "http" if settings.server.tls is None else "https"
    url = f"{scheme}://127.0.0.1:{settings.server.port}{'/v1/models' if record.tenant else '/admin/keys'}"
    print(
        f"Penstock's own commands read it from {API_KEY}, other clients send it as a bearer token:\n"
        f"  export {API_KEY}={shown}\n"
        f'  curl {url} -H "Authorization: Bearer ${API_KEY}"',
        file=sys.stderr,
    )
    return 0


async def _list(store: Store) -> int:
    from penstock.gateway.tenancy.keys import stored_keys

    found = await stored_keys(store)
    if not found:
        print("There are no keys yet. 'penstock keys create NAME' makes one for a tenant.", file=sys.stderr)
    for record in found:
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created))
        print(f"{record.id}  {record.tenant or '(admin)':<24}  {created}  {printable(record.note)}".rstrip())
    return 0


async def _revoke(id: str, store: Store) -> int:
    from penstock.gateway.tenancy.keys import KIND

    if not await store.delete(KIND, id.removeprefix("psk-")[:12]):
        raise StartupError(f"no key {id!r}; 'penstock keys list' shows their ids", param="id")
    print(f"revoked {id}")
    return 0
