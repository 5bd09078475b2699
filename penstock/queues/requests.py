"""The form of what comes from a queue and goes back to one: that of the lines of batches."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import msgspec

from penstock.batches.records import Answered
from penstock.core.errors import InvalidRequest

MAX_ID = 512  # characters
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")  # endpoints that have the field `stream`
_DONE = b"[DONE]"


class QueueRequest(msgspec.Struct):
    custom_id: str
    url: str
    body: dict[str, msgspec.Raw]
    method: str = "POST"


class Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class WholeAnswer(msgspec.Struct):
    custom_id: str
    response: Response


class ChunkAnswer(msgspec.Struct):
    """Chunks of one attempt are numbered from 0. A request that is begun anew after a crash is another attempt, and
    its chunks take the place of those before."""

    custom_id: str
    attempt: str
    index: int
    chunk: msgspec.Raw


class DeadLetter(msgspec.Struct):
    code: str
    message: str
    payload: str
    payload_bytes: int  # of the whole payload: a broker may have no room for it in a letter
    source: str  # Redis: the id in the stream; RabbitMQ: the message_id; Kafka: topic/partition/offset


_decoder = msgspec.json.Decoder(QueueRequest)
_encode = msgspec.json.Encoder().encode


def read_request(payload: bytes, endpoints: Collection[str], *, stream: bool) -> tuple[QueueRequest, bytes]:
    """The request, and its body as the endpoint takes it."""
    try:
        request = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the message is no request: {error}", code="invalid_message") from error
    if not 0 < len(request.custom_id) <= MAX_ID:
        raise InvalidRequest(f"custom_id must have 1 to {MAX_ID} characters", param="custom_id")
    if request.url not in endpoints or request.method != "POST":
        raise InvalidRequest(f"url must be one of {', '.join(endpoints)}, with the method POST", param="url")
    if bytes(request.body.get("background", b"")) not in (b"", b"false", b"null"):
        problem = "background must be left out: the answer goes to the queue, and is not fetched later"
        raise InvalidRequest(problem, param="background")
    if request.url in STREAMED:
        request.body["stream"] = msgspec.Raw(b"true" if stream else b"false")
    return request, _encode(request.body)


def seed_of(queue: str, id: str) -> int:
    """The same for every consumer, by whatever address it knows the broker, so that a request which begins anew
    elsewhere samples the same tokens."""
    return int.from_bytes(hashlib.sha256(f"{queue}/{id}".encode()).digest()[:8], "little") >> 1


def whole_answer(id: str, answer: Answered) -> bytes:
    return _encode(WholeAnswer(id, Response(answer.status, answer.request_id, msgspec.Raw(answer.body))))


class _Status(msgspec.Struct):
    status_code: int


class _Outcome(msgspec.Struct):
    response: _Status | None = None  # None: it is a chunk


_outcome = msgspec.json.Decoder(_Outcome)


def was_computed(answer: Sequence[str]) -> bool:
    """Whether an answer is one, and not the refusal or failure of a request that may be sent again."""
    response = _outcome.decode(answer[0]).response
    return response is None or response.status_code < 300


def dead_letter(code: str, message: str, payload: bytes, source: str, most: int) -> bytes:
    """`most`: bytes of the payload."""
    if most < len(payload):
        message = f"{message}; the payload is cut: here are its first {most} bytes"
    return _encode(DeadLetter(code, message, payload[:most].decode("utf-8", "replace"), len(payload), source))


def chunk_answers(id: str, attempt: str, index: int, events: bytes) -> list[bytes]:
    """One message for each server-sent event that has data."""
    made: list[bytes] = []
    for line in events.split(b"\n"):
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != _DONE:
            made.append(_encode(ChunkAnswer(id, attempt, index + len(made), msgspec.Raw(data))))
    return made
