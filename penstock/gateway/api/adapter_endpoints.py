"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them, and GET /v1/lora_adapters."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from penstock.gateway.api.adapters import NamedAdapter, Source
from penstock.gateway.api.serving import Serving, encode_json
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.tenants import Tenant


class LoadAdapter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`lora_path` is relative to the settings' `adapter_folder`, or absolute and below it. A name that is taken means
    the new adapter from then on, with and without vLLM's `load_inplace`."""

    lora_name: str
    lora_path: str
    base_model: str | None = None  # default: the one whose layers it fits
    load_inplace: bool = False


class UnloadAdapter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None  # vLLM's; names are unique here


class AdapterView(msgspec.Struct, kw_only=True):
    id: str
    model: str
    digest: str
    folder: str
    loaded: int  # seconds since 1970
    source: Source


V = TypeVar("V", bound=AdapterView)


class AdapterList(msgspec.Struct):
    data: list[AdapterView]
    object: Literal["list"] = "list"


class Loaded(AdapterView):
    message: str = ""  # vLLM's


class Unloaded(msgspec.Struct):
    id: str
    message: str


_load = msgspec.json.Decoder(LoadAdapter)
_unload = msgspec.json.Decoder(UnloadAdapter)


class AdapterEndpoints:
    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.adapters = serving.adapters

    async def all(self, request: Request, response: Response, tenant: Tenant) -> None:
        await self.adapters.refresh()
        found = [_view(AdapterView, each) for each in self.adapters.all()]
        await response.send(200, encode_json(AdapterList(found)))

    async def load(self, request: Request, response: Response, tenant: Tenant) -> None:
        body = await self.serving.read(request, _load)
        base = None if body.base_model is None else self.serving.models.by_name.get(body.base_model)
        model = body.base_model if base is None else base.name
        found = await self.adapters.load(body.lora_name, body.lora_path, model)
        answer = _view(Loaded, found)
        answer.message = f"Success: LoRA adapter '{found.name}' added successfully."
        await response.send(200, encode_json(answer))

    async def unload(self, request: Request, response: Response, tenant: Tenant) -> None:
        body = await self.serving.read(request, _unload)
        await self.adapters.unload(body.lora_name)
        message = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
        await response.send(200, encode_json(Unloaded(body.lora_name, message)))


def _view(kind: type[V], found: NamedAdapter) -> V:
    return kind(
        id=found.name,
        model=found.model,
        digest=found.adapter.digest,
        folder=found.adapter.folder,
        loaded=found.loaded,
        source=found.source,
    )
