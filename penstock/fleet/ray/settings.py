"""The settings of replicas and gateways on a Ray cluster (`penstock serve --on ray`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.core.settings import check


@dataclass(frozen=True, slots=True)
class ResourcesConfig:
    """What Ray reserves for each replica of a model, or for each gateway."""

    cpus: float = 1.0
    gpus: float | None = None  # at most one; a fraction shares a GPU; default: one where the cluster has GPUs
    custom: Mapping[str, float] = field(  # names that nodes were given by `ray start --resources`
        default_factory=dict, metadata={"expected": "a mapping of names to amounts"}
    )

    def __post_init__(self) -> None:
        check(0 <= self.cpus <= 4096, "cpus", "must be between 0 and 4096")
        # The engine computes on one device. Several would be the bundles of a placement group.
        check(self.gpus is None or 0 <= self.gpus <= 1, "gpus", "must be between 0 and 1: a replica uses one GPU")
        for name, amount in self.custom.items():
            check(0 < amount < 1e9, f"custom.{name}", "must be above 0")


@dataclass(frozen=True, slots=True)
class RayConfig:
    # HOST:PORT of the cluster's head; default: RAY_ADDRESS, then a cluster that this machine belongs to, then a new one
    # on this machine, which ends with the server
    address: str | None = field(default=None, metadata={"expected": "HOST:PORT of the cluster's head"})
    wait_seconds: float = 60.0  # how long a replica waits for room in the cluster before it says what is missing
    gateways: int = 1  # over the same replicas: the one that `penstock serve` is, and others on other nodes
    gateway_resources: ResourcesConfig = field(default_factory=ResourcesConfig)  # of each gateway on another node

    def __post_init__(self) -> None:
        check(self.address is None or bool(self.address), "address", "must be HOST:PORT of the cluster's head")
        client = self.address is not None and "://" in self.address
        check(not client, "address", "must be HOST:PORT; a Ray client address (ray://) reaches no replicas")
        check(1 <= self.wait_seconds <= 86400, "wait_seconds", "must be between 1 and 86400")
        check(1 <= self.gateways <= 64, "gateways", "must be between 1 and 64")
        check(not self.gateway_resources.gpus, "gateway_resources.gpus", "must be left out: gateways use no GPU")
