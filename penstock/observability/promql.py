"""PromQL over several gateways, each of which is scraped.

What a gateway counts of its own requests adds up: `added`. What it reports of replicas, their engines and GPUs is the
same reading at each gateway of a fleet, so one is taken: `once`, and `total` adds that up. The largest, as a gateway
may have come later than others, or have lost a replica that others reach.

Gateways of one `job` and `namespace` are those of a fleet: replicas elsewhere may have the same names.
"""

from __future__ import annotations

FLEET = "job, namespace"


def added(expr: str, by: str) -> str:
    return f"sum by ({by}) ({expr})"


def once(expr: str, by: str) -> str:
    """Of each fleet."""
    return f"max by ({FLEET}, {by}) ({expr})"


def total(expr: str, by: str = "model", of_each: str = "model") -> str:
    """`of_each`: labels of one reading."""
    return added(once(expr, of_each), by)
