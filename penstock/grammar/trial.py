"""Grammars of requests are compiled in a process of their own first, which may not take long nor much memory.

llguidance bounds what it builds, not what it does: fourteen patterns that must all match, in a schema of 355 bytes,
take it 5 s and 700 MB, and each further one doubles that. A thread that is in there cannot be stopped; a process can.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading

MAX_SECONDS = 2.0  # of CPU time
MAX_BYTES = 512 * 2**20
MOST_KEPT = 2  # processes, of 20 MiB each

_COMMAND = [sys.executable, "-m", "penstock.grammar.trial_process"]


class Trials:
    """From any thread. As many processes as grammars are tried at once, and some are kept for the next ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """So that the first grammar need not wait for it, a tenth of a second."""
        self._keep(self._take())

    def try_out(self, kind: str, source: str) -> str:
        """What llguidance takes for the grammar. Raises ValueError where it is none, or compiling it costs too much;
        what else llguidance does not like it says when it compiles it again."""
        process = self._take()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([kind, source]).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if answer:
            self._keep(process)
            found, problem = json.loads(answer)
        else:
            _end(process)
            if process.returncode >= 0:
                raise OSError(f"the process that tries grammars ended with exit code {process.returncode}")
            timed_out = process.returncode == -signal.SIGPROF
            limit = f"{MAX_SECONDS:.0f} s of CPU time" if timed_out else f"{MAX_BYTES // 2**20} MiB"
            found, problem = "", f"too complex: it takes more than {limit} to compile"
        if problem:
            raise ValueError(problem)
        return str(found)

    def _take(self) -> subprocess.Popen[bytes]:
        while True:
            with self._lock:
                process = self._kept.pop() if self._kept else None
            if process is None:
                nowhere = subprocess.DEVNULL  # where a library says why it aborts
                return subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=nowhere)
            if process.poll() is None:
                return process
            _end(process)  # somebody has killed it

    def _keep(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if len(self._kept) < MOST_KEPT:
                self._kept.append(process)
                return
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
