"""GET and DELETE /admin/cache: how often answers and prefixes are found in caches; forgetting the answers."""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import Struct

from penstock.gateway.api.serving import Serving, encode_json
from penstock.gateway.api.siblings import Siblings
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.tenants import Tenant


class AnswerCache(Protocol):
    """Views are for JSON."""

    def view(self) -> Any: ...

    async def flush(self) -> None: ...


class NoAnswerCache:
    def view(self) -> Any:
        return None

    async def flush(self) -> None:
        pass


class PrefixCache(Struct):
    """The prefix cache in the engines of one model, since they were started."""

    prompt_tokens: int
    cached_tokens: int  # of these
    kv_blocks: int
    kv_blocks_used: int


class Caches(Struct):
    answers: Any  # of the gateway process that is asked; null: it has no answer cache
    prefixes: dict[str, PrefixCache]  # by model


class Flushed(Struct):
    flushed: bool = True


class CacheEndpoints:
    def __init__(self, serving: Serving, cache: AnswerCache, siblings: Siblings) -> None:
        self.serving = serving
        self.cache = cache
        self.siblings = siblings

    def view(self) -> Caches:
        prefixes = {}
        for model in self.serving.models.all:
            stats = model.engine.stats
            prefixes[model.name] = PrefixCache(
                stats.prompt_tokens, stats.cached_tokens, stats.kv_blocks, stats.kv_blocks_used
            )
        return Caches(self.cache.view(), prefixes)

    async def show(self, request: Request, response: Response, tenant: Tenant) -> None:
        await response.send(200, encode_json(self.view()))

    async def flush(self, request: Request, response: Response, tenant: Tenant) -> None:
        if not await self.siblings.flush():
            await self.cache.flush()
        await response.send(200, encode_json(Flushed()))
