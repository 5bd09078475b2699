"""What the queue of batches keeps: files, batches, and lines of batches. Times are seconds since 1970."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

Purpose = Literal["batch", "batch_output"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Ending = Literal["completed", "expired", "cancelled"]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What is known of a file. Its contents are kept elsewhere (`files.py`), under its id."""

    id: str
    tenant: str
    filename: str
    bytes: int
    created_at: int
    purpose: Purpose
    expires_at: int | None = None


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a batch could not begin."""

    code: str
    message: str
    line: int | None = None  # from 1
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    ending: Ending | None = None  # what it becomes once its files are written
    metadata: Mapping[str, str] | None = None
    model: str | None = None
    output_expires_after: int | None = None  # seconds
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[LineError, ...] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def over(self) -> bool:
        return self.status in ("failed", "completed", "expired", "cancelled")


_OWN_COLUMNS = ("status", "completed", "failed")  # stores keep these beside the record: they change often


def record_of(batch: Batch) -> str:
    """What has no column of its own."""
    return json.dumps({name: value for name, value in asdict(batch).items() if name not in _OWN_COLUMNS})


def batch_of(record: str | bytes, status: str, completed: int, failed: int) -> Batch:
    values: dict[str, Any] = json.loads(record)
    values["errors"] = tuple(LineError(**error) for error in values["errors"])
    return Batch(**values, status=status, completed=completed, failed=failed)  # type: ignore[arg-type]


class Line(NamedTuple):
    """One line that this process has leased."""

    batch: str
    number: int  # from 1, as in the input file
    custom_id: str
    tenant: str
    endpoint: str
    model: str
    start: int  # where its body lies in the input file
    size: int
    file: str
    seed: int  # of what it samples, the same in every attempt
    attempts: int  # that failed
    losses: int  # leases without a new token that ended with the death of whoever had them
    journal: bytes  # tokens of earlier attempts, see `journal.py`
    expires_at: float  # when the completion window of its batch is over


class Answered(NamedTuple):
    """What a line became: a whole HTTP answer."""

    status: int
    request_id: str
    body: bytes  # JSON


@dataclass(frozen=True, slots=True)
class Job:
    """Work on a whole batch, for one process at a time."""

    kind: Literal["validate", "assemble"]
    batch: Batch


@dataclass(frozen=True, slots=True)
class FileLimits:
    """What one tenant may keep."""

    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list is asked for: so many after this id."""

    limit: int = 20
    after: str | None = None
    ascending: bool = False
    extra: Mapping[str, str] = field(default_factory=dict)  # values that columns must have


def new_id(prefix: str) -> str:
    """Cannot be guessed, and is a plain file name."""
    return f"{prefix}{secrets.token_hex(16)}"
