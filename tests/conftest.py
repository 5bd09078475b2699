"""Fixtures over the real thing: the built-in model in this process, and a server in its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

# Triton reads this when it is first imported, by whatever test comes first: kernels run on the CPU, interpreted.
os.environ["TRITON_INTERPRET"] = "1"

READY = re.compile(r"http://[\w.:\[\]]+")


@dataclass
class Server:
    url: str
    process: subprocess.Popen[str]
    log: list[str]

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


def start_server(*arguments: str) -> Server:
    """`penstock serve` on a free port, ready to answer."""
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", "serve", "--port", "0", "--state", "memory", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    log: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None
    threading.Thread(target=log.extend, args=(process.stderr,), daemon=True).start()
    for line in process.stdout:
        if found := READY.search(line):
            threading.Thread(target=log.extend, args=(process.stdout,), daemon=True).start()
            return Server(found[0], process, log)
    process.wait()
    raise AssertionError(f"the server did not start (exit code {process.returncode}):\n" + "".join(log))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server of the built-in model for all tests that only talk to it."""
    running = start_server("--kv-memory-gib", "1")
    yield running
    running.process.terminate()
    assert running.process.wait(60) == 0, "".join(running.log)
