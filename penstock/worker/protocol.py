"""What crosses the sockets of a worker: frames of four length bytes and one MessagePack message.

launcher → worker  Standby first, if it is to be prepared only; Start once, then one byte with the descriptor of a
                   socket for each gateway that connects
worker → launcher  Prepared, after Standby; Failed, where it cannot serve

gateway → worker   Submit, Abort, Profile; over a network also Alive four times a second
worker → gateway   Hello once, then Chunks per step, PromptScores before the Chunks they belong to, Refused, and a
                   Heartbeat four times a second; Leaving when it drains; Profiled as often as a profile has pieces

Whatever was submitted gets one last word: Refused, or a chunk with a finish reason and the ledger, also after an Abort.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from penstock.core.engine import EngineInfo, EngineStats, HostStats
from penstock.core.errors import Failure
from penstock.core.request import Chunk, GenerateRequest, TokenLogprob
from penstock.engine.settings import EngineConfig
from penstock.observability.settings import LogConfig
from penstock.profiling.summary import StepSummary

VERSION = 4  # of all of this. Fields have places and no names, so ends of different versions would misread each other
HEARTBEAT_SECONDS = 0.25
DEAD_AFTER_HEARTBEATS = 7  # without a byte: between 1.75 and 2 s
MAX_FRAME = 256 * 2**20
SCORES_IN_FRAME = 256  # tokens; decoded in about a millisecond
PROFILE_PIECE = 1 << 18  # bytes
NOT_STARTED = "not_started"  # code of the EngineFailure of a request that never came to be in a step
_LENGTH = struct.Struct("<I")


class Start(msgspec.Struct, tag="start", array_like=True):
    """All that a worker is told of the settings: secrets of the gateway stay there."""

    model: str
    engine: EngineConfig
    logs: LogConfig
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES of the process; None: as the launcher's
    secret: str = ""  # of the port that it listens at, where it was given one


class Standby(msgspec.Struct, tag="standby", array_like=True):
    """Prepare for a Start with this model and engine, and wait for it."""

    model: str
    engine: EngineConfig
    logs: LogConfig


class Prepared(msgspec.Struct, tag="prepared", array_like=True):
    """A Start would be fast now."""


class Submit(msgspec.Struct, tag="submit", array_like=True):
    request: GenerateRequest


class Abort(msgspec.Struct, tag="abort", array_like=True):
    request_id: str


class Alive(msgspec.Struct, tag="alive", array_like=True):
    """A gateway on another machine runs and can be reached."""


class Profile(msgspec.Struct, tag="profile", array_like=True):
    """Record what the worker does for so long."""

    seconds: float
    replica: str  # its name, and its number among the processes of the trace
    number: int
    now: int  # time.monotonic_ns of the gateway as it sends this
    boot: str  # of the gateway's machine


class Hello(msgspec.Struct, tag="hello", array_like=True):
    info: EngineInfo
    stats: EngineStats
    start_seconds: dict[str, float] = {}  # how long the phases of the worker's start took


class Failed(msgspec.Struct, tag="failed", array_like=True):
    message: str


class Chunks(msgspec.Struct, tag="chunks", array_like=True):
    """What a step has given. Most requests get nothing but tokens, which take a fifth of the bytes of a whole chunk."""

    chunks: list[Chunk]
    tokens: dict[str, list[int]] = {}  # by request; they come before any chunk of it


class PromptScores(msgspec.Struct, tag="scores", array_like=True):
    """Some log-probabilities of a long prompt: all in one frame would hold up the gateway while it is decoded."""

    request_id: str
    logprobs: list[TokenLogprob | None]


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """What was never accepted has no ledger, hence no last chunk."""

    request_id: str
    failure: Failure


class Heartbeat(msgspec.Struct, tag="heartbeat", array_like=True):
    stats: EngineStats
    host: HostStats | None = None  # once a second


class Pausing(msgspec.Struct, tag="pausing", array_like=True):
    """A library is going to hold the GIL: silence of so many seconds more is no death. 0: it is over."""

    seconds: float


class Leaving(msgspec.Struct, tag="leaving", array_like=True):
    """It finishes the requests that it has, then ends the connection. New ones are better sent elsewhere."""


class Profiled(msgspec.Struct, tag="profiled", array_like=True):
    """A piece of a `WorkerProfile`, which may be large: other frames go between. Or why there is none."""

    asked: int  # `now` of the `Profile` that it answers
    piece: bytes = b""
    last: bool = True
    failure: Failure | None = None


class WorkerProfile(msgspec.Struct, array_like=True):
    events: bytes  # elements of a JSON array, as in penstock/profiling/trace.py
    summary: StepSummary


ToWorker = Submit | Abort | Alive | Profile
FromWorker = Hello | Chunks | PromptScores | Refused | Heartbeat | Pausing | Leaving | Profiled
Control = Standby | Start | Prepared | Failed

_encoder = msgspec.msgpack.Encoder()
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_profile = msgspec.msgpack.Decoder(WorkerProfile).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
_decode_control = msgspec.msgpack.Decoder(Control).decode


def frame(message: ToWorker | FromWorker | Control) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def frames_of(chunks: list[Chunk]) -> bytes:
    """The chunks of a step, after what is too much for one frame. Of a request there is one with tokens at most, and no
    other before it."""
    frames: list[bytes] = []
    tokens: dict[str, list[int]] = {}
    others: list[Chunk] = []
    for chunk in chunks:
        scores = chunk.prompt_logprobs
        only_once = chunk.finish_reason or chunk.cached_tokens or chunk.queue_seconds  # with the first or the last one
        if not only_once and chunk.logprobs is None and scores is None:
            tokens[chunk.request_id] = chunk.token_ids
            continue
        others.append(chunk)
        if scores is not None and len(scores) > SCORES_IN_FRAME:
            for start in range(0, len(scores), SCORES_IN_FRAME):
                frames.append(frame(PromptScores(chunk.request_id, scores[start : start + SCORES_IN_FRAME])))
            chunk.prompt_logprobs = []
    frames.append(frame(Chunks(others, tokens)))
    return b"".join(frames)


def take_frames(buffer: bytearray, data: bytes) -> list[bytes]:
    """The frames that `data` completes; `buffer` keeps what has come of the next one."""
    if buffer:
        buffer += data
        if len(buffer) < _LENGTH.size or len(buffer) < _LENGTH.size + _length(buffer):
            return []
        data = bytes(buffer)
        buffer.clear()
    frames: list[bytes] = []
    at, have, head = 0, len(data), _LENGTH.size
    while have - at >= head:
        begin = at + head
        end = begin + _length(data, at)
        if end > have:
            break
        frames.append(data[begin:end])
        at = end
    if at < have:
        buffer += data[at:]
    return frames


def read_control(connection: socket.socket) -> Control | None:
    """What the other end of a control socket says next; None if it has gone. Blocks, and reads not a byte more: the
    next one may carry a descriptor."""
    head = _read_exactly(connection, _LENGTH.size)
    body = _read_exactly(connection, _length(head)) if head else b""
    return _decode_control(body) if body else None


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    """b"" if the other end has gone before."""
    data = b""
    while len(data) < size:
        try:
            more = connection.recv(size - len(data))
        except ConnectionError:
            return b""
        if not more:
            return b""
        data += more
    return data


def _length(data: bytes | bytearray, at: int = 0) -> int:
    length: int
    (length,) = _LENGTH.unpack_from(data, at)
    if length > MAX_FRAME:
        raise ConnectionError(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
    return length
