"""The `BatchStore` protocol: files, batches and the durable queue of their lines.

SQLite (`sqlite.py`) serves the gateway processes of one machine, Redis (`redis_store.py`) gateways on several. What is
promised: a line has one lease at a time, its answer is committed together with its acknowledgement, and an answer whose
lease was lost meanwhile is dropped. So each line is answered once, whoever dies when.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.batches.records import Answered, Batch, FileLimits, Job, Line, LineError, Page, StoredFile


class NewLine(NamedTuple):
    """A line of an input file that can be queued."""

    number: int
    custom_id: str
    model: str
    start: int  # of its body in the file
    size: int
    seed: int


class Kept(NamedTuple):
    """A leased line and what its journal holds by now; None: as it was."""

    line: Line
    journal: bytes | None


class Row(NamedTuple):
    """What became of a line, for the files of its batch."""

    number: int
    custom_id: str
    answer: Answered | None  # None: it was never answered


class BatchStore(Protocol):
    owner: str  # this process, in leases

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    # ------------------------------------------------------------ files

    async def add_file(self, file: StoredFile, limits: FileLimits | None) -> None:
        """Raises InvalidRequest when the tenant has too many, or too large ones."""
        ...

    async def file(self, tenant: str, id: str) -> StoredFile | None: ...

    async def files(self, tenant: str, page: Page) -> list[StoredFile]: ...

    async def delete_file(self, tenant: str, id: str) -> bool:
        """Whether there was one. Raises InvalidRequest while a batch reads it."""
        ...

    async def unknown_files(self, ids: Collection[str]) -> list[str]:
        """Those of these ids under which no file is known."""
        ...

    async def expired_files(self, now: float) -> list[str]:
        """Forget files whose time has passed. Returns their ids."""
        ...

    # ------------------------------------------------------------ batches

    async def add_batch(self, batch: Batch) -> None: ...

    async def batch(self, tenant: str, id: str) -> Batch | None: ...

    async def batches(self, tenant: str, page: Page) -> list[Batch]: ...

    async def cancel(self, tenant: str, id: str, now: float) -> Batch | None: ...

    async def advance(self, now: float) -> Mapping[str, int]:
        """Let batches become what `decisions.next_status` says. Returns those in progress, with their lines that have
        no answer yet."""
        ...

    async def claim_job(self, now: float) -> Job | None:
        """A batch to validate or to assemble, for this process."""
        ...

    async def renew_job(self, job: Job, now: float) -> None: ...

    async def end_job(self, job: Job, retry_at: float) -> None:
        """Nobody works on it any more. If it was not done, it is not to be claimed again before then."""
        ...

    async def announce(self, models: Sequence[Sequence[str]], now: float) -> list[list[str]]:
        """This process serves them: each model with all of its names. Returns those that any process serves."""
        ...

    # ------------------------------------------------------------ lines

    async def lease(self, models: Collection[str], count: int, now: float) -> list[Line]:
        """Lines for this process, of all batches in turn."""
        ...

    async def renew(self, lines: Sequence[Kept], now: float) -> set[tuple[str, int]]:
        """Keep these leases and journals; whoever has a new journal has come on, and has no losses. A lease that has
        ended begins anew if nobody else has the line. Returns the lines whose lease was lost."""
        ...

    async def answer(self, line: Line, answer: Answered, *, failed: bool) -> bool:
        """Acknowledge a line with its answer. False: another process has the line by now, or has answered it, and the
        answer is dropped."""
        ...

    async def release(self, line: Line, not_before: float, *, counts: bool, journal: bytes | None) -> None:
        """Give a line back, to be tried again."""
        ...


class BatchWork(Protocol):
    """What the process that validates and assembles batches needs of a store. Synchronous: it does nothing else."""

    def batch(self, id: str) -> Batch | None: ...

    def forget_lines(self, batch: str) -> None:
        """Of a batch that is over, or of an attempt at validation that did not get to its end."""
        ...

    def add_lines(self, batch: str, lines: Sequence[NewLine]) -> list[LineError]:
        """Returns what is wrong with them: a custom_id that came before."""
        ...

    def validated(self, batch: str, total: int, model: str | None, errors: Sequence[LineError], now: float) -> None: ...

    def rows(self, batch: str) -> Iterator[Row]:
        """All lines in the order of the input file."""
        ...

    def assembled(self, batch: str, files: Sequence[StoredFile], now: float) -> None:
        """The files are there: the batch ends, and its lines are forgotten."""
        ...
