"""/v1/responses: OpenAI's Responses API over the chats of this server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import parse_qs

import msgspec
from msgspec import UNSET, to_builtins

from penstock.core.errors import PenstockError
from penstock.gateway.api import responses_types as types
from penstock.gateway.api.blocks import Block, BlockAnswer, Step
from penstock.gateway.api.choices import Choice
from penstock.gateway.api.generation import Generation
from penstock.gateway.api.responses_events import Events, follow, output_item
from penstock.gateway.api.responses_reading import (
    HeadReader,
    InputTokensReader,
    ResponsesChat,
    ResponsesReader,
    with_history,
)
from penstock.gateway.api.responses_store import LEASE_SECONDS, Progress, Recording, ResponseStore, item_id
from penstock.gateway.api.serving import Incoming, Serving, encode_json
from penstock.gateway.api.text_generation import TextEndpoint, Wanted
from penstock.gateway.errors import OpenAIErrors, require
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.limits import Reservation
from penstock.gateway.tenancy.tenants import Tenant
from penstock.observability.logging import log
from penstock.text.stream import TextDelta

logger = logging.getLogger("penstock.gateway")

HOLD_SECONDS = 2.0  # between two looks whether a background response was cancelled elsewhere
RETRY_SECONDS = 0.5  # before a background response that has ended is stored again
MAX_ITEMS = 100  # on a page of input items
_NUMBER = re.compile(r"[0-9]{1,9}")

RESPONSES_ERRORS = OpenAIErrors(
    {
        ".function": "",
        "response_format.json_schema": "text.format",
        "max_completion_tokens": "max_output_tokens",
        "continue_final_message": "input",
        "chat_template_kwargs": "input",
        "messages": "input",
    }
)
_echoes = msgspec.json.Decoder(types.Echo)


class ResponseAnswer(BlockAnswer[ResponsesChat]):
    __slots__ = ("_echo", "_events", "_store")

    id_prefix = "resp_"

    def __init__(self, body: ResponsesChat, generation: Generation, store: ResponseStore) -> None:
        super().__init__(body, generation)
        self._store = store
        self._echo = _echoes.decode(body.echo)
        self._events = Events(self.id, encrypted_reasoning=body.encrypted_reasoning)

    @property
    def tenant(self) -> str:
        return self.generation.context.tenant.name

    async def whole(self) -> types.ResponseObject:
        return await self._stored(self._finished())

    async def _stream(self) -> None:
        try:
            await super()._stream()
        except PenstockError as error:
            if self.response.streaming:
                await self.response.end_events(self._events.last(self._response("failed", error)))
            raise

    # ------------------------------------------------------------ the response and its items

    async def _stored(self, response: types.ResponseObject) -> types.ResponseObject:
        if self._echo.store:
            await self._store.save_answer(self.tenant, response, self.body.items)
        return response

    def _finished(self) -> types.ResponseObject:
        cut = self.choice.finish_reason == "length"
        response = self._response("incomplete" if cut else "completed")
        response.completed_at = None if cut else time.time()
        response.incomplete_details = types.IncompleteDetails("max_output_tokens") if cut else None
        usage = self.generation.usage()
        response.usage = types.ResponseUsage(
            usage.prompt_tokens,
            types.InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            types.OutputTokensDetails(self.choice.stream.reasoning_tokens),
            usage.total_tokens,
        )
        return response

    def _response(self, status: types.Status, error: PenstockError | None = None) -> types.ResponseObject:
        params = self.choice.request.params
        echoed = {name: getattr(self._echo, name) for name in self._echo.__struct_fields__}
        sampled = {"temperature": params.temperature, "top_p": params.top_p}
        return types.ResponseObject(
            **(echoed | sampled),
            id=self.id,
            created_at=self.created,
            model=self.body.model,
            output=[self._item(block) for block in self.blocks.all],
            status=status,
            error=None if error is None else types.ResponseError(_code(error), error.message),
            service_tier="default" if self.tier is UNSET else self.tier,
        )

    def _item(self, block: Block) -> types.OutputItem:
        hidden = self.body.encrypted_reasoning
        return output_item(self.id, block, block.text, self._status(block), encrypted_reasoning=hidden)

    def _status(self, block: Block) -> types.ItemStatus:
        """Of a block that is complete."""
        cut = self.choice.finish_reason == "length" and block is self.blocks.all[-1]
        return "incomplete" if cut else "completed"

    def first_events(self) -> bytes:
        return self._events.first(self._response("in_progress"))

    def events_of(self, step: Step, block: Block, text: str) -> bytes:
        return self._events.of(step, block, text, self._status(block))

    async def last_events(self) -> bytes:
        return self._events.last(await self._stored(self._finished()))


class Cancelled(PenstockError):
    """The client has cancelled a background response."""

    status = 499
    kind = "cancelled"


class BackgroundAnswer(ResponseAnswer):
    """Goes on without its client. Those who read its stream, from the beginning or from any event, read alike."""

    __slots__ = ("_changed", "_progress", "_running", "request")

    def __init__(
        self,
        body: ResponsesChat,
        generation: Generation,
        store: ResponseStore,
        running: dict[str, BackgroundAnswer],
    ) -> None:
        """`running`: those of this process, by id."""
        super().__init__(body, generation, store)
        self._running = running
        self.request = self.response.request
        recording = Recording(self.blocks.all, body.encrypted_reasoning)
        self._progress = Progress(self._response("queued"), recording)
        self._changed = asyncio.Event()

    @property
    def streamed(self) -> bool:
        return bool(self.body.stream)

    async def respond(self) -> None:
        """In the task of the request: draining waits for it, and it is accounted for, as for any other."""
        await self._accept()
        self.response.detach()
        self._running[self.id] = self
        readers = [asyncio.create_task(follow(self.watch(), self.response))] if self.streamed else []
        try:
            error = await self._run_to_its_end()
            await asyncio.gather(*readers)
        finally:
            del self._running[self.id]
            for reader in readers:
                reader.cancel()
        if error is not None:
            raise error

    async def _accept(self) -> None:
        generation = self.generation
        try:
            await generation.reservation.enter(generation.metering)
            if self.streamed:
                await self._store.record(self.tenant, self.id, self._progress.recording)
            await self._store.save(self.tenant, self._response("in_progress"), self.body.items)
            await self._store.hold(self.tenant, self.id)
            if not self.streamed:
                await self.response.send(200, encode_json(self._progress.queued))
        except BaseException:
            generation.reservation.release()
            raise

    async def _run_to_its_end(self) -> PenstockError | None:
        """Returns what it failed with, when those who read it and the store know."""
        holding = asyncio.create_task(self._keep_holding())
        error: PenstockError | None = None
        patience = LEASE_SECONDS
        try:
            await self.generation.run(self._collect)
        except asyncio.CancelledError:
            error, patience = self.request.catch_cancellation(), 0.0
            if error is None:
                raise
        except PenstockError as failure:
            error = failure
        finally:
            holding.cancel()
        response = self._finished() if error is None else self._response("failed", error)
        try:
            await self._end(response, patience)
        except asyncio.CancelledError:  # while it waited for the store
            error = error or self.request.catch_cancellation()
            if error is None:
                raise
            await self._end(response, 0.0)
        return error

    async def _end(self, response: types.ResponseObject, patience: float) -> None:
        """Unless it was cancelled or deleted before. With the store away it waits here, for so many seconds at most."""
        until, ended = time.monotonic() + patience, None
        while True:
            try:
                if self.streamed:
                    await self._store.record(self.tenant, self.id, self._progress.recording)
                ended = await self._store.end(self.tenant, self.id, lambda _: response)
                break
            except PenstockError as error:
                if time.monotonic() >= until:
                    log(logger, logging.WARNING, "response not stored", id=self.id, why=error.message)
                    break
            await asyncio.sleep(RETRY_SECONDS)
        self._changes(ended or response)

    async def _keep_holding(self) -> None:
        while True:
            await asyncio.sleep(HOLD_SECONDS)
            with contextlib.suppress(PenstockError):  # the store is away: go on
                if not await self._store.hold(self.tenant, self.id):
                    self.request.cancel(Cancelled("the response was cancelled or deleted"))
                elif self.streamed:
                    await self._store.record(self.tenant, self.id, self._progress.recording)

    async def _collect(self, choice: Choice, delta: TextDelta) -> None:
        await super()._collect(choice, delta)
        if delta.finish_reason is not None and self.blocks.all:
            self._progress.recording.last = self._status(self.blocks.all[-1])
        self._changes()

    def _changes(self, final: types.ResponseObject | None = None) -> None:
        self._progress.final = final
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def watch(self) -> AsyncGenerator[Progress]:
        """The same one, again and again, when there may be more of it."""
        while True:
            changed = self._changed
            yield self._progress
            await changed.wait()


def _cancelled(response: types.ResponseObject) -> types.ResponseObject:
    return msgspec.structs.replace(response, status="cancelled")


def _code(error: PenstockError) -> str:
    return "rate_limit_exceeded" if error.status == 429 else "server_error"


class Responses(TextEndpoint[ResponsesChat]):
    endpoint = "/v1/responses"
    prompt_param = "input"
    reader_type = ResponsesReader  # type: ignore[assignment]

    def __init__(self, serving: Serving, store: ResponseStore) -> None:
        super().__init__(serving)
        self.store = store
        self._running: dict[str, BackgroundAnswer] = {}
        self._heads = HeadReader(serving.texts)
        self._counts = InputTokensReader(serving.texts)

    def answer_type(self, body: ResponsesChat, generation: Generation) -> ResponseAnswer:
        if body.background:
            return BackgroundAnswer(body, generation, self.store, self._running)
        return ResponseAnswer(body, generation, self.store)

    async def receive(self, request: Request, tenant: Tenant, reservation: Reservation) -> Incoming:
        """With what earlier responses hold of the conversation."""
        incoming = await self.serving.receive(request, tenant, reservation)
        await self._add_history(incoming)
        return incoming

    async def _add_history(self, incoming: Incoming) -> None:
        head, *_ = await self.serving.parse(incoming, self._heads)
        history = await self.store.history(incoming.tenant.name, head)
        incoming.body, incoming.added = with_history(history, incoming.body), len(history)

    def wanted(self, body: ResponsesChat) -> Wanted:
        return Wanted("max_output_tokens", body.max_completion_tokens, None, None, background=body.background)

    async def count(self, request: Request, response: Response, tenant: Tenant) -> None:
        incoming = Incoming(request, tenant, await self.serving.body(request, tenant))
        await self._add_history(incoming)
        answer, *_ = await self.serving.parse(incoming, self._counts)
        await response.send(200, answer)

    # ------------------------------------------------------------ stored responses

    async def retrieve(self, request: Request, response: Response, tenant: Tenant) -> None:
        id, stream, after = request.path_params["id"], _query(request, "stream", "false"), -1
        require(stream in ("true", "false"), "stream", "must be true or false")
        if given := _query(request, "starting_after", ""):
            require(stream == "true", "starting_after", "needs stream=true")
            require(_NUMBER.fullmatch(given) is not None, "starting_after", "must be the sequence_number of an event")
            after = int(given)
        found = await self.store.response(tenant.name, id)
        if stream == "false" or request.method == "HEAD":
            await response.send(200, encode_json(found))
            return
        running, states = self._running.get(id), self.store.watch(tenant.name, id)
        if running is not None and running.streamed:
            states = running.watch()
        with request.cancelling_on_disconnect():
            await follow(states, response, after)

    async def delete(self, request: Request, response: Response, tenant: Tenant) -> None:
        id = request.path_params["id"]
        await self.store.delete(tenant.name, id)
        await response.send(200, encode_json(types.DeletedResponse(id)))

    async def cancel(self, request: Request, response: Response, tenant: Tenant) -> None:
        id = request.path_params["id"]
        found = await self.store.response(tenant.name, id)
        require(found.background, "response_id", "must be that of a background response: others end with their client")
        found = await self.store.end(tenant.name, id, _cancelled) or found
        if found.status == "cancelled" and (running := self._running.get(id)) is not None:
            running.request.cancel(Cancelled("the client cancelled the response"))
        await response.send(200, encode_json(found))

    async def input_items(self, request: Request, response: Response, tenant: Tenant) -> None:
        id = request.path_params["id"]
        given, order = _query(request, "limit", "20"), _query(request, "order", "desc")
        limit = int(given) if _NUMBER.fullmatch(given) else 0
        require(1 <= limit <= MAX_ITEMS, "limit", f"must be between 1 and {MAX_ITEMS}")
        require(order in ("asc", "desc"), "order", "must be asc or desc")
        items = [_listed(item, id, index) for index, item in enumerate(await self.store.items(tenant.name, id))]
        if order == "desc":
            items.reverse()
        if after := _query(request, "after", ""):
            ids = [item["id"] for item in items]
            require(after in ids, "after", "must be the id of an item")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        await response.send(200, encode_json(types.ItemList(page, first, last, has_more=len(items) > limit)))


def _query(request: Request, name: str, default: str) -> str:
    return parse_qs(request.query.decode("latin-1"), keep_blank_values=True).get(name, [default])[-1]


def _listed(item: types.InputItem, response: str, index: int) -> dict[str, Any]:
    """With what clients expect of an item that was stored."""
    kind = item.type or "message"
    shown: dict[str, Any] = {"status": "completed", "id": item_id("item", response, index), **to_builtins(item)}
    shown["type"] = kind
    if kind == "message":
        part_type = "output_text" if item.role == "assistant" else "input_text"
        parts = [{"type": part_type, "text": item.content}] if isinstance(item.content, str) else shown["content"]
        shown["content"] = [{"annotations": [], **part} if part_type == "output_text" else part for part in parts]
    return shown
