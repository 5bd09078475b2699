"""Messages that say what a Ray cluster lacks."""

from __future__ import annotations

import pytest

from penstock.fleet.ray.reasons import full, not_started, other_penstock, unreachable

NODES = [
    {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}},
    {"Alive": True, "Resources": {"CPU": 4.0}},
    {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
]


@pytest.mark.parametrize(
    ("needs", "free", "said"),
    [
        (
            {"CPU": 1.0, "GPU": 1.0},
            {"CPU": 7.0},
            "needs 1 CPU, 1 GPU on one node; free on 2 in all: 7 CPU, 0 GPU",
        ),
        ({"CPU": 1.0, "GPU": 1.0}, {"CPU": 0.5}, "missing: CPU, GPU. Add a node"),
        (
            {"CPU": 16.0, "GPU": 0.0},
            {"CPU": 12.0},
            "no node of the Ray cluster is large enough: it needs 16",
        ),
        ({"CPU": 16.0, "GPU": 0.0}, {"CPU": 12.0}, "the largest has 8 CPU; add such a node"),
        ({"CPU": 1.0, "big_disk": 1.0}, {"CPU": 7.0}, "the largest has 0 big_disk"),
        ({"CPU": 6.0}, {"CPU": 7.0}, "If no single node has all of it"),
    ],
)
def test_what_is_missing_is_named(needs: dict[str, float], free: dict[str, float], said: str) -> None:
    assert said in full(needs, free, NODES, 60.0)


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"penstock": None}, "10.0.0.5 has no Penstock: run /usr/bin/python3 -m pip install 'penstock[ray]' there"),
        ({"penstock": "0.0.9"}, "10.0.0.5 has Penstock 0.0.9 and this server 0.1.0; install the same"),
    ],
)
def test_a_node_with_other_software_is_named(there: dict[str, str | None], said: str) -> None:
    node = {"address": "10.0.0.5", "executable": "/usr/bin/python3"}
    assert said in other_penstock({**node, **there}, "0.1.0")


def test_the_workers_own_words_come_with_its_node() -> None:
    assert not_started("10.0.0.5", "out of memory", None) == "Ray node 10.0.0.5: out of memory"
    assert "has no /models/a: put the weights there" in not_started("10.0.0.5", "", "/models/a")


def test_a_cluster_that_is_not_there() -> None:
    said = unreachable("10.0.0.1:6379", "Failed to connect\n to GCS")
    assert "no Ray cluster at 10.0.0.1:6379 can be reached: Failed to connect to GCS. This machine must belong" in said
