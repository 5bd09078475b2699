"""Why a replica or a gateway cannot start on a Ray cluster, and what to do about it, in words. Those that run are not
touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

INSTALL = "pip install 'penstock[ray]'"
AWAY = (
    "the head of the Ray cluster is away, or has been started anew without its nodes; start it (ray start --head), and "
    "Ray on each node where it has ended (ray start --address=HEAD:6379). Replicas that run go on"
)
NEVER_RAN = "ray_actor_never_ran"  # code of the error of a launch that Ray has cancelled before it began


def full(
    needs: Mapping[str, float], free: Mapping[str, float], nodes: Sequence[Mapping[str, Any]], waited: float
) -> str:
    """`nodes` as `ray.nodes()` lists them."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    largest = {name: max((node.get(name, 0.0) for node in alive), default=0.0) for name in needs}
    wanted = {name: amount for name, amount in needs.items() if amount > 0}
    never = [name for name, amount in wanted.items() if largest[name] < amount]
    missing = never or [name for name, amount in wanted.items() if free.get(name, 0.0) < amount]
    state = f"it needs {_amounts(wanted, wanted)} on one node; free on {len(alive)} in all: {_amounts(free, wanted)}"
    if never:
        return (
            f"no node of the Ray cluster is large enough: {state}, and the largest has "
            f"{_amounts(largest, never)}; add such a node, or ask for less with `resources`"
        )
    if missing:
        return (
            f"the Ray cluster has no room for a replica after {waited:.0f} s: {state}; missing: {', '.join(missing)}. "
            "Add a node (ray start --address=HEAD), stop what else runs there (ray status), or ask for less with "
            "`resources`"
        )
    return (
        f"a replica was not placed within {waited:.0f} s: {state}. If no single node has all of it, add one or ask for "
        "less with `resources`; otherwise look at `ray status` and at the logs in /tmp/ray/session_latest/logs"
    )


def no_gateway_node(needs: Mapping[str, float], alive: int) -> str:
    wanted = {name: amount for name, amount in needs.items() if amount > 0}
    return (
        f"no node of the Ray cluster is left for a gateway: each is on a node of its own, with "
        f"{_amounts(wanted, wanted) or 'nothing reserved'}, and there are {alive}; add a node, or ask for less with "
        "ray.gateways or ray.gateway_resources"
    )


def _amounts(amounts: Mapping[str, float], names: Sequence[str] | Mapping[str, float]) -> str:
    return ", ".join(f"{amounts.get(name, 0.0):g} {name}" for name in names)


def unreachable(address: str | None, said: str) -> str:
    where = f"at {address}" if address else "that this machine belongs to"
    return (
        f"no Ray cluster {where} can be reached: {' '.join(said.split())[:400]}. This machine must belong to it: "
        "ray start --head on the first one, ray start --address=HEAD:6379 on the others; or leave the address out, and "
        "a cluster is started here"
    )


def other_versions(said: str) -> str:
    return f"{' '.join(said.split())}. Install the same versions of Ray and Python on all nodes"


def other_penstock(node: Mapping[str, Any], version: str) -> str:
    """`node` as `WorkerHost.node` describes it."""
    where, there = node["address"], node["penstock"]
    if there is None:
        return f"Ray node {where} has no Penstock: run {node['executable']} -m {INSTALL} there, version {version}"
    return f"Ray node {where} has Penstock {there} and this server {version}; install the same on both"


def not_started(node: str, failed: str, missing: str | None) -> str:
    """The worker's own words. `missing`: the file that is not there."""
    if missing is None:
        return f"Ray node {node}: {failed}"
    return (
        f"Ray node {node} has no {missing}: put the weights there under the same path, on a file system that all nodes "
        "mount, or name a model that nodes can download"
    )
