"""Shows the progress of a benchmark in one line, on a terminal only."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from penstock.bench.measure import Timeline

REFRESH_SECONDS = 0.2
_CLEAR_LINE = "\r\x1b[K"


class Progress:
    """Counts what is done with; a thread of its own shows it, so that nothing measured waits for a terminal."""

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._done = self._errors = self._refused = 0
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def done(self, timeline: Timeline) -> None:
        self._done += 1
        self._errors += timeline.error is not None
        self._refused += timeline.refused

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _show(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            sys.stderr.write(_CLEAR_LINE + self.line())
            sys.stderr.flush()
        sys.stderr.write(_CLEAR_LINE)
        sys.stderr.flush()

    def line(self) -> str:
        elapsed = time.monotonic() - self._began
        parts = [f"{self._done} of {self._total} requests", f"{self._done / elapsed:.1f}/s"]
        if self._refused:
            parts.append(f"{self._refused} refused")
        if self._errors:
            parts.append(f"{self._errors} errors")
        return f"{self._label}: {', '.join(parts)}, {elapsed:.0f} s"
