"""An engine that answers from a script, to see what the parts before it make of that.

A gateway that always says hello:

    (hello,) = says(tokenizer, "Hello there!")
    engine = ScriptedEngine(tokenizer, lambda request: [[token] for token in hello])
    app = create_app([ServedModel(["scripted"], tokenizer, engine)], Settings())
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from penstock.core.engine import EngineInfo, EngineStats, Health
from penstock.core.errors import Failure
from penstock.core.ledger import Ledger, PrefillChunk, Stall
from penstock.core.request import Chunk, FinishReason, GenerateRequest, TokenLogprob
from penstock.text.tokenizer import Tokenizer

MODEL = "scripted"
MAX_MODEL_LEN = 512

# token ids make a chunk, a failure the last one, an exception is raised, a callable is awaited
Action = Sequence[int] | Failure | Exception | Callable[[], Awaitable[object]]
Script = Callable[[GenerateRequest], Sequence[Action]]


async def hang() -> None:
    await asyncio.Event().wait()


def ledger_of(request: GenerateRequest, seconds: float, output_tokens: int) -> Ledger:
    """True in its total, invented in how that divides."""
    return Ledger(
        request.id,
        request.tenant,
        request.objective.name,
        arrived=time.time() - seconds,
        total=seconds,
        ttft=seconds / 2,
        predicted_ttft=seconds / 4,
        queued={"order": seconds / 8, "step": seconds / 8},
        prefill=[PrefillChunk(2, seconds / 8), PrefillChunk(1, seconds / 8)],
        decode=seconds / 4,
        decode_steps=output_tokens,
        stalled=seconds / 4,
        stalls=[Stall("someone-else-0", seconds / 8, 3)],
        prompt_tokens=len(request.prompt),
        cached_tokens=2,
        missed_tokens={"never_seen": len(request.prompt) - 2},
        output_tokens=output_tokens,
        preemptions=1,
        recomputed_tokens=5,
        forced_tokens=1,
        met_ttft=False,
        met_gap=True,
    )


def logprob_of(token_id: int) -> float:
    return -(token_id % 7 + 1) / 8


def with_top(token_id: int, count: int) -> TokenLogprob:
    top = [(token_id + i, logprob_of(token_id) - i) for i in range(count)]
    return TokenLogprob(token_id, logprob_of(token_id), tuple(top))


class ScriptedEngine:
    """Stops at the end token, at max_tokens or at the end of its script, like a real one."""

    def __init__(self, tokenizer: Tokenizer, script: Script) -> None:
        self.info = EngineInfo(MODEL, MAX_MODEL_LEN, tokenizer.vocab_size)
        self.stats = EngineStats(running=3, waiting=2, kv_blocks=100, kv_blocks_used=25, steps=7, preemptions=1)
        self.healthy = True
        self.script = script
        self.requests: list[GenerateRequest] = []
        self.ended: dict[str, threading.Event] = {}  # set when the iterator of a request is left for good
        self.begun: dict[str, tuple[GenerateRequest, float]] = {}  # those that raised nothing
        self._eos = tokenizer.eos_ids

    def health(self) -> Health:
        return Health(self.healthy, "idle" if self.healthy else "no step for 60 s")

    async def submit(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        self.begun[request.id] = request, time.monotonic()
        ended = self.ended[request.id] = threading.Event()
        try:
            async for chunk in self._chunks(request):
                yield chunk
        except Exception:
            del self.begun[request.id]
            raise
        finally:
            ended.set()

    async def aborted(self, request_id: str) -> Ledger | None:
        if request_id not in self.begun:
            return None
        await asyncio.to_thread(self.ended[request_id].wait, 20)
        request, begun = self.begun[request_id]
        return ledger_of(request, time.monotonic() - begun, 1)

    async def _chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        params = request.params
        most = MAX_MODEL_LEN if params.max_tokens is None else params.max_tokens
        arrived = time.monotonic()
        sent = 0
        for action in self.script(request):
            if isinstance(action, Exception):
                raise action
            if isinstance(action, Failure):
                reason: FinishReason = "deadline" if action.error == "DeadlineExceeded" else "error"
                ledger = ledger_of(request, time.monotonic() - arrived, sent)
                yield Chunk(request.id, finish_reason=reason, error=action, ledger=ledger)
                return
            if callable(action):
                await action()
                continue
            token_ids = list(action)[: most - sent]
            chunk = Chunk(request.id, token_ids)
            if sent == 0:
                chunk.cached_tokens, chunk.queue_seconds = 2, 0.004
                if params.prompt_logprobs is not None:
                    chunk.prompt_logprobs = [None, *(with_top(i, params.prompt_logprobs) for i in request.prompt[1:])]
            sent += len(token_ids)
            if params.logprobs is not None:
                chunk.logprobs = [with_top(token_id, params.logprobs) for token_id in token_ids]
            if sent and token_ids[-1] in self._eos and not params.ignore_eos:
                chunk.finish_reason = "stop"
            elif sent == params.max_tokens:
                chunk.finish_reason = "length"
            if chunk.finish_reason:
                chunk.ledger = ledger_of(request, time.monotonic() - arrived, sent)
            yield chunk
            if chunk.finish_reason:
                return
            await asyncio.sleep(0)  # as if other requests had their turn


def says(tokenizer: Tokenizer, *texts: str) -> list[list[int]]:
    """A script that answers choice i with text i (the last one for all further), a token a chunk, and the end token."""
    return [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_ids[0]] for text in texts]
