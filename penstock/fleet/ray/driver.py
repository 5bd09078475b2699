"""Talks to the Ray cluster for a gateway: `python -m penstock.fleet.ray.driver CHANNEL_FD`.

A process of its own, because Ray ends a process that cannot reach the head of its cluster for a minute, and a gateway
goes on serving then. It holds nothing that is needed later: actors are detached and named, and another driver finds
them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock import __version__
from penstock.core.errors import StartupError
from penstock.fleet.channel import Channel
from penstock.fleet.ray import host
from penstock.fleet.ray.gateways import gateway_node
from penstock.fleet.ray.reasons import (
    AWAY,
    NEVER_RAN,
    full,
    no_gateway_node,
    not_started,
    other_penstock,
    other_versions,
    unreachable,
)

NAMESPACE = "penstock"
_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 20.0  # for a head that may be busy
_STOP_SECONDS = 15.0
_COUNTED_SECONDS = 1.0  # until the head knows what a node has free
_OBJECT_STORE = 80 * 2**20  # the least that Ray takes; nothing of ours is in it


class Driver:
    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}  # handles by name, of those launched by this process
        self._starting: set[str] = set()
        self.gateways: set[str] = set()  # names of those that run on other nodes

    async def connect(self, address: str | None) -> None:
        """Join the cluster at this address, or one that this machine belongs to, or start one here."""
        try:
            if address != "local":
                try:
                    return self._join(address or "auto")
                except ConnectionError:
                    if address is not None:
                        raise
            self._start_cluster()
        except (RuntimeError, OSError, ValueError, RayError) as error:
            mismatch = "Version mismatch" in str(error)
            raise StartupError(other_versions(str(error)) if mismatch else unreachable(address, str(error))) from error

    def _join(self, address: str) -> None:
        name, _, port = address.rpartition(":")
        if port.isdigit():  # Ray would try for minutes
            socket.create_connection((name.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        ray.init(address=address, namespace=NAMESPACE, logging_level=logging.WARNING)

    def _start_cluster(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        ray.init(
            address="local",
            namespace=NAMESPACE,
            logging_level=logging.WARNING,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE,
            _system_config={"worker_niceness": 0},  # workers are servers, not background jobs
        )

    async def gateway_node(self, resources: Mapping[str, Any], used: Mapping[str, int], per_node: int) -> str:
        """Where one more gateway goes: not to the node of the process that launches, which has its own."""
        needs, nodes = await self._needs(resources), await _ask(ray.nodes)
        here = ray.get_runtime_context().get_node_id()
        found = gateway_node(nodes, needs, {**used, here: per_node}, per_node)
        if found is None:
            raise StartupError(no_gateway_node(needs, sum(node["Alive"] for node in nodes)))
        return found

    async def launch(
        self, name: str, start: bytes, resources: Mapping[str, Any], wait_seconds: float, node_id: str | None = None
    ) -> dict[str, Any]:
        """Returns where the worker serves. With a node it is a gateway, and waits there for whoever launches it."""
        needs = await self._needs(resources)
        create = ray.remote(host.WorkerHost if node_id is None else host.GatewayHost).options(
            num_cpus=needs["CPU"],
            num_gpus=needs["GPU"],
            resources=resources["custom"],
            name=name,
            lifetime="detached",  # it outlives this process
            max_restarts=0,  # whoever keeps it launches another one
            scheduling_strategy="SPREAD" if node_id is None else NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        if node_id is not None:
            self.gateways.add(name)
        self._starting.add(name)
        node: dict[str, Any] | None = None
        try:
            actor = self._actors[name] = await _ask(create.remote)
            async with asyncio.timeout(wait_seconds):
                node = await actor.node.remote()
            if node["penstock"] != __version__:
                raise StartupError(other_penstock(node, __version__))
            started: dict[str, Any] = await actor.start.remote(start, node["address"])
            if "failed" in started:
                raise StartupError(not_started(node["address"], started["failed"], started.get("missing")))
            self._starting.discard(name)
            return {"host": node["address"], **started}
        except TimeoutError:
            await self.stop(name)  # before others are counted, as it may have got a place by now
            raise StartupError(await self._missing(needs, wait_seconds)) from None
        except RayError as error:
            await self.stop(name)
            lost = f"Ray lost the actor while it was starting: {_last_line(error)}"
            raise StartupError(lost, code=NEVER_RAN if node is None else None) from error
        except BaseException:
            await self.stop(name)
            raise

    async def _needs(self, resources: Mapping[str, Any]) -> dict[str, float]:
        gpus = resources["gpus"]
        if gpus is None:
            gpus = 1.0 if resources["cuda"] or (await _ask(ray.cluster_resources)).get("GPU", 0) >= 1 else 0.0
        return {"CPU": resources["cpus"], "GPU": gpus, **resources["custom"]}

    async def _missing(self, needs: Mapping[str, float], waited: float) -> str:
        await asyncio.sleep(_COUNTED_SECONDS)
        return full(needs, await _ask(ray.available_resources), await _ask(ray.nodes), waited)

    async def loss(self, name: str) -> tuple[str, bool]:
        """Waits until the worker is gone, and says why. Requests run in the worker alone: if the actor is gone as well,
        somebody has ended it, its node or the cluster."""
        try:
            actor = await self._find(name)
            found: tuple[str, bool] = await actor.loss.remote()
            return found
        except (RayError, ValueError) as error:
            return _last_line(error), True

    async def stop(self, name: str) -> None:
        """End an actor with what it hosts, if they are still there."""
        with suppress(RayError, ValueError, StartupError):
            actor = await self._find(name)
            if name not in self._starting:
                with suppress(RayError, TimeoutError):
                    async with asyncio.timeout(_STOP_SECONDS):
                        await actor.stop.remote()
            await _ask(partial(ray.kill, actor))
        self._actors.pop(name, None)
        self._starting.discard(name)
        self.gateways.discard(name)

    async def _find(self, name: str) -> Any:
        """Raises ValueError if there is none."""
        return self._actors.get(name) or await _ask(partial(ray.get_actor, name))

    async def stop_all(self) -> None:
        await asyncio.gather(*map(self.stop, list(self._actors)))


def _last_line(error: Exception) -> str:
    """What Ray says in the end, after ids and addresses."""
    return str(error).strip().splitlines()[-1][:300]


async def _ask(question: Any) -> Any:
    """The head's answer. While it is away Ray waits for it; this says so instead."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(question), _ANSWER_SECONDS)
    except TimeoutError:
        raise StartupError(AWAY) from None


async def serve(connection: socket.socket) -> None:
    """Answer the gateway until it has gone. Its workers go with it, unless gateways on other nodes finish what they
    have there: then workers end by themselves when those have ended."""
    cloudpickle.register_pickle_by_value(host)
    driver = Driver()
    channel = Channel(
        connection,
        {
            "connect": driver.connect,
            "gateway_node": driver.gateway_node,
            "launch": driver.launch,
            "loss": driver.loss,
            "stop": driver.stop,
            "stop_all": driver.stop_all,
        },
    )
    await channel.closed
    if not driver.gateways:
        await driver.stop_all()


def main() -> int:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    asyncio.run(serve(connection))
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
