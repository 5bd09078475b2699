"""How errors leave the gateway: in OpenAI's shape, `{"error": {message, type, param, code}}`, unless an endpoint is of
another API and has an `ErrorFormat` of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import msgspec

from penstock.core.errors import (
    InvalidRequest,
    Overloaded,
    PenstockError,
    RequestTimeout,
    RequestTooLarge,
    Unauthorized,
    Unavailable,
)

UNKNOWN_FIELD = "unrecognized_request_argument"  # the code of errors about fields that an endpoint does not have
UNAVAILABLE_RETRY_SECONDS = 1  # such an error does not know when its cause ends


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class InternalError(PenstockError):
    """Stands in for an exception nobody foresaw; its details are in the log, not in the response."""


class MethodNotAllowed(PenstockError):
    status = 405
    kind = "invalid_request_error"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message, code="method_not_allowed")
        self.allow = allow


class HeadersTooLarge(PenstockError):
    status = 431
    kind = "invalid_request_error"


class UnsupportedMediaType(PenstockError):
    status = 415
    kind = "invalid_request_error"

    def __init__(self, message: str, param: str = "content-type") -> None:
        super().__init__(message, param=param, code="unsupported_media_type")


class UnsupportedCoding(PenstockError):
    status = 501
    kind = "invalid_request_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="unsupported_transfer_encoding")


class ClientGone(PenstockError):
    """Nobody is left to answer. The status is only ever seen in logs and metrics."""

    status = 499


_encode = msgspec.json.Encoder().encode


class ErrorFormat(Protocol):
    """The JSON of errors in one API."""

    def status(self, error: PenstockError) -> int: ...

    def message(self, error: PenstockError) -> str:
        """With the names that the fields have in this API."""
        ...

    def body(self, error: PenstockError, request_id: str) -> bytes: ...

    def event(self, error: PenstockError, request_id: str) -> bytes:
        """What ends a stream."""
        ...


class OpenAIErrors:
    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        """`names`: what the API calls fields of chat completions, or parts of their paths."""
        self._names = names or {}

    def status(self, error: PenstockError) -> int:
        return error.status

    def message(self, error: PenstockError) -> str:
        return renamed(error, self._names)[0]

    def body(self, error: PenstockError, request_id: str) -> bytes:
        message, param = renamed(error, self._names)
        return _encode(ErrorBody(ErrorDetail(message, error.kind, param, error.code)))

    def event(self, error: PenstockError, request_id: str) -> bytes:
        return b"data: %b\n\n" % self.body(error, request_id)


OPENAI_ERRORS = OpenAIErrors()


def renamed(error: PenstockError, names: Mapping[str, str]) -> tuple[str, str | None]:
    """The message and the field that it is about, where the API of the request calls that differently."""
    message, param = error.message, error.param
    if error.code == UNKNOWN_FIELD:  # which is what the client called it
        return message, param
    for name, other in names.items():
        if param is not None and name in param:
            message, param = message.replace(param, param.replace(name, other)), param.replace(name, other)
            break
    return message, param


def error_headers(error: PenstockError) -> list[tuple[bytes, bytes]]:
    if isinstance(error, MethodNotAllowed):
        return [(b"allow", error.allow.encode())]
    if isinstance(error, Overloaded):
        wait = (b"retry-after", b"%d" % max(1, math.ceil(error.retry_after)))
        # OpenAI's clients repeat a 429 by themselves, unless told.
        return [wait] if error.retryable else [wait, (b"x-should-retry", b"false")]
    if isinstance(error, Unauthorized):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, Unavailable):
        return [(b"retry-after", b"%d" % UNAVAILABLE_RETRY_SECONDS)]
    return []


def leaves_input(error: PenstockError) -> bool:
    """Whether the rest of the body is not read, so that the connection must end."""
    return isinstance(error, RequestTimeout | RequestTooLarge)


def require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise InvalidRequest(f"{param} {message}", param=param)
