"""The events of a response's stream. They follow from its blocks alone, so those of a background response can be made
again, with the same numbers, for whoever comes back for the rest of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from itertools import islice
from typing import Any

import msgspec

from penstock.gateway.api import responses_types as types
from penstock.gateway.api.blocks import Block, Step
from penstock.gateway.api.responses_reading import encrypted
from penstock.gateway.api.responses_store import Progress, Recording, item_id
from penstock.gateway.api.serving import encode_json
from penstock.gateway.api.slices import SLICE
from penstock.gateway.http.response import Response

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
# OpenAI has no event for a response that was cancelled: its status says so.
_LAST = {"completed": types.Completed, "incomplete": types.Incomplete}


def output_item(
    response: str, block: Block, text: str, status: types.ItemStatus, *, encrypted_reasoning: bool
) -> types.OutputItem:
    """A block as an item of the output, with so much of its text."""
    id = item_id(_PREFIXES[block.kind], response, block.index)
    if block.kind == "call":
        return types.OutputCall(id, status, block.id, block.name, text)
    if block.kind == "text":
        return types.OutputMessage(id, status, [types.OutputText(text)] if text else [])
    item = types.OutputReasoning(id, status, [types.ReasoningText(text)] if text else [])
    if encrypted_reasoning:
        item.encrypted_content = encrypted(text)
    return item


class Events:
    """Makes the events of one response, in their order."""

    def __init__(self, response: str, *, encrypted_reasoning: bool, after: int = -1) -> None:
        """`after`: the number of the last one that the reader has. Those up to it are counted and left out."""
        self._response = response
        self._encrypted = encrypted_reasoning
        self._after = after
        self._made = 0

    def first(self, response: types.ResponseObject) -> bytes:
        events = self._event(types.OfResponse, response)
        if response.status == "queued":
            events += self._event(types.Queued, response)
        return events + self._event(types.InProgress, msgspec.structs.replace(response, status="in_progress"))

    def of(self, step: Step, block: Block, text: str, status: types.ItemStatus) -> bytes:
        """`status`: that the item has once it is complete."""
        index, id = block.index, item_id(_PREFIXES[block.kind], self._response, block.index)
        if step == "add":
            if block.kind == "text":
                return self._event(types.TextDelta, index, id, text)
            if block.kind == "call":
                return self._event(types.ArgumentsDelta, index, id, text)
            return self._event(types.ReasoningDelta, index, id, text)
        part = types.ReasoningText if block.kind == "reasoning" else types.OutputText
        if step == "open":
            events = self._event(types.ItemAdded, index, self._item(block, "", "in_progress"))
            return events if block.kind == "call" else events + self._event(types.PartAdded, index, id, part(""))
        whole = block.text
        if block.kind == "call":
            events = self._event(types.ArgumentsDone, index, id, whole, block.name)
        else:
            events = self._event(types.TextDone if block.kind == "text" else types.ReasoningDone, index, id, whole)
            events += self._event(types.PartDone, index, id, part(whole))
        return events + self._event(types.ItemDone, index, self._item(block, whole, status))

    def last(self, response: types.ResponseObject) -> bytes:
        """Nobody waits for it in vain: if the server that numbered the events is gone, with those that were not stored,
        it comes after what the reader has."""
        self._made = max(self._made, self._after + 1)
        return self._event(_LAST.get(response.status, types.Failed), response)

    def _item(self, block: Block, text: str, status: types.ItemStatus) -> types.OutputItem:
        return output_item(self._response, block, text, status, encrypted_reasoning=self._encrypted)

    def _event(self, kind: type[msgspec.Struct], *fields: Any) -> bytes:
        number = self._made
        self._made += 1
        if number <= self._after:
            return b""
        data = kind(*fields, number)
        return b"event: %b\ndata: %b\n\n" % (str(data.__struct_config__.tag).encode(), encode_json(data))


class _Reader:
    """Where somebody is in a recording that may still grow."""

    def __init__(self) -> None:
        self._block = 0
        self._piece = -1  # -1: of a block that has not been opened

    def steps(self, recording: Recording) -> Iterator[tuple[Step, Block, str, types.ItemStatus]]:
        """Those that have not been read, each with the status that its item ends with."""
        while self._block < len(recording.blocks):
            block, is_last = recording.blocks[self._block], self._block == len(recording.blocks) - 1
            status = recording.last if is_last else "completed"
            if self._piece < 0:
                self._piece = 0
                yield "open", block, "", status
            while self._piece < len(block.pieces):
                self._piece += 1
                yield "add", block, block.pieces[self._piece - 1], status
            if status == "in_progress":
                return
            self._block, self._piece = self._block + 1, -1
            yield "close", block, "", status


async def follow(states: AsyncGenerator[Progress], response: Response, after: int = -1) -> None:
    """Send the events of a background response after this one: those that there are, and then what comes."""
    reader, events = _Reader(), None
    async with aclosing(states):
        async for progress in states:
            if events is None:
                hidden = progress.recording.encrypted_reasoning
                events = Events(progress.queued.id, encrypted_reasoning=hidden, after=after)
                await _send(response, events.first(progress.queued))
            while steps := list(islice(reader.steps(progress.recording), SLICE)):
                await _send(response, b"".join([events.of(*step) for step in steps]))
                await asyncio.sleep(0)
            if response.request.disconnected:
                return
            if progress.final is not None:
                await response.end_events(events.last(progress.final))
                return


async def _send(response: Response, events: bytes) -> None:
    if events:
        await response.send_events(events)
