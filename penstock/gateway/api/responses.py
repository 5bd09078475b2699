"""/v1/responses: OpenAI's Responses API over the chats of this server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any
from urllib.parse import parse_qs

import msgspec
from msgspec import UNSET, to_builtins

from penstock.core.errors import PenstockError
from penstock.gateway.api import responses_types as types
from penstock.gateway.api.blocks import Block, BlockAnswer, Step
from penstock.gateway.api.generation import Generation
from penstock.gateway.api.responses_reading import HeadReader, ResponsesChat, ResponsesReader, encrypted, with_history
from penstock.gateway.api.responses_store import ResponseStore, item_id
from penstock.gateway.api.serving import Incoming, Serving, encode_json
from penstock.gateway.api.text_generation import TextEndpoint, Wanted
from penstock.gateway.errors import OpenAIErrors, require
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.limits import Reservation
from penstock.gateway.tenancy.tenants import Tenant

HOLD_SECONDS = 2.0  # between two looks whether a background response was cancelled elsewhere
MAX_ITEMS = 100  # on a page of input items

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
_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_echoes = msgspec.json.Decoder(types.Echo)


class Cancelled(PenstockError):
    """The client has cancelled a background response."""

    status = 499
    kind = "cancelled"


def _event(data: msgspec.Struct) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(data.__struct_config__.tag).encode(), encode_json(data))


class ResponseAnswer(BlockAnswer[ResponsesChat]):
    __slots__ = ("_echo", "_running", "_sent", "_store")

    id_prefix = "resp_"

    def __init__(
        self, body: ResponsesChat, generation: Generation, store: ResponseStore, running: dict[str, Request]
    ) -> None:
        """`running`: background responses of this process, by id."""
        super().__init__(body, generation)
        self._store = store
        self._running = running
        self._echo = _echoes.decode(body.echo)
        self._sent = 0  # events

    @property
    def tenant(self) -> str:
        return self.generation.context.tenant.name

    async def respond(self) -> None:
        if self.body.background:
            await self._in_background()
        else:
            await super().respond()

    async def whole(self) -> types.ResponseObject:
        return await self._stored(self._finished())

    async def _stream(self) -> None:
        try:
            await super()._stream()
        except PenstockError as error:
            if self.response.streaming:
                failed = types.Failed(self._response("failed", error), self._next())
                await self.response.end_events(_event(failed))
            raise

    # ------------------------------------------------------------ in the background

    async def _in_background(self) -> None:
        """Answer at once, and go on in the task of the request: draining waits for it, and it is accounted for, as
        for any other."""
        request, generation = self.response.request, self.generation
        try:
            await generation.reservation.enter(generation.metering)
            await self._store.save(self.tenant, self._response("in_progress"), self.body.items)
            await self._store.hold(self.tenant, self.id)
            await self.response.send(200, encode_json(self._response("queued")))
        except BaseException:
            generation.reservation.release()
            raise
        self.response.detach()
        self._running[self.id] = request
        holding = asyncio.create_task(self._keep_holding(request))
        try:
            await generation.run(self._collect)
            await self._end(self._finished())
        except asyncio.CancelledError:
            error = request.catch_cancellation()
            if error is None:
                raise
            await self._end(self._response("failed", error))
            raise error from None
        except PenstockError as error:
            await self._end(self._response("failed", error))
            raise
        finally:
            self._running.pop(self.id, None)
            holding.cancel()

    async def _end(self, response: types.ResponseObject) -> None:
        """Unless it was cancelled or deleted before."""
        await self._store.end(self.tenant, self.id, lambda _: response)

    async def _keep_holding(self, request: Request) -> None:
        while True:
            await asyncio.sleep(HOLD_SECONDS)
            with contextlib.suppress(PenstockError):  # the store is away: go on
                if not await self._store.hold(self.tenant, self.id):
                    request.cancel(Cancelled("the response was cancelled or deleted"))

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
        cut = self.choice.finish_reason == "length"
        return types.ResponseObject(
            **(echoed | sampled),
            id=self.id,
            created_at=self.created,
            model=self.body.model,
            output=[self._item(block, cut and block is self.blocks.all[-1]) for block in self.blocks.all],
            status=status,
            error=None if error is None else types.ResponseError(_code(error), error.message),
            service_tier="default" if self.tier is UNSET else self.tier,
        )

    def _item(self, block: Block, cut: bool = False, status: types.ItemStatus | None = None) -> types.OutputItem:
        id = item_id(_PREFIXES[block.kind], self.id, block.index)
        status = status or ("incomplete" if cut else "completed")
        text = block.text
        if block.kind == "call":
            return types.OutputCall(id, status, block.id, block.name, text)
        if block.kind == "text":
            return types.OutputMessage(id, status, [types.OutputText(text)] if text else [])
        item = types.OutputReasoning(id, status, [types.ReasoningText(text)] if text else [])
        if self.body.encrypted_reasoning:
            item.encrypted_content = encrypted(text)
        return item

    # ------------------------------------------------------------ events

    def _next(self) -> int:
        self._sent += 1
        return self._sent - 1

    def first_events(self) -> bytes:
        response = self._response("in_progress")
        created, working = types.OfResponse(response, self._next()), types.InProgress(response, self._next())
        return _event(created) + _event(working)

    def events_of(self, step: Step, block: Block, text: str) -> bytes:
        index, id = block.index, item_id(_PREFIXES[block.kind], self.id, block.index)
        if step == "add":
            if block.kind == "text":
                return _event(types.TextDelta(index, id, text, self._next()))
            if block.kind == "call":
                return _event(types.ArgumentsDelta(index, id, text, self._next()))
            return _event(types.ReasoningDelta(index, id, text, self._next()))
        part = types.ReasoningText if block.kind == "reasoning" else types.OutputText
        if step == "open":
            events = _event(types.ItemAdded(index, self._item(block, status="in_progress"), self._next()))
            if block.kind != "call":
                events += _event(types.PartAdded(index, id, part(""), self._next()))
            return events
        whole = block.text
        if block.kind == "call":
            events = _event(types.ArgumentsDone(index, id, whole, block.name, self._next()))
        else:
            done = types.TextDone if block.kind == "text" else types.ReasoningDone
            events = _event(done(index, id, whole, self._next()))
            events += _event(types.PartDone(index, id, part(whole), self._next()))
        item = self._item(block, self.choice.finish_reason == "length")
        return events + _event(types.ItemDone(index, item, self._next()))

    async def last_events(self) -> bytes:
        response = await self._stored(self._finished())
        kind = types.Incomplete if response.status == "incomplete" else types.Completed
        return _event(kind(response, self._next()))


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
        self._running: dict[str, Request] = {}
        self._heads = HeadReader(serving.texts)

    def answer_type(self, body: ResponsesChat, generation: Generation) -> ResponseAnswer:
        return ResponseAnswer(body, generation, self.store, self._running)

    async def receive(self, request: Request, tenant: Tenant, reservation: Reservation) -> Incoming:
        """With what earlier responses hold of the conversation."""
        incoming = await self.serving.receive(request, tenant, reservation)
        head, *_ = await self.serving.parse(incoming, self._heads)
        history = await self.store.history(tenant.name, head)
        incoming.body, incoming.added = with_history(history, incoming.body), len(history)
        return incoming

    def wanted(self, body: ResponsesChat) -> Wanted:
        return Wanted("max_output_tokens", body.max_completion_tokens, None, None)

    # ------------------------------------------------------------ stored responses

    async def retrieve(self, request: Request, response: Response, tenant: Tenant) -> None:
        streamed = _query(request, "stream", "false") == "true"
        require(not streamed, "stream", "is not supported for a stored response; leave it out")
        found = await self.store.response(tenant.name, request.path_params["id"])
        await response.send(200, encode_json(found))

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
            running.cancel(Cancelled("the client cancelled the response"))
        await response.send(200, encode_json(found))

    async def input_items(self, request: Request, response: Response, tenant: Tenant) -> None:
        id = request.path_params["id"]
        given, order = _query(request, "limit", "20"), _query(request, "order", "desc")
        limit = int(given) if given.isascii() and given.isdigit() and len(given) < 9 else 0
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
