"""Every error Penstock raises on purpose.

PenstockError
├── InvalidRequest            400  the caller must change the request; `param` names the field
│   ├── ContextTooLong        400  prompt (plus requested output) exceeds what the model can ever hold
│   └── RequestTooLarge       413  body over the size limit
├── NotFound                  404  unknown path or model
├── Overloaded                429  try again after `retry_after` seconds
├── DeadlineExceeded          504  the request's own deadline passed; what was done so far is lost
├── Unavailable               503  no worker can serve now (starting, draining, died)
├── EngineFailure             500  a step failed; the request was lost, others go on
└── StartupError              --   settings, checkpoint or memory do not allow serving at all

An error knows its HTTP status and whether sending the same request again can help.
"""

from __future__ import annotations


class PenstockError(Exception):
    status = 500
    kind = "server_error"
    retryable = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(PenstockError):
    status = 400
    kind = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class RequestTooLarge(InvalidRequest):
    status = 413


class NotFound(PenstockError):
    status = 404
    kind = "invalid_request_error"


class Overloaded(PenstockError):
    status = 429
    kind = "rate_limit_error"
    retryable = True

    def __init__(self, message: str, *, retry_after: float, param: str | None = None) -> None:
        super().__init__(message, param=param, code="overloaded")
        self.retry_after = retry_after


class DeadlineExceeded(PenstockError):
    status = 504
    kind = "timeout_error"

    def __init__(self, message: str, *, param: str | None = "deadline_ms") -> None:
        super().__init__(message, param=param, code="deadline_exceeded")


class Unavailable(PenstockError):
    status = 503
    kind = "service_unavailable"
    retryable = True


class EngineFailure(PenstockError):
    status = 500
    kind = "server_error"
    retryable = True


class StartupError(PenstockError):
    """Raised before serving begins; the message says what to change."""
