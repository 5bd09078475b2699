"""What crosses the socket between a gateway and a worker: frames of four length bytes and one MessagePack message.

gateway → worker   Submit, Abort
worker → gateway   Hello once, then Chunks per step, Refused, and a Beat every second
"""

from __future__ import annotations

import asyncio
import struct

import msgspec

from penstock.core import errors
from penstock.core.engine import EngineInfo, EngineStats
from penstock.core.request import Chunk, GenerateRequest

BEAT_SECONDS = 1.0
MAX_FRAME = 256 * 2**20
_LENGTH = struct.Struct("<I")


class Submit(msgspec.Struct, tag="submit", array_like=True):
    request: GenerateRequest


class Abort(msgspec.Struct, tag="abort", array_like=True):
    request_id: str


class Hello(msgspec.Struct, tag="hello", array_like=True):
    info: EngineInfo


class Chunks(msgspec.Struct, tag="chunks", array_like=True):
    chunks: list[Chunk]


class Refused(msgspec.Struct, tag="refused", array_like=True):
    request_id: str
    error: str  # name of a class in core.errors
    message: str
    param: str | None

    def exception(self) -> errors.PenstockError:
        kind = getattr(errors, self.error, errors.EngineFailure)
        if kind not in (errors.InvalidRequest, errors.ContextTooLong):
            kind = errors.EngineFailure
        refusal: errors.PenstockError = kind(self.message, param=self.param)
        return refusal


class Beat(msgspec.Struct, tag="beat", array_like=True):
    stats: EngineStats


ToWorker = Submit | Abort
FromWorker = Hello | Chunks | Refused | Beat

_encoder = msgspec.msgpack.Encoder()
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


def frame(message: ToWorker | FromWorker) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Raises IncompleteReadError at the end of the stream."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > MAX_FRAME:
        raise ConnectionError(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
    return await reader.readexactly(length)
