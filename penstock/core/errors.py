"""Every error Penstock raises on purpose.

PenstockError
├── InvalidRequest            400  the caller must change the request; `param` names the field
│   ├── ContextTooLong        400  prompt (plus requested output) exceeds what the model can ever hold
│   └── RequestTooLarge       413  body over the size limit
├── Unauthorized              401  no key, or one that is not valid
├── Forbidden                 403  a valid key, for something else
├── RequestTimeout            408  the client took too long to send the body
├── NotFound                  404  unknown path or model
├── Conflict                  409  something that can only be done once at a time is being done
├── Overloaded                429  try again after `retry_after` seconds
│   ├── DeadlineTooShort      429  the request's own prefill takes longer than its deadline leaves
│   ├── LimitReached          429  a limit of the tenant is used up for now
│   └── BudgetSpent           429  the tenant's money is used up for the day or month
├── DeadlineExceeded          504  the request's own deadline passed; what was done so far is lost
├── NotCached                 504  only a stored answer was wanted, and there is none
├── Unavailable               503  no worker can serve now (starting, draining, died)
├── StorageFull               507  there is no room on disk for what was sent or is to be kept
├── EngineFailure             500  a step failed; the request was lost, others go on
├── MessageTooLarge           500  a message broker does not take an answer of this size
├── InvalidLogits             500  the model computed no numbers for this request, as it would on any replica
└── StartupError              --   settings, checkpoint or memory do not allow serving at all

An error knows its HTTP status and whether sending the same request again can help. Between processes it travels as a
`Failure`, which is data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


class PenstockError(Exception):
    status = 500
    kind = "server_error"
    retryable = False
    code: str | None = None
    param: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param or type(self).param
        self.code = code or type(self).code


class InvalidRequest(PenstockError):
    status = 400
    kind = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    """Client libraries know it by words of its message rather than by its code: see `beyond`."""

    code = "context_length_exceeded"
    param = "messages"
    excess = ""  # "600 tokens > 511 maximum", as Anthropic says it; empty: only the message is known

    @classmethod
    def beyond(cls, limit: int, however: str, *, param: str, excess: str = "") -> Self:
        """In OpenAI's words. `limit`: tokens of prompt and output together; `however`: what is wrong with this request,
        and the way out."""
        error = cls(f"This model's maximum context length is {limit} tokens. However, {however}", param=param)
        error.excess = excess
        return error


class RequestTooLarge(InvalidRequest):
    status = 413


class Unauthorized(PenstockError):
    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


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


class Conflict(PenstockError):
    status = 409
    kind = "invalid_request_error"
    retryable = True


class Overloaded(PenstockError):
    status = 429
    kind = "rate_limit_error"
    retryable = True
    code = "overloaded"

    def __init__(self, message: str, *, retry_after: float, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class DeadlineTooShort(Overloaded):
    """Not for load: an idle engine refuses it too."""

    retryable = False
    code = "deadline_too_short"
    param = "deadline_ms"


class LimitReached(Overloaded):
    code = "rate_limit_exceeded"


class BudgetSpent(Overloaded):
    kind = "insufficient_quota"
    retryable = False
    code = "insufficient_quota"


class DeadlineExceeded(PenstockError):
    status = 504
    kind = "timeout_error"
    code = "deadline_exceeded"
    param = "deadline_ms"


class NotCached(PenstockError):
    status = 504
    kind = "invalid_request_error"
    code = "not_cached"


class Unavailable(PenstockError):
    status = 503
    kind = "service_unavailable"
    retryable = True


class StorageFull(PenstockError):
    status = 507
    code = "storage_full"


class EngineFailure(PenstockError):
    status = 500
    kind = "server_error"
    retryable = True


class MessageTooLarge(PenstockError):
    code = "answer_too_large"


class InvalidLogits(PenstockError):
    code = "invalid_logits"


class StartupError(PenstockError):
    """Raised before serving begins; the message says what to change."""


# Those that another process may give as the reason why a request was refused or ended.
_BETWEEN_PROCESSES: dict[str, type[PenstockError]] = {
    kind.__name__: kind
    for kind in (
        InvalidRequest,
        ContextTooLong,
        NotFound,
        Conflict,
        Overloaded,
        DeadlineTooShort,
        DeadlineExceeded,
        Unavailable,
        EngineFailure,
        InvalidLogits,
        StartupError,
    )
}


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as data, for the last chunk of a request and for the wire."""

    error: str  # name of its class
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None

    @classmethod
    def of(cls, error: PenstockError) -> Failure:
        retry_after = error.retry_after if isinstance(error, Overloaded) else None
        return cls(type(error).__name__, error.message, error.param, error.code, retry_after)

    def exception(self) -> PenstockError:
        """An error of the same class; one that does not come from other processes becomes an `EngineFailure`."""
        kind = _BETWEEN_PROCESSES.get(self.error, EngineFailure)
        extras = {} if self.retry_after is None else {"retry_after": self.retry_after}
        error = kind(self.message, **extras)  # type: ignore[arg-type]
        error.param, error.code = self.param, self.code
        return error
