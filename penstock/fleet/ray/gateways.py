"""Gateways on other nodes of a Ray cluster, over the fleet of the process that launches. Nothing here imports Ray."""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from penstock.fleet.gateways import GatewayStart, LaunchedGateway, notice_silence
from penstock.fleet.launcher import connect_to_node
from penstock.fleet.ray.launcher import RayCluster
from penstock.fleet.ray.settings import RayConfig


def gateway_node(
    nodes: Sequence[Mapping[str, Any]], needs: Mapping[str, float], used: Mapping[str, int], per_node: int
) -> str | None:
    """The id of the node for one more gateway: one that has the fewest, and any of several. None: there is no room.

    `nodes` as `ray.nodes()` lists them; `used` are the gateways that nodes have already."""
    counts: dict[str, int] = {
        node["NodeID"]: used.get(node["NodeID"], 0)
        for node in nodes
        if node["Alive"] and all(node["Resources"].get(name, 0.0) >= amount for name, amount in needs.items())
    }
    least = min(counts.values(), default=per_node)
    if least >= per_node:
        return None
    return random.choice([node for node, count in counts.items() if count == least])


class RayGateways:
    """Launches gateways, and knows which nodes have one, so that each is on a node of its own."""

    place = "ray"

    def __init__(self, cluster: RayCluster, config: RayConfig, start: GatewayStart, per_node: int) -> None:
        """`per_node`: gateway processes that share the port of a node."""
        self._cluster = cluster
        self._start = start
        self._resources = asdict(config.gateway_resources) | {"gpus": 0.0, "cuda": False}
        self._per_node = per_node
        self._used: Counter[str] = Counter()
        self._choosing = asyncio.Lock()

    async def launch(self) -> LaunchedGateway:
        cluster, name = self._cluster, f"penstock-gateway-{secrets.token_hex(8)}"
        async with self._choosing:
            node = await cluster.call("gateway_node", self._resources, dict(self._used), self._per_node)
            self._used[node] += 1
        try:
            start = msgspec.msgpack.encode(self._start)
            found = await cluster.call("launch", name, start, self._resources, cluster.wait_seconds, node)
            connection = await connect_to_node(found["host"], found["port"], self._start.secret)
        except BaseException:
            cluster.end_soon(name)
            self.left(node)
            raise
        notice_silence(connection)
        return RayGateway(self, name, node, found["host"], connection)

    async def end(self, name: str, node: str) -> None:
        await self._cluster.end(name)
        self.left(node)

    def left(self, node: str) -> None:
        self._used[node] -= 1

    def kill(self, name: str) -> None:
        self._cluster.end_soon(name)


class RayGateway:
    """A gateway process in the keeping of a Ray actor."""

    def __init__(self, gateways: RayGateways, name: str, node: str, host: str, connection: socket.socket) -> None:
        self._gateways = gateways
        self._name = name
        self._node = node
        self.place = f"ray node {host}"
        self.host = host
        self.connection = connection

    async def end(self) -> int:
        await self._gateways.end(self._name, self._node)
        return 0

    def kill(self) -> None:
        self._gateways.kill(self._name)
