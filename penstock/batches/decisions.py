"""What happens next to a batch and to its lines. Pure: no clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.batches.records import Batch, Ending, FileLimits, LineError, Status, StoredFile
from penstock.core.engine import EngineStats
from penstock.core.errors import InvalidRequest, Unavailable

LEASE_SECONDS = 30.0  # after which a line belongs to nobody again, unless its lease is renewed
FIRST_RENEWAL, RENEW_SECONDS = 0.25, 5.0  # seconds between renewals, and so between journal entries
MAX_ATTEMPTS = 5  # that fail by the engine's fault; then the line is a dead letter
MAX_LOSSES = 20  # leases without a new token that ended with the death of their process: a line may be what kills it
FIRST_AT_ONCE = 8  # requests that a process works on before the first of them has come to an end
FIRST_DELAY, MAX_DELAY = 1.0, 60.0  # seconds before another attempt
MAX_WAIT = 600.0  # seconds before another attempt where Retry-After says more: a budget may be raised meanwhile

SERVED_SECONDS = 120.0  # for which models count as served that a process has announced
ANNOUNCE_SECONDS = 20.0

MAX_BACKLOG = 0.5  # seconds of prefill that an engine has before it, beyond which it is given no more
EFFICIENT = 4.0  # streams add so many times a step's fixed cost to it: then further ones make it hardly more efficient

_WINDOW_UNITS = {"m": 60, "h": 3600, "d": 86400}
MAX_WINDOW = 30 * 86400


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again after so many seconds. `counts`: the attempt counts against the line."""

    delay: float
    counts: bool


def after_failure(
    status: int, retryable: bool, attempts: int, jitter: float, retry_after: float = 0.0, patience: float = 0.0
) -> Retry | None:
    """What follows an attempt that ended with this HTTP status. None: it is the line's answer.

    A full engine or a spent limit says nothing of the line, so it waits however often; what fails in the engine may be
    the line's own fault. A spent budget is waited for as well, if it is there again within `patience`, in seconds.
    `jitter` is between 0 and 1.
    """
    if not retryable and not (status == 429 and 0 < retry_after <= patience):
        return None
    innocent = status in (429, 503)
    if not innocent and attempts + 1 >= MAX_ATTEMPTS:
        return None
    delay = min(MAX_DELAY, FIRST_DELAY * 2 ** min(attempts, 6)) * (0.5 + jitter / 2)
    return Retry(max(delay, min(retry_after, MAX_WAIT)), counts=not innocent)


def room(stats: EngineStats, running: int, most: int) -> int:
    """How many more requests that nobody waits for an engine should be given, which has `running` of them.

    By its step-time model: as many streams as make its steps efficient, and none while others wait for it or prefill
    is forecast to take a while. One always runs, so that there is progress.
    """
    wanted = most
    if stats.stream_step_seconds > 0 and stats.fixed_step_seconds > 0:
        wanted = min(most, math.ceil(EFFICIENT * stats.fixed_step_seconds / stats.stream_step_seconds))
    speed = stats.prefill_tokens_per_second
    if stats.waiting or (speed > 0 and stats.prefill_tokens / speed > MAX_BACKLOG):
        wanted = 1
    return max(1, wanted) - running


def at_once(ended: int, most: int) -> int:
    """How many requests a process may work on that has come to an end with so many.

    Few at first: whoever is killed again and again soon after its start has begun only a few requests each time, so
    those that are innocent come to an end before they count as what kills it.
    """
    return min(most, FIRST_AT_ONCE + 2 * ended)


def renewal_seconds(number: int) -> float:
    """How long a process waits before a renewal, counted from its start.

    Often at first: whoever is killed again and again soon after its start still goes on from where it was.
    """
    return min(RENEW_SECONDS, FIRST_RENEWAL * 2.0 ** min(number, 10))


def next_status(batch: Batch, unanswered: int, leased: int, now: float) -> tuple[Status, Ending | None] | None:
    """What a batch becomes by itself, and how it will end; None: it stays as it is."""
    if batch.status == "in_progress":
        if unanswered == 0:
            return "finalizing", "completed"
        if now >= batch.expires_at:
            return "finalizing", "expired"
    elif batch.status == "cancelling" and batch.ending is None and leased == 0:
        return "cancelling", "cancelled"
    return None


def validated(batch: Batch, total: int, model: str | None, errors: Sequence[LineError], now: float) -> Batch:
    if errors:
        return replace(batch, status="failed", failed_at=int(now), errors=tuple(errors), model=model)
    return replace(batch, status="in_progress", in_progress_at=int(now), total=total, model=model)


def cancelled(batch: Batch, now: float) -> Batch:
    if batch.status in ("validating", "in_progress"):
        return replace(batch, status="cancelling", cancelling_at=int(now))
    return batch


def ended(batch: Batch, files: Iterable[StoredFile], now: float) -> Batch:
    """Its files are written."""
    assert batch.ending is not None
    ids = {"error_file_id" if file.filename.endswith("_error.jsonl") else "output_file_id": file.id for file in files}
    return replace(batch, status=batch.ending, **ids, **{f"{batch.ending}_at": int(now)})  # type: ignore[arg-type]


def check_limits(limits: FileLimits, count: int, size: int, more: int) -> None:
    """Whether a tenant that has so many files of this size may have another."""
    if count >= limits.files:
        raise InvalidRequest(
            f"there are {count} files, and no more than {limits.files} are kept for a tenant; delete some",
            param="file",
            code="too_many_files",
        )
    if size + more > limits.bytes:
        raise InvalidRequest(
            f"the files of this tenant would have {size + more} bytes, and no more than {limits.bytes} are kept; "
            "delete some",
            param="file",
            code="storage_limit_reached",
        )


def lost_job() -> Unavailable:
    return Unavailable("another process works on this batch by now", code="lease_lost")


def in_use(file: str, batch: str) -> InvalidRequest:
    return InvalidRequest(
        f"{file} is the input of {batch}, which has not ended; cancel that first", param="file_id", code="file_in_use"
    )


def repeated(custom_id: str, line: int) -> LineError:
    return LineError("duplicate_custom_id", f"custom_id {custom_id[:200]!r} came on an earlier line", line, "custom_id")


def window_seconds(window: str) -> int | None:
    """Of a completion window such as 24h, 30m or 7d; None: it is none."""
    number, unit = window[:-1], _WINDOW_UNITS.get(window[-1:])
    if unit is None or not (number.isascii() and number.isdigit() and len(number) <= 6):
        return None
    seconds = int(number) * unit
    return seconds if 0 < seconds <= MAX_WINDOW else None
