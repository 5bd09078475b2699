"""What every endpoint shares: the engine, its tokenizer, the names it is served under, the limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from penstock.core.engine import ServedEngine
from penstock.core.errors import InvalidRequest, NotFound
from penstock.gateway.errors import decode_json, require
from penstock.gateway.exchange import Exchange, Traffic
from penstock.observability.metrics import GatewayMetrics
from penstock.text.tokenizer import Tokenizer

T = TypeVar("T")

INLINE_CHARACTERS = 2048  # tokenising more than this would stall the event loop for about a millisecond

encode_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Serving:
    engine: ServedEngine
    tokenizer: Tokenizer
    model_names: tuple[str, ...]  # the first one is canonical
    metrics: GatewayMetrics
    traffic: Traffic
    max_body: int  # bytes
    created: int = field(default_factory=lambda: int(time.time()))

    async def read(self, exchange: Exchange, decoder: msgspec.json.Decoder[T]) -> T:
        return decode_json(decoder, await exchange.body(self.max_body))

    def check_model(self, name: str) -> None:
        if name not in self.model_names:
            served = ", ".join(self.model_names)
            raise NotFound(
                f"model {name[:200]!r} is not served here; served: {served}", param="model", code="model_not_found"
            )

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        vocab_size = self.engine.info.vocab_size
        require(min(token_ids, default=0) >= 0, param, "must not hold negative token ids")
        require(max(token_ids, default=0) < vocab_size, param, f"must hold token ids below {vocab_size}")


async def off_loop_if_long(characters: int, work: Callable[[], T], param: str) -> T:
    """Tokenising releases the GIL: long texts go to a thread, short ones are done before it would have started."""
    try:
        return work() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)
    except InvalidRequest as error:
        error.param = error.param or param
        raise
    except RecursionError:
        raise InvalidRequest(f"{param} is nested too deeply", param=param) from None


DONE = b"data: [DONE]\n\n"


def event(data: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % encode_json(data)
