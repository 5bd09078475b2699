"""Validates and assembles batches: `python -m penstock.batches.work`, a process beside the gateway.

A file may have a million lines. Here each is read, checked and queued on its own, so memory stays bounded, and the
gateway's event loop never waits. The assignment comes as JSON on standard input; what is wrong with a batch goes into
its record, and what keeps this process from working is printed as the last line on standard error.
"""

from __future__ import annotations

import io
import os
import random
import sqlite3
import sys
import time
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from penstock.batches.files import READ_BYTES, ContentReader, Contents, FolderContents, is_full, write_lines
from penstock.batches.records import Batch, LineError, StoredFile
from penstock.batches.store import BatchWork, NewLine, Row
from penstock.core.errors import PenstockError
from penstock.core.machine import lower_priority

MAX_ERRORS = 100  # named of one batch
MAX_CUSTOM_ID = 512  # characters
_SLICE = 1000  # lines queued in one transaction

EXIT_FULL = 3  # there is no room on disk


class Assignment(msgspec.Struct):
    kind: Literal["validate", "assemble"]
    folder: str  # of files and queue
    redis: str | None  # the URL of the Redis that has both instead
    owner: str  # the gateway process that has the lease
    batch: str
    models: list[str]  # that its tenant may use, here or at other gateways
    max_lines: int
    max_line_bytes: int
    keep_seconds: int  # of the files that are made


class InputLine(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class LineBody(msgspec.Struct):
    model: str
    stream: bool | None = False
    background: bool | None = False


_line_decoder = msgspec.json.Decoder(InputLine)
_body_decoder = msgspec.json.Decoder(LineBody)
_encode = msgspec.json.Encoder().encode


class Validation:
    """Reads an input file line by line and queues what can run."""

    def __init__(self, work: BatchWork, batch: Batch, given: Assignment) -> None:
        self._work = work
        self._batch = batch
        self._given = given
        self._models = frozenset(given.models)
        self.errors: list[LineError] = []
        self.total = 0
        self.model: str | None = None

    def run(self, file: BinaryIO) -> None:
        self._work.forget_lines(self._batch.id)
        waiting: list[NewLine] = []
        for line in self._lines(file):
            waiting.append(line)
            if len(waiting) == _SLICE:
                self.errors += self._work.add_lines(self._batch.id, waiting)
                waiting.clear()
        self.errors += self._work.add_lines(self._batch.id, waiting)
        if not self.total and not self.errors:
            self.errors.append(LineError("empty_file", "the input file has no lines"))
        self.errors.sort(key=lambda error: error.line or 0)
        del self.errors[MAX_ERRORS:]
        self._work.validated(self._batch.id, self.total, self.model, self.errors, time.time())

    def _lines(self, file: BinaryIO) -> Iterator[NewLine]:
        number, start, limit = 0, 0, self._given.max_line_bytes
        while (text := file.readline(limit + 1)) and len(self.errors) < MAX_ERRORS:
            number += 1
            if number == 1 and text.startswith(BOM_UTF8):  # as some editors begin a file
                start, text = len(BOM_UTF8), text.removeprefix(BOM_UTF8)
            if len(text) > limit:
                self._wrong("line_too_long", f"the line has more than {limit} bytes", number)
                return
            if text.strip():
                self.total += 1
                if self.total > self._given.max_lines:
                    self._wrong("too_many_lines", f"the file has more than {self._given.max_lines} lines", number)
                    return
                if (line := self._line(text, number, start)) is not None:
                    yield line
            start += len(text)

    def _line(self, text: bytes, number: int, start: int) -> NewLine | None:
        try:
            found = _line_decoder.decode(text)
            body = _body_decoder.decode(found.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            kind = "invalid_line" if isinstance(error, msgspec.ValidationError) else "invalid_json_line"
            self._wrong(kind, f"the line is no request: {error}", number)
            return None
        if not 0 < len(found.custom_id) <= MAX_CUSTOM_ID:
            self._wrong("invalid_custom_id", f"must have 1 to {MAX_CUSTOM_ID} characters", number, "custom_id")
        elif found.method != "POST":
            self._wrong("invalid_method", "must be POST", number, "method")
        elif found.url != self._batch.endpoint:
            self._wrong("mismatched_url", f"must be the batch's endpoint, {self._batch.endpoint}", number, "url")
        elif body.model not in self._models:
            served = ", ".join(sorted(self._models))
            self._wrong(
                "model_not_found", f"{body.model[:200]!r} is not served here; served: {served}", number, "model"
            )
        elif body.stream:
            self._wrong("unsupported_stream", "answers of batches are not streamed", number, "stream")
        elif body.background:
            why = "answers of batches are in the output file, not fetched later"
            self._wrong("unsupported_background", why, number, "background")
        else:
            self.model = body.model if self.model is None else self.model
            raw = bytes(found.body)
            return NewLine(
                number, found.custom_id, body.model, start + text.index(raw), len(raw), random.getrandbits(63)
            )
        return None

    def _wrong(self, code: str, message: str, line: int, param: str | None = None) -> None:
        self.errors.append(LineError(code, message, line, param))


class OutputLine(msgspec.Struct):
    id: str
    custom_id: str
    response: OutputResponse | None
    error: OutputError | None


class OutputResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class OutputError(msgspec.Struct):
    code: str
    message: str


def shaped(batch: Batch, row: Row) -> bytes:
    """A line of an output or error file."""
    id = f"batch_req_{batch.id.removeprefix('batch_')}_{row.number}"
    if row.answer is None:
        why = "was cancelled" if batch.ending == "cancelled" else "expired"
        error = OutputError(f"batch_{batch.ending}", f"the batch {why} before this line was answered")
        return _encode(OutputLine(id, row.custom_id, None, error)) + b"\n"
    response = OutputResponse(row.answer.status, row.answer.request_id, msgspec.Raw(row.answer.body))
    return _encode(OutputLine(id, row.custom_id, response, None)) + b"\n"


def assemble(work: BatchWork, contents: Contents, batch: Batch, given: Assignment) -> None:
    """The files are written whole under the ids of this batch before anybody hears of them. Done again after a crash
    it gives the same files, and whoever does it without the lease gives up before it has written one."""
    now, made = time.time(), []
    for kind, wanted in (("output", True), ("error", False)):
        chosen = (row for row in work.rows(batch.id) if (row.answer is not None and row.answer.status < 400) is wanted)
        id = f"file-{batch.id.removeprefix('batch_')[:31]}{kind[0]}"
        size = write_lines(contents, id, (shaped(batch, row) for row in chosen))
        if size:
            keep = batch.output_expires_after or given.keep_seconds
            name = f"{batch.id}_{kind}.jsonl"
            made.append(StoredFile(id, batch.tenant, name, size, int(now), "batch_output", int(now) + keep))
    work.assembled(batch.id, made, now)


def open_work(given: Assignment) -> tuple[BatchWork, Contents]:
    if given.redis is not None:
        from penstock.batches.redis_contents import RedisContents
        from penstock.batches.redis_work import RedisWork

        return RedisWork(given.redis, given.owner), RedisContents(given.redis)
    from penstock.batches.sqlite_work import SqliteWork

    folder = Path(given.folder)
    return SqliteWork(folder / "queue.db", given.owner), FolderContents(folder)


def run(given: Assignment) -> None:
    work, contents = open_work(given)
    batch = work.batch(given.batch)
    if batch is None:
        return
    if batch.over:  # whoever ended it was killed before it had tidied up
        work.forget_lines(batch.id)
    elif given.kind == "assemble":
        assemble(work, contents, batch, given)
    elif contents.size(batch.input_file_id) is None:
        gone = LineError("file_not_found", "the input file is gone", param="input_file_id")
        work.validated(batch.id, 0, None, [gone], time.time())
    else:
        with io.BufferedReader(ContentReader(contents, batch.input_file_id), READ_BYTES) as file:
            Validation(work, batch, given).run(file)


def main() -> int:
    lower_priority()
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=Assignment)
    try:
        run(given)
    except (OSError, sqlite3.Error, PenstockError) as error:
        print(f"{error}", file=sys.stderr)
        return EXIT_FULL if is_full(error) else 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
