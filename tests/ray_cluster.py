"""A real Ray cluster for tests: several nodes on this machine, in a process of its own, told what to do line by line.

Ray ends a process that has lost the head of its cluster, which some tests take away; so pytest is not that process.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any

_ENDED_SECONDS = 60


class RayCluster:
    """Its head has so many CPUs. With a Redis (HOST:PORT), the head can be restarted."""

    def __init__(self, cpus: int, redis: str | None = None) -> None:
        # Short, as it holds sockets, whose paths have a limit of about 100 characters.
        self._folder = tempfile.mkdtemp(prefix="ray")
        self.environment = {
            **os.environ,
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_TMPDIR": self._folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_period_ms": "500",  # five in a row that fail mean that a node has gone
            **({"RAY_REDIS_ADDRESS": redis} if redis else {}),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
        )
        self.address = self._answer()

    def add_node(self, cpus: int) -> int:
        """Returns the process of the new node's raylet, of which its workers are grandchildren."""
        return int(self._do(f"add {cpus}"))

    def remove_node(self) -> None:
        """The one that was added last, without a warning."""
        self._do("remove")

    def kill_head(self) -> None:
        """The control plane (GCS) alone: nodes go on without it."""
        self._do("kill_head")

    def start_head(self) -> None:
        self._do("start_head")

    def _do(self, command: str) -> str:
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("> "):
                return line[2:].strip()
        raise AssertionError(f"the Ray cluster ended with exit code {self._process.wait()}")

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_ENDED_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)


def main() -> None:
    from ray._private.ray_constants import PROCESS_TYPE_RAYLET
    from ray.cluster_utils import Cluster

    head = {"num_cpus": int(sys.argv[1]), "include_dashboard": False}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    added: list[Any] = []
    print(">", cluster.address, flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        answer = "done"
        if command == "add":
            added.append(cluster.add_node(num_cpus=int(arguments[0]), include_dashboard=False))
            answer = str(added[-1].all_processes[PROCESS_TYPE_RAYLET][0].process.pid)
        elif command == "remove":
            cluster.remove_node(added.pop(), allow_graceful=False)
        elif command == "kill_head":
            cluster.head_node.kill_gcs_server()
        elif command == "start_head":
            cluster.head_node.start_gcs_server()
        print(">", answer, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
