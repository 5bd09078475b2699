"""A real Redis for tests: a process of its own on a free port, nothing kept on disk unless a folder is given."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

START_SECONDS = 60


class RedisServer:
    """Can be stopped and started again on its port; what it held is gone then, unless it has a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.port = free_port()
        self._keeping = ["--appendonly", "no"]
        if folder is not None:
            self._keeping = ["--appendonly", "yes", "--appendfsync", "always", "--dir", str(folder)]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.fail("redis-server is not installed; on Debian and Ubuntu: apt-get install redis-server")
        self._process = subprocess.Popen(
            [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *self._keeping],
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self._process.poll() is None, "redis-server ended while starting"
                time.sleep(0.01)
        raise AssertionError("redis-server does not listen")

    def pause(self) -> None:
        """It hangs: connections stay, and nothing is answered until `resume`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def free_port() -> int:
    """Below those that systems give to whoever asks for any: while the server is down, no client's end of a connection
    can take it, not even that of a client which tries to reach the server."""
    while True:
        port = random.randrange(20_000, 30_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
