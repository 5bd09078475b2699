"""Where gateways go on a Ray cluster. The cluster itself is in tests/e2e/test_ray_gateways.py."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import StartupError
from penstock.fleet.gateways import GatewayStart
from penstock.fleet.ray.gateways import RayGateways, gateway_node
from penstock.fleet.ray.reasons import no_gateway_node
from penstock.fleet.ray.settings import RayConfig
from penstock.settings import settings_from_mapping

START = GatewayStart(
    settings={}, folder="/", port=0, shares_port=False, own_store=True, adapters=[], secret="s", elsewhere=True
)


def node(name: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": {"CPU": 4.0, **resources}}


NODES = [node("a"), node("b"), node("c", edge=1.0), node("gone", alive=False)]


@pytest.mark.parametrize(
    ("needs", "used", "per_node", "found"),
    [
        ({"CPU": 1.0}, {"a": 1}, 1, {"b", "c"}),  # each on a node of its own
        ({"CPU": 1.0}, {"a": 2, "b": 1}, 2, {"c"}),  # the fewest first
        ({"CPU": 1.0}, {"a": 2, "b": 1, "c": 1}, 2, {"b", "c"}),  # as many processes as share a port
        ({"CPU": 1.0, "edge": 1.0}, {}, 1, {"c"}),  # where what it needs is at all
        ({"CPU": 1.0}, {"a": 1, "b": 1, "c": 1}, 1, {None}),
        ({"CPU": 8.0}, {}, 1, {None}),
    ],
)
def test_a_gateway_goes_where_there_are_fewest(
    needs: dict[str, float], used: dict[str, int], per_node: int, found: set[str | None]
) -> None:
    """Any of the nodes that are as good, so that one that fails is not tried for ever."""
    assert {gateway_node(NODES, needs, used, per_node) for _ in range(200)} == found


class Cluster:
    """Answers as the driver does, and fails every launch."""

    wait_seconds = 1.0

    def __init__(self) -> None:
        self.used: list[dict[str, int]] = []
        self.ended: list[str] = []

    async def call(self, method: str, *arguments: Any) -> Any:
        if method == "gateway_node":
            self.used.append(arguments[1])
            return gateway_node(NODES, {"CPU": arguments[0]["cpus"]}, arguments[1], arguments[2])
        raise StartupError("no room")

    def end_soon(self, actor: str) -> None:
        self.ended.append(actor)


async def test_a_failed_launch_leaves_its_node_to_others() -> None:
    cluster = Cluster()
    gateways = RayGateways(cluster, RayConfig(), START, 1)  # type: ignore[arg-type]
    for _ in range(4):
        with pytest.raises(StartupError, match="no room"):
            await gateways.launch()
    assert not any(any(used.values()) for used in cluster.used)
    assert len(set(cluster.ended)) == 4


def test_a_cluster_without_a_node_for_it_says_so() -> None:
    said = no_gateway_node({"CPU": 1.0, "GPU": 0.0, "edge": 1.0}, 3)
    assert "each is on a node of its own, with 1 CPU, 1 edge, and there are 3; add a node" in said
    assert "ray.gateways or ray.gateway_resources" in said


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"gateways": 0}, "ray.gateways must be between 1 and 64"),
        ({"gateway_resources": {"gpus": 1}}, "gateways use no GPU"),
    ],
)
def test_settings_that_cannot_be(section: dict[str, object], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        settings_from_mapping({"ray": section})
