"""Requests from bytes to tokens: short ones where they arrive, long ones in a process of their own.

JSON, the chat template and tokenising take time with the size of a request and hold the GIL meanwhile: on whatever
thread of this process, a long request would hold up every stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import struct
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from penstock.core.engine import Task
from penstock.core.errors import ContextTooLong, InvalidRequest, NotFound, PenstockError, Unavailable
from penstock.core.request import SimilarPrompt
from penstock.gateway.api.bounds import Bounds
from penstock.gateway.api.decoding import decode_json
from penstock.observability.settings import LogConfig
from penstock.text.chat_template import ChatTemplate
from penstock.text.infill import Infill, find_infill
from penstock.text.output import OutputForm
from penstock.text.reasoning import ReasoningFormatName, find_reasoning
from penstock.text.tokenizer import Tokenizer
from penstock.text.tool_calls.formats import ToolFormatName, find_format

logger = logging.getLogger("penstock.gateway")

INLINE_BYTES = 2048  # a body up to this takes about a millisecond at worst
LANES = (131_072, 2**62)  # bytes of a body: those of moderate size do not wait behind the largest
BATCHES = frozenset(("embeddings", "rerank", "score"))  # readers of many texts, which have a lane of their own
MAX_OPTION = 65_536  # bytes of a field that is not part of the prompt
PIECE = 262_144  # bytes written at once
LENGTH = struct.Struct("<I")

Head = TypeVar("Head")
Head_co = TypeVar("Head_co", covariant=True)
S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    text: str | None = None  # as the client sent it, where the answer repeats it
    similar: SimilarPrompt | None = None  # where the route lets prompts of the same meaning share an answer
    form: OutputForm | None = None  # how to read the answer to a chat; None: as text
    second_text: int = 0  # where the second of two texts begins; 0: there is one
    prediction: list[int] | None = None  # what the answer is expected to repeat


class ModelText:
    """What makes tokens of the requests for one model, and how its answers are read."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tool_parser: ToolFormatName | Literal["auto", "none"] = "auto",
        reasoning_parser: ReasoningFormatName | Literal["auto", "none"] = "auto",
    ) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer.chat_template, tokenizer.tool_template)
        self._parsers = (tool_parser, reasoning_parser)

    @cached_property
    def tools(self) -> ToolFormatName | None:
        """The format of its tool calls. None: it is not known, and calls are text like any other."""
        parser, source = self._parsers[0], self.tokenizer.tool_template or self.tokenizer.chat_template
        if parser == "auto":
            return None if source is None else find_format(source, self.template.knows_tools)
        return None if parser == "none" else parser

    @cached_property
    def reasoning(self) -> ReasoningFormatName | None:
        parser = self._parsers[1]
        if parser == "auto":
            return find_reasoning(self.tokenizer.chat_template or "")
        return None if parser == "none" else parser

    @cached_property
    def infill(self) -> Infill | None:
        """None: it cannot fill in the middle."""
        return find_infill(self.tokenizer)

    def __reduce__(self) -> tuple[Any, ...]:
        """To be sent to another process."""
        return ModelText, (self.tokenizer, *self._parsers)


# A section of the settings for each task that a request may be for.
EXAMPLES: Mapping[Task, str] = {
    "generate": "{chat: {model: smollm2-135m}}",
    "embed": "{minilm: {model: all-minilm-l6-v2}} (docs/embeddings.md)",
    "score": "{reranker: {model: cross-encoder/ms-marco-MiniLM-L6-v2}} (docs/embeddings.md)",
}

_NONE: Mapping[str, str] = {}


class Terms(NamedTuple):
    """What a reader must know of the models and of the tenant."""

    bounds: Mapping[str, Bounds]  # by every name of every model
    allowed: Sequence[str]  # names of the models that the tenant may use
    semantic: bool = False  # whether prompts of the same meaning may share an answer
    ignore_unknown: bool = False  # fields that nobody here knows
    read_for: str | None = None  # the model that is to answer, where that is another than the request names
    wildcards: Sequence[tuple[str, str]] = ()  # aliases such as claude-*, each with the name of its model
    adapters: Mapping[str, str] = _NONE  # LoRA adapters that the tenant may use, with the names of their models

    def served(self, model: str) -> str:
        """The name under which it is served: this one, or that of the model whose wildcard alias matches it."""
        if model in self.allowed or model in self.adapters:
            return model
        for pattern, name in self.wildcards:
            if name in self.allowed and fnmatchcase(model, pattern):
                return name
        raise model_not_found(model, [*self.allowed, *self.adapters])

    def base_of(self, name: str) -> str:
        """The model that an adapter changes, or the model itself."""
        return self.adapters.get(name, name)

    def check_task(self, model: str, *tasks: Task) -> None:
        """Refuse a model that is for something else, and name those that are for this."""
        if (bounds := self.bounds[model]).task in tasks:
            return
        others = [name for name in self.allowed if self.bounds[name].task in tasks]
        example = f"no model for this is served here; to add one, start the server with models: {EXAMPLES[tasks[0]]}"
        instead = f"models for this: {', '.join(others)}" if others else example
        raise InvalidRequest(
            f"model {model!r} {bounds.does} and cannot be asked for this; {instead}", param="model", code="wrong_task"
        )

    @property
    def default_model(self) -> str:
        """For requests that need not name one."""
        return next(iter(self.allowed or self.bounds))


def model_not_found(name: str, served: Sequence[str]) -> NotFound:
    known = ", ".join(served) or "nothing for this tenant"
    return NotFound(f"model {name[:200]!r} is not served here; served: {known}", param="model", code="model_not_found")


class Reader(Protocol[Head_co]):
    """Makes of a body what the gateway goes on with: something small, and prompts."""

    name: str

    def read(self, body: bytes, terms: Terms) -> tuple[Head_co, list[Prompt]]: ...


class Asked(msgspec.Struct):
    """Which model a body asks for, and for whom."""

    model: str = ""  # empty: the first one, where a request need not name any
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class ModelReader:
    """Finds what decides which model a request goes to, and nothing else."""

    name = "model"

    def __init__(self, texts: Mapping[str, ModelText]) -> None:
        self._decoder = msgspec.json.Decoder(Asked)

    def read(self, body: bytes, terms: Terms) -> tuple[Asked, list[Prompt]]:
        asked = decode_json(self._decoder, body)
        if not asked.model:
            asked.model = terms.default_model
        elif terms.wildcards:
            asked.model = terms.served(asked.model)
        return checked_options(asked) if len(body) > INLINE_BYTES else asked, []


class BlamedOn:
    """What fails in here is due to this field. A class, as every request enters one."""

    __slots__ = ("_bounds", "_param")

    def __init__(self, param: str, bounds: Bounds) -> None:
        self._param = param
        self._bounds = bounds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ContextTooLong):
            raise self._bounds.too_long(self._param) from None
        if isinstance(error, InvalidRequest):
            error.param = error.param or self._param
        elif isinstance(error, RecursionError):
            raise InvalidRequest(f"{self._param} is nested too deeply", param=self._param) from None


def checked_options(body: S, **prompt: Any) -> S:
    """The body without its prompt, which others need not carry along, if what is left of it is small. Bytes may be
    many: unlike lists and objects, they take next to no time to carry."""
    options = msgspec.structs.replace(body, **prompt)
    for name in options.__struct_fields__:
        value = getattr(options, name)
        try:
            fits = isinstance(value, bytes) or len(pickle.dumps(value)) <= MAX_OPTION
        except RecursionError:
            raise InvalidRequest(f"{name} is nested too deeply", param=name) from None
        if not fits:
            raise InvalidRequest(f"{name} is larger than {MAX_OPTION} bytes", param=name)
    return options


class Setup(NamedTuple):
    """What a process that reads requests is told at its start."""

    texts: Mapping[str, ModelText]
    logs: LogConfig


class LongRequests:
    """Hands bodies to processes that read them. Each is started when it is first needed, and again after its death."""

    def __init__(self, texts: Mapping[str, ModelText], logs: LogConfig) -> None:
        """`texts` of the models by every name that they have; the processes log as `logs` says."""
        setup = pickle.dumps(Setup(texts, logs))  # once: for a large vocabulary it takes a while
        self._names = tuple(texts)
        self._lanes = [(size, _Lane(setup)) for size in LANES]
        self._batches = _Lane(setup)

    async def warm_up(self) -> None:
        """Have one ready before it is needed."""
        with contextlib.suppress(PenstockError):  # said again to whoever needs it
            bounds = dict.fromkeys(self._names, Bounds(1, 1, 1))
            await self.read("tokenize", [b'{"prompt": ""}'], Terms(bounds, self._names))

    async def read(self, name: str, body: list[bytes], terms: Terms) -> tuple[Any, list[Prompt]]:
        lane = next(lane for size, lane in self._lanes if sum(map(len, body)) <= size)
        return await (self._batches if name in BATCHES else lane).read(name, body, terms)

    async def close(self) -> None:
        for lane in (*(lane for _, lane in self._lanes), self._batches):
            await lane.close()


class _Lane:
    """One process, which reads one body after another."""

    def __init__(self, setup: bytes) -> None:
        self._setup = setup
        self._process: asyncio.subprocess.Process | None = None
        self._jobs: deque[tuple[asyncio.Future[tuple[Any, list[Prompt]]], str, list[bytes], Terms]] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def read(self, name: str, body: list[bytes], terms: Terms) -> tuple[Any, list[Prompt]]:
        answer: asyncio.Future[tuple[Any, list[Prompt]]] = asyncio.get_running_loop().create_future()
        self._jobs.append((answer, name, body, terms))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        while self._jobs:
            answer, name, body, terms = self._jobs.popleft()
            if answer.done():  # its client has left
                continue
            try:
                found = await self._ask(name, body, terms)
                if not answer.done():
                    answer.set_result(found)
            except BaseException as error:
                if not answer.done():
                    answer.set_exception(error if isinstance(error, Exception) else _gone())
                if not isinstance(error, Exception):
                    raise
        self._worker = None

    async def _ask(self, name: str, body: list[bytes], terms: Terms) -> tuple[Any, list[Prompt]]:
        try:
            process = await self._start()
            assert process.stdin is not None
            await _write(process.stdin, [pickle.dumps((name, terms))])
            await _write(process.stdin, body)
            ok, head, count = pickle.loads(await self._frame(process))
            prompts = []
            for _ in range(count):
                prompts.append(pickle.loads(await self._frame(process)))
                await asyncio.sleep(0)
        except PenstockError:
            raise
        except Exception as error:  # whatever it is, nobody knows what comes next from there
            logger.error("lost the process that reads long requests, another follows with the next one: %r", error)
            await self._forget()
            raise _gone() from error
        if not ok:
            raise head
        return head, prompts

    async def _start(self) -> asyncio.subprocess.Process:
        if self._process is None:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "penstock.gateway.api.reader_process"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    start_new_session=True,  # a Ctrl-C in the terminal is not for it: it ends with its standard input
                )
            except OSError as error:
                raise Unavailable(
                    f"cannot start the process that reads long requests ({error}): the server may be out of file "
                    "descriptors (ulimit -n) or of memory"
                ) from error
            assert self._process.stdin is not None
            await _write(self._process.stdin, [self._setup])
        return self._process

    async def _frame(self, process: asyncio.subprocess.Process) -> bytes:
        assert process.stdout is not None
        (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        return await process.stdout.readexactly(length)

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        await self._forget()

    async def _forget(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()
            if process.stdin is not None:
                process.stdin.close()


async def _write(writer: asyncio.StreamWriter, parts: list[bytes]) -> None:
    """One frame. Other work goes on while the process takes it in."""
    writer.write(LENGTH.pack(sum(map(len, parts))))
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(part), PIECE):
            writer.write(view[start : start + PIECE])
            await writer.drain()


def _gone() -> PenstockError:
    return Unavailable("the process that reads long requests ended; send the request again")
