"""Every error leaves the gateway in OpenAI's shape: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import math

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

    def __init__(self, message: str) -> None:
        super().__init__(message, param="content-type", code="unsupported_media_type")


class UnsupportedCoding(PenstockError):
    status = 501
    kind = "invalid_request_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="unsupported_transfer_encoding")


class ClientGone(PenstockError):
    """Nobody is left to answer. The status is only ever seen in logs and metrics."""

    status = 499


_encode = msgspec.json.Encoder().encode


def error_body(error: PenstockError) -> bytes:
    return _encode(ErrorBody(ErrorDetail(error.message, error.kind, error.param, error.code)))


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
