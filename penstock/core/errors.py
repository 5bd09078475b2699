"""Every error Penstock raises on purpose.

PenstockError
├── InvalidRequest            400  the caller must change the request; `param` names the field
│   ├── ContextTooLong        400  prompt (plus requested output) exceeds what the model can ever hold
│   └── RequestTooLarge       413  body over the size limit
├── Unauthorized              401  no key, or one that is not valid
├── Forbidden                 403  a valid key, for something else
├── RequestTimeout            408  the client took too long to send the body
├── NotFound                  404  unknown path or model
├── Overloaded                429  try again after `retry_after` seconds
│   ├── LimitReached          429  a limit of the tenant is used up for now
│   └── BudgetSpent           429  the tenant's money is used up for the day or month
├── DeadlineExceeded          504  the request's own deadline passed; what was done so far is lost
├── NotCached                 504  only a stored answer was wanted, and there is none
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


class Unauthorized(PenstockError):
    status = 401
    kind = "authentication_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")


class Forbidden(PenstockError):
    status = 403
    kind = "permission_error"


class RequestTimeout(PenstockError):
    status = 408
    kind = "timeout_error"
    retryable = True


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


class LimitReached(Overloaded):
    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message, retry_after=retry_after)
        self.code = "rate_limit_exceeded"


class BudgetSpent(Overloaded):
    kind = "insufficient_quota"
    retryable = False

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message, retry_after=retry_after)
        self.code = "insufficient_quota"


class DeadlineExceeded(PenstockError):
    status = 504
    kind = "timeout_error"

    def __init__(self, message: str, *, param: str | None = "deadline_ms") -> None:
        super().__init__(message, param=param, code="deadline_exceeded")


class NotCached(PenstockError):
    status = 504
    kind = "invalid_request_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="not_cached")


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
