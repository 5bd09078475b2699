"""/v1/batches: the requests of a file, each answered once, when there is room for them."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from penstock.batches.decisions import window_seconds
from penstock.batches.place import Batches
from penstock.batches.records import Batch, Status, new_id
from penstock.core.errors import InvalidRequest, NotFound
from penstock.gateway.api.decoding import decode_json
from penstock.gateway.api.files import MAX_KEEP, MIN_KEEP, find, page_of, required
from penstock.gateway.api.serving import Serving, encode_json
from penstock.gateway.errors import require
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.tenants import Tenant

BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
MAX_METADATA = 16
BATCHED = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")  # that lines may name


class OutputExpiry(msgspec.Struct, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: int


class NewBatch(msgspec.Struct, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None


class RequestCounts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class BatchError(msgspec.Struct):
    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(msgspec.Struct):
    data: list[BatchError]
    object: Literal["list"] = "list"


class BatchObject(msgspec.Struct):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status
    created_at: int
    expires_at: int
    request_counts: RequestCounts
    errors: BatchErrors | None
    model: str | None
    output_file_id: str | None
    error_file_id: str | None
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    metadata: Mapping[str, str] | None
    object: Literal["batch"] = "batch"


class BatchList(msgspec.Struct):
    data: list[BatchObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: Literal["list"] = "list"


_new_batch = msgspec.json.Decoder(NewBatch)


class BatchEndpoints:
    def __init__(self, serving: Serving, batches: Batches | None, served: Collection[str]) -> None:
        """`served`: the paths of all endpoints there are."""
        self._serving = serving
        self._batches = batches
        self._endpoints = [path for path in BATCHED if path in served]

    async def create(self, request: Request, response: Response, tenant: Tenant) -> None:
        self._serving.traffic.admit()
        batches = required(self._batches)
        asked = decode_json(_new_batch, b"".join(await self._serving.body(request, tenant)))
        known = ", ".join(self._endpoints)
        require(asked.endpoint in self._endpoints, "endpoint", f"must be one of {known}, not {asked.endpoint[:80]!r}")
        window = window_seconds(asked.completion_window)
        if window is None:
            raise InvalidRequest("completion_window must be like 24h, 30m or 7d", param="completion_window")
        _check_metadata(asked.metadata)
        keep = asked.output_expires_after
        fits = keep is None or MIN_KEEP <= keep.seconds <= MAX_KEEP
        require(fits, "output_expires_after", f"must have between {MIN_KEEP} and {MAX_KEEP} seconds")
        file = await find(batches, tenant, asked.input_file_id, "input_file_id")
        require(file.purpose == "batch", "input_file_id", "must be a file that was uploaded with the purpose batch")
        now = int(time.time())
        batch = Batch(
            id=new_id("batch_"),
            tenant=tenant.name,
            endpoint=asked.endpoint,
            input_file_id=file.id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + window,
            metadata=asked.metadata,
            output_expires_after=None if keep is None else keep.seconds,
        )
        await batches.store.add_batch(batch)
        batches.wake()
        await response.send(200, encode_json(_shown(batch)))

    async def one(self, request: Request, response: Response, tenant: Tenant) -> None:
        id = _checked_id(request)
        batch = await required(self._batches).store.batch(tenant.name, id)
        await response.send(200, encode_json(_shown(_found(batch, id))))

    async def list(self, request: Request, response: Response, tenant: Tenant) -> None:
        page = page_of(request, BATCH_ID)
        found = await required(self._batches).store.batches(tenant.name, page)
        shown, more = [_shown(batch) for batch in found[: page.limit - 1]], len(found) == page.limit
        ids = (shown[0].id, shown[-1].id) if shown else (None, None)
        await response.send(200, encode_json(BatchList(shown, more, *ids)))

    async def cancel(self, request: Request, response: Response, tenant: Tenant) -> None:
        batches, id = required(self._batches), _checked_id(request)
        batch = _found(await batches.store.cancel(tenant.name, id, time.time()), id)
        if batch.over and batch.status != "cancelled":
            raise InvalidRequest(f"{id} cannot be cancelled: it is {batch.status}", code="batch_over")
        batches.wake()
        await response.send(200, encode_json(_shown(batch)))


def _checked_id(request: Request) -> str:
    id = request.path_params["id"]
    if BATCH_ID.fullmatch(id) is None:
        raise _not_found(id)
    return id


def _found(batch: Batch | None, id: str) -> Batch:
    if batch is None:
        raise _not_found(id)
    return batch


def _not_found(id: str) -> NotFound:
    return NotFound(f"there is no batch {id[:200]!r}", param="batch_id", code="batch_not_found")


def _check_metadata(metadata: Mapping[str, str] | None) -> None:
    given = metadata or {}
    fits = len(given) <= MAX_METADATA and all(len(k) <= 64 and len(v) <= 512 for k, v in given.items())
    require(fits, "metadata", f"takes at most {MAX_METADATA} keys of 64 characters, and values of 512")


def _shown(batch: Batch) -> BatchObject:
    errors = [BatchError(error.code, error.message, error.line, error.param) for error in batch.errors]
    plain = {name: getattr(batch, name) for name in _SAME}
    return BatchObject(
        **plain,
        request_counts=RequestCounts(batch.total, batch.completed, batch.failed),
        errors=BatchErrors(errors) if errors else None,
    )


_SAME = [name for name in BatchObject.__struct_fields__ if name not in ("request_counts", "errors", "object")]
