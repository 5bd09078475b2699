"""/v1/files: uploads and the files that batches make. A tenant sees its own, all others are not there for it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import parse_qs

import msgspec
from msgspec import UNSET, UnsetType

from penstock.batches import files
from penstock.batches.place import Batches
from penstock.batches.records import FileLimits, Page, Purpose, StoredFile, new_id
from penstock.core.errors import InvalidRequest, NotFound, PenstockError, Unavailable
from penstock.gateway.api.serving import Serving, encode_json
from penstock.gateway.errors import require
from penstock.gateway.http.multipart import FormReader
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.tenants import Tenant

PURPOSES = ("batch",)  # of uploads
FILE_ID = re.compile(r"file-[0-9a-z]{32}")
DEFAULT_LIMIT, MAX_LIMIT = 20, 100
MIN_KEEP, MAX_KEEP = 3600, 2_592_000  # seconds, as OpenAI has them
FORM_BYTES = 65_536  # of an upload beside the file itself
_JSONL = (b"content-type", b"application/jsonl")
_DIGITS = re.compile(r"[0-9]{1,9}")


class FileObject(msgspec.Struct):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    expires_at: int | UnsetType = UNSET
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct):
    data: list[FileObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: Literal["list"] = "list"


class DeletedFile(msgspec.Struct):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


def required(batches: Batches | None) -> Batches:
    if batches is None:
        raise NotFound(
            "this server keeps no files: with state: memory, set batches.folder to a folder", code="no_files"
        )
    return batches


class FileEndpoints:
    def __init__(self, serving: Serving, batches: Batches | None) -> None:
        self._serving = serving
        self._batches = batches

    async def upload(self, request: Request, response: Response, tenant: Tenant) -> None:
        batches = required(self._batches)
        config = batches.config
        self._serving.traffic.admit()
        upload = files.Upload(batches.contents, new_id("file-"))
        try:
            form = FormReader(request, upload.write)
            limit = int(config.max_file_mib * 2**20) + FORM_BYTES
            await form.read(request.parts(limit, self._serving.body_seconds))
            purpose, expires_at = _checked(form, int(config.keep_days * 86400))
            await upload.finish()
            now = int(time.time())
            name = Path(form.filename or "").name[:255] or "upload.jsonl"
            stored = StoredFile(upload.id, tenant.name, name, upload.size, now, purpose, now + expires_at)
            await batches.store.add_file(stored, FileLimits(config.max_files, int(config.max_storage_mib * 2**20)))
        except BaseException:
            await upload.abandon()
            raise
        await response.send(200, encode_json(_shown(stored)))

    async def list(self, request: Request, response: Response, tenant: Tenant) -> None:
        page = page_of(request, FILE_ID, ("purpose",), get_args(Purpose))
        found = await required(self._batches).store.files(tenant.name, page)
        shown, more = [_shown(file) for file in found[: page.limit - 1]], len(found) == page.limit
        ids = (shown[0].id, shown[-1].id) if shown else (None, None)
        await response.send(200, encode_json(FileList(shown, more, *ids)))

    async def one(self, request: Request, response: Response, tenant: Tenant) -> None:
        file = await find(required(self._batches), tenant, request.path_params["id"])
        await response.send(200, encode_json(_shown(file)))

    async def content(self, request: Request, response: Response, tenant: Tenant) -> None:
        batches = required(self._batches)
        file = await find(batches, tenant, request.path_params["id"])
        if await asyncio.to_thread(batches.contents.size, file.id) != file.bytes:
            raise Unavailable(f"the contents of {file.id} are not where this server keeps files", code="file_missing")
        await response.send_parts(file.bytes, _parts(batches.contents, file), _JSONL)

    async def delete(self, request: Request, response: Response, tenant: Tenant) -> None:
        batches = required(self._batches)
        file = await find(batches, tenant, request.path_params["id"])
        await batches.store.delete_file(tenant.name, file.id)
        await asyncio.to_thread(batches.contents.delete, [file.id])
        await response.send(200, encode_json(DeletedFile(file.id)))


def _checked(form: FormReader, keep: int) -> tuple[Purpose, int]:
    """The purpose of an upload, and for how long it is kept."""
    require(form.filename is not None, "file", "is required")
    purpose = form.fields.get("purpose")
    require(purpose in PURPOSES, "purpose", f"must be one of {', '.join(PURPOSES)}")
    anchor = form.fields.get("expires_after[anchor]", "created_at")
    require(anchor == "created_at", "expires_after", "must have the anchor created_at")
    seconds = form.fields.get("expires_after[seconds]")
    if seconds is None:
        return "batch", keep
    fits = _DIGITS.fullmatch(seconds) is not None and MIN_KEEP <= int(seconds) <= MAX_KEEP
    require(fits, "expires_after", f"must have between {MIN_KEEP} and {MAX_KEEP} seconds")
    return "batch", int(seconds)


async def find(batches: Batches, tenant: Tenant, id: str, param: str = "file_id") -> StoredFile:
    file = await batches.store.file(tenant.name, id) if FILE_ID.fullmatch(id) else None
    if file is None:
        raise NotFound(f"there is no file {id[:200]!r}", param=param, code="file_not_found")
    return file


def page_of(
    request: Request, pattern: re.Pattern[str], columns: tuple[str, ...] = (), values: tuple[str, ...] = ()
) -> Page:
    """One more than is asked for, to see whether there is more. `columns` may have one of `values`."""
    query = {name: given[-1] for name, given in parse_qs(request.query.decode("latin-1"), True).items()}
    limit, after, order = query.get("limit", str(DEFAULT_LIMIT)), query.get("after"), query.get("order", "desc")
    fits = _DIGITS.fullmatch(limit) is not None and int(limit) >= 1
    require(fits, "limit", f"must be between 1 and {MAX_LIMIT}")
    require(order in ("asc", "desc"), "order", "must be asc or desc")
    if after is not None and pattern.fullmatch(after) is None:
        raise InvalidRequest(f"after must be an id, not {after[:200]!r}", param="after")
    extra = {name: query[name] for name in columns if name in query}
    for name, value in extra.items():
        require(value in values, name, f"must be one of {', '.join(values)}")
    return Page(min(int(limit), MAX_LIMIT) + 1, after, order == "asc", extra)


def _shown(file: StoredFile) -> FileObject:
    expires = UNSET if file.expires_at is None else file.expires_at
    return FileObject(file.id, file.bytes, file.created_at, file.filename, file.purpose, expires)


async def _parts(contents: files.Contents, file: StoredFile) -> AsyncIterator[bytes]:
    for start in range(0, file.bytes, files.READ_BYTES):
        part = await asyncio.to_thread(contents.read, file.id, start, files.READ_BYTES)
        if not part:
            raise PenstockError(f"{file.id} was deleted while it was read")
        yield part
