"""Responses that were stored: for a while, some for each tenant, in the `state/` that gateways share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Raw, Struct

from penstock.core.errors import InvalidRequest, NotFound, PenstockError
from penstock.gateway.api import responses_types as types
from penstock.gateway.api.blocks import Block
from penstock.gateway.api.responses_reading import Head, History
from penstock.gateway.api.serving import encode_json
from penstock.gateway.settings import ResponsesConfig
from penstock.observability.logging import log
from penstock.state.store import Keep, Store

logger = logging.getLogger("penstock.gateway")

RESPONSE, LEASE, EVENTS = "response", "response lease", "response events"  # kinds of documents
LEASE_SECONDS = 60.0  # after which a background response is lost whose gateway says nothing of it
POLL_SECONDS = 0.5  # between looks for more events of a response that another process works on
RUNNING: tuple[types.Status, ...] = ("queued", "in_progress")


class StoredResponse(Struct):
    """Its parts are JSON: what is stored is mostly sent as it is."""

    response: Raw
    items: Raw  # the whole conversation before it


class Recording(Struct):
    """What the events of a background response are made of, as far as it has come."""

    blocks: list[Block]
    encrypted_reasoning: bool
    last: types.ItemStatus = "in_progress"  # of the last block; until that has ended it may grow


@dataclass(slots=True)
class Progress:
    """A background response for those who read its stream."""

    queued: types.ResponseObject  # as it was when it was accepted
    recording: Recording
    final: types.ResponseObject | None = None


class _Conversation(Struct):
    output: list[types.InputItem]
    status: types.Status


_stored = msgspec.json.Decoder(StoredResponse)
_objects = msgspec.json.Decoder(types.ResponseObject)
_conversations = msgspec.json.Decoder(_Conversation)
_recordings = msgspec.json.Decoder(Recording)
_items = msgspec.json.Decoder(list[types.InputItem])


class ResponseStore:
    def __init__(self, store: Store, config: ResponsesConfig) -> None:
        self._store = store
        self._keep = Keep(config.max_count, int(config.max_mib * 2**20), config.max_hours * 3600)

    async def save(self, tenant: str, response: types.ResponseObject, items: bytes) -> None:
        """`items`: the conversation before it, as JSON."""
        await self._store.save(RESPONSE, tenant, response.id, _document(response, Raw(items)), self._keep)

    async def end(
        self, tenant: str, id: str, ended: Callable[[types.ResponseObject], types.ResponseObject]
    ) -> types.ResponseObject | None:
        """The only way from running to an end, for whoever comes first: it becomes what `ended` makes of it. What it
        has become, for the others too; None: it was deleted."""
        for _ in range(2):  # one that is not what it was a moment ago has ended, and changes no more
            document = await self._store.load(RESPONSE, tenant, id)
            if document is None:
                break
            stored = _stored.decode(document)
            before = _objects.decode(stored.response)
            if before.status not in RUNNING:
                return before
            after = ended(before)
            if len(changed := _document(after, stored.items)) > self._keep.bytes:
                after = _failed(before, "it is larger than responses.max_mib")
                changed = _document(after, stored.items)
            if await self._store.save(RESPONSE, tenant, id, changed, self._keep, instead_of=document):
                await self._store.discard(LEASE, tenant, id)
                return after
        return None

    async def save_answer(self, tenant: str, response: types.ResponseObject, items: bytes) -> None:
        """Of an answer that has been computed: without a store it is worth sending all the same."""
        try:
            await self.save(tenant, response, items)
        except PenstockError as error:
            response.store = False
            log(logger, logging.WARNING, "response not stored", id=response.id, why=error.message)

    async def find(self, tenant: str, id: str, param: str = "response_id") -> StoredResponse:
        """Another tenant's is not found either."""
        document = await self._store.load(RESPONSE, tenant, id) if len(id) <= 128 else None
        if document is None:
            raise _not_found(id, param)
        return _stored.decode(document)

    async def response(self, tenant: str, id: str) -> types.ResponseObject:
        """As it is now: one that nobody works on any more has failed."""
        response = _objects.decode((await self.find(tenant, id)).response)
        if response.status not in RUNNING or await self._store.load(LEASE, tenant, id) is not None:
            return response
        found = await self.end(tenant, id, lambda lost: _failed(lost, "the server that worked on it has gone"))
        if found is None:
            raise _not_found(id, "response_id")
        return found

    async def record(self, tenant: str, id: str, recording: Recording) -> None:
        """Its events up to now. They have the place of the responses once more; too many have none."""
        if not await self._store.save(EVENTS, tenant, id, encode_json(recording), self._keep):
            await self._store.discard(EVENTS, tenant, id)

    async def watch(self, tenant: str, id: str) -> AsyncGenerator[Progress]:
        """A response that another process works on, or that has ended, as it is stored now and from time to time."""
        while True:
            found = await self.response(tenant, id)
            document = await self._store.load(EVENTS, tenant, id)
            if document is None:
                message = "stream: only a response made with background and stream has events, while they are stored"
                raise InvalidRequest(message, param="stream")
            queued = msgspec.structs.replace(
                found,
                status="queued",
                output=[],
                **dict.fromkeys(("completed_at", "error", "incomplete_details", "usage")),
            )
            yield Progress(queued, _recordings.decode(document), None if found.status in RUNNING else found)
            await asyncio.sleep(POLL_SECONDS)

    async def items(self, tenant: str, id: str) -> list[types.InputItem]:
        """The conversation before it."""
        return _items.decode((await self.find(tenant, id)).items)

    async def delete(self, tenant: str, id: str) -> None:
        await self.find(tenant, id)
        for kind in (RESPONSE, EVENTS, LEASE):
            await self._store.discard(kind, tenant, id)

    async def hold(self, tenant: str, id: str) -> bool:
        """Say that it is being worked on. False: there is nothing to work on, since it was cancelled or deleted."""
        document = await self._store.load(RESPONSE, tenant, id)
        if document is None or _conversations.decode(_stored.decode(document).response).status not in RUNNING:
            return False
        lease = Keep(self._keep.documents, self._keep.bytes, LEASE_SECONDS)
        await self._store.save(LEASE, tenant, id, b"%d" % time.time(), lease)
        return True

    async def history(self, tenant: str, head: Head) -> bytes:
        """What a request needs of earlier responses, as the JSON of a `History`; empty: nothing."""
        if head.previous is None and not head.references:
            return b""
        items: list[types.InputItem] = []
        if head.previous is not None:
            stored = await self.find(tenant, head.previous, "previous_response_id")
            before = _conversations.decode(stored.response)
            if before.status in (*RUNNING, "failed", "cancelled"):
                message = f"previous_response_id names a response that is {before.status}"
                raise InvalidRequest(message, param="previous_response_id")
            items = [*_items.decode(stored.items), *before.output]
        return encode_json(History(items, await self._referenced(tenant, head.references)))

    async def _referenced(self, tenant: str, ids: Sequence[str]) -> dict[str, types.InputItem]:
        """Items by their ids, which hold that of their response: those that are not there are left out."""
        found: dict[str, types.InputItem] = {}
        for id in {response_of(id) for id in ids}:
            document = await self._store.load(RESPONSE, tenant, id)
            if document is not None:
                output = _conversations.decode(_stored.decode(document).response).output
                found |= {item.id: item for item in output if item.id is not None}
        return found


def _document(response: types.ResponseObject, items: Raw) -> bytes:
    return encode_json(StoredResponse(Raw(encode_json(response)), items))


def _failed(response: types.ResponseObject, why: str) -> types.ResponseObject:
    return msgspec.structs.replace(response, status="failed", error=types.ResponseError("server_error", why))


def _not_found(id: str, param: str) -> NotFound:
    return NotFound(
        f"response {id[:128]!r} is not stored here: it was made with store: false, deleted, or is too old",
        param=param,
        code="response_not_found",
    )


def item_id(prefix: str, response: str, index: int) -> str:
    return f"{prefix}_{response.removeprefix('resp_')}_{index}"


def response_of(item: str) -> str:
    """The id of the response that an item belongs to."""
    return f"resp_{item.partition('_')[2].rpartition('_')[0]}"
