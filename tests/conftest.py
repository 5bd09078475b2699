"""Fixtures over the real thing: the built-in model in this process, and a server in its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO

import pytest
from hypothesis import HealthCheck, settings

from penstock.core.onednn import cap_onednn

# Before torch computes, and before the cache folder is another one. Workers of xdist inherit the variable.
CAPPED = None if "PYTEST_XDIST_WORKER" in os.environ else cap_onednn()

# Workers that share the cores: torch's threads would wait for each other's by spinning. torch reads this when imported.
if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    os.environ["OMP_NUM_THREADS"] = "1"

# Triton reads this when it is first imported, by whatever test comes first: kernels run on the CPU, interpreted.
os.environ["TRITON_INTERPRET"] = "1"

# Servers keep weights they have packed and what they learnt of the machine's speed: here for these tests only, which
# must not depend on who ran what before.
_cache = tempfile.TemporaryDirectory(prefix="penstock-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name

# Under nohup, SIGHUP is ignored by whatever is started from here, too: servers would go on ignoring it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long an example takes says something about the machine, and examples are the same in every run.
settings.register_profile("anywhere", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("anywhere")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if CAPPED:
        terminalreporter.write_line(CAPPED)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    for server in RUNNING:
        server.said_before = len(server.log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows what servers have said during it."""
    report = yield
    if report.failed:
        for server in RUNNING:
            if said := [line for line in server.log[server.said_before :] if POLL not in line]:
                report.sections.append((f"log of {server.url}", "".join(said[-LAST_LINES:])))
    return report


LAST_LINES = 60
POLL = "INFO request method=GET path=/admin/fleet status=200"  # by tests that wait for replicas
READY = re.compile(r'(?:^Penstock serves .* at |"message":"serving".*"url":")(http://[\w.:\[\]]+)')


@dataclass(eq=False)
class Server:
    url: str
    process: subprocess.Popen[str]
    log: list[str]  # whole once it has been stopped
    readers: list[threading.Thread]
    said_before: int = 0  # lines of the log, before the test that runs

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def stop(self) -> None:
        RUNNING.discard(self)
        self.process.terminate()
        code = self.process.wait(60)
        for reader in self.readers:
            reader.join()
        assert code == 0, "".join(self.log)


RUNNING: set[Server] = set()


def start_server(*arguments: str, python: str = sys.executable, environ: Mapping[str, str] = os.environ) -> Server:
    """`penstock serve` on a free port, ready to answer."""
    process = subprocess.Popen(
        [python, "-m", "penstock.cli.main", "serve", "--port", "0", "--state", "memory", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environ, "PYTHONUNBUFFERED": "1"},
    )
    log: list[str] = []
    ready: SimpleQueue[str | None] = SimpleQueue()  # the address; None: the process has ended

    def read(stream: IO[str]) -> None:
        for line in stream:
            log.append(line)
            if found := READY.search(line):
                ready.put(found[1])
        ready.put(None)

    assert process.stdout is not None
    assert process.stderr is not None
    readers = [
        threading.Thread(target=read, args=(stream,), daemon=True) for stream in (process.stdout, process.stderr)
    ]
    for reader in readers:
        reader.start()
    if (url := ready.get()) is not None:
        server = Server(url, process, log, readers)
        RUNNING.add(server)
        return server
    process.wait()
    for reader in readers:
        reader.join()
    raise AssertionError(f"the server did not start (exit code {process.returncode}):\n" + "".join(log))


def start_with_admin(folder: Path, settings: str) -> tuple[Server, str]:
    """A server with these settings, and a key of its administrator."""
    config, state = folder / "settings.yaml", f"sqlite:///{folder}/state.db"
    config.write_text(settings)
    command = [sys.executable, "-m", "penstock.cli.main", "keys", "create", "--admin", "--state", state]
    key = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return start_server("--config", str(config), "--state", state), key


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server of the built-in model for all tests that only talk to it."""
    running = start_server("--kv-memory-gib", "1")
    yield running
    running.stop()
