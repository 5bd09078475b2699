"""Progress on a terminal, silence in a log file: weights being loaded, tokens being generated."""

from __future__ import annotations

import time
from typing import TextIO

_WIDTH = 30


class LoadProgress:
    def __init__(self, stream: TextIO, label: str = "loading weights", *, bytes_done: bool = True) -> None:
        self._stream = stream
        self._label = label
        self._bytes_done = bytes_done
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // max(1, total)
        if not self._stream.isatty() or percent == self._shown:
            return
        self._shown = percent
        filled = _WIDTH * percent // 100
        bar = "█" * filled + "░" * (_WIDTH - filled)
        amount = f"  {done / 2**20:.0f} of {total / 2**20:.0f} MiB" if self._bytes_done else ""
        end = "\n" if done >= total else ""
        self._stream.write(f"\r{self._label} {bar} {percent:3d}%{amount}{end}")
        self._stream.flush()


class TokenProgress:
    """Requests done and tokens per second of a batch."""

    def __init__(self, stream: TextIO | None, requests: int) -> None:
        self._stream = stream if stream is not None and stream.isatty() else None
        self._requests = requests
        self._finished = 0
        self._tokens = 0
        self._began = self._shown = time.monotonic()

    def advance(self, tokens: int, *, finished: bool) -> None:
        self._tokens += tokens
        self._finished += finished
        now = time.monotonic()
        if self._stream is not None and now - self._shown > 0.1:
            self._shown = now
            self._show(self._stream)

    def _show(self, stream: TextIO) -> None:
        rate = self._tokens / max(1e-9, time.monotonic() - self._began)
        stream.write(f"\r{self._finished} of {self._requests} requests, {self._tokens} tokens, {rate:.0f} tok/s ")
        stream.flush()

    def close(self) -> None:
        if self._stream is not None:
            self._show(self._stream)
            self._stream.write("\n")
