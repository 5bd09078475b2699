"""A real RabbitMQ for tests: a node of its own on free ports, in a folder of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.redis_server import free_port

BINARY = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")  # the one on the PATH is for services: it wants another user
START_SECONDS = 120


class RabbitServer:
    def __init__(self, folder: Path, max_message_size: int = 2**27) -> None:
        if not BINARY.exists():
            pytest.skip("rabbitmq-server is not installed; on Debian and Ubuntu: apt-get install rabbitmq-server")
        self.port = free_port()
        (folder / "plugins").write_text("[].")
        (folder / "rabbitmq.conf").write_text(f"max_message_size = {max_message_size}\n")
        self._environment = {
            **os.environ,
            "HOME": str(folder),
            "RABBITMQ_NODENAME": f"test-{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "ERL_EPMD_PORT": str(free_port()),
            "ERL_EPMD_RELAXED_COMMAND_CHECK": "1",  # it may be ended while it believes that the node is there
        }
        self._process = subprocess.Popen(
            [BINARY],
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # it starts processes of its own
        )
        deadline = time.monotonic() + START_SECONDS
        while not self._listens():
            assert self._process.poll() is None, "rabbitmq-server ended while starting"
            assert time.monotonic() < deadline, "rabbitmq-server does not listen"
            time.sleep(0.1)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def _listens(self) -> bool:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 1).close()
            return True
        return False

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        subprocess.run(["epmd", "-kill"], env=self._environment, stdout=subprocess.DEVNULL, check=False)
