"""An answer as blocks, one after another: reasoning, text, tool calls. Anthropic calls them content blocks, OpenAI's
Responses API output items."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from penstock.gateway.api.choices import Choice
from penstock.gateway.api.generation import Generation
from penstock.gateway.api.openai_types import ChatRequest
from penstock.gateway.api.serving import encode_json
from penstock.gateway.api.text_generation import TextAnswer
from penstock.text.stream import TextDelta

B = TypeVar("B", bound=ChatRequest)

BlockKind = Literal["reasoning", "text", "call"]
Step = Literal["open", "add", "close"]


@dataclass(slots=True)
class Block:
    kind: BlockKind
    index: int
    id: str = ""  # these two: of a call
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of a call: its arguments."""
        return "".join(self.pieces)


def call_arguments(text: str) -> dict[str, Any]:
    """Empty if the model was cut off in the middle of them, or wrote something else."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class Blocks:
    """Divides the deltas of one choice. A block is closed before the next one opens, the last one with the answer."""

    __slots__ = ("_show_reasoning", "all", "last")

    def __init__(self, *, show_reasoning: bool = True) -> None:
        self.all: list[Block] = []
        self.last: Block | None = None  # that is open
        self._show_reasoning = show_reasoning

    def push(self, delta: TextDelta) -> Iterator[tuple[Step, Block, str]]:
        """What happens to which block, and the text that is added to it."""
        if delta.reasoning and self._show_reasoning:
            yield from self._add("reasoning", delta.reasoning)
        for piece in delta.pieces or (delta.text,):
            if isinstance(piece, str):
                if piece:
                    yield from self._add("text", piece)
                continue
            if piece.id:
                yield from self._open(Block("call", len(self.all), piece.id, piece.name))
            if piece.arguments:
                yield from self._append(piece.arguments)
        if delta.finish_reason is not None:
            yield from self._close()

    def _add(self, kind: BlockKind, text: str) -> Iterator[tuple[Step, Block, str]]:
        if self.last is None or self.last.kind != kind:
            yield from self._open(Block(kind, len(self.all)))
        yield from self._append(text)

    def _open(self, block: Block) -> Iterator[tuple[Step, Block, str]]:
        yield from self._close()
        self.all.append(block)
        self.last = block
        yield "open", block, ""

    def _append(self, text: str) -> Iterator[tuple[Step, Block, str]]:
        assert self.last is not None
        self.last.pieces.append(text)
        yield "add", self.last, text

    def _close(self) -> Iterator[tuple[Step, Block, str]]:
        if self.last is not None:
            yield "close", self.last, ""
            self.last = None


class BlockAnswer(TextAnswer[B]):
    """The answer to a chat of one choice as blocks, whole or as a stream of events."""

    __slots__ = ("blocks",)

    def __init__(self, body: B, generation: Generation, *, show_reasoning: bool = True) -> None:
        super().__init__(body, generation)
        self.blocks = Blocks(show_reasoning=show_reasoning)

    @property
    def choice(self) -> Choice:
        return self.generation.choices[0]

    async def _send(self) -> None:
        await self.generation.run(self._collect)
        await self.response.send(200, encode_json(await self.whole()))

    async def _stream(self) -> None:
        await self.generation.run(self._emit)
        await self.response.end_events(await self.last_events())

    async def _collect(self, choice: Choice, delta: TextDelta) -> None:
        for _ in self.blocks.push(delta):
            pass

    async def _emit(self, choice: Choice, delta: TextDelta) -> None:
        events = b""
        if not choice.opened:
            choice.opened = True
            events = self.first_events()
        for step, block, text in self.blocks.push(delta):
            events += self.events_of(step, block, text)
        if events:
            await self.response.send_events(events)

    @abstractmethod
    def first_events(self) -> bytes:
        """With the first chunk, so the cached tokens of the prompt are known."""

    @abstractmethod
    def events_of(self, step: Step, block: Block, text: str) -> bytes: ...

    @abstractmethod
    async def last_events(self) -> bytes: ...
