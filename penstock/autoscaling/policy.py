"""What a policy is: a pure function that says how many replicas are needed. One of your own is named by import path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from penstock.autoscaling.arrivals import Arrivals
from penstock.autoscaling.load import Load
from penstock.autoscaling.settings import AutoscaleConfig
from penstock.core.errors import StartupError


@dataclass(frozen=True, slots=True)
class Need:
    """Replicas that the load needs, as a fraction: rounding, limits and cool-downs are the scaler's."""

    replicas: float
    reason: str  # a phrase for people
    keep: float = 0.0  # replicas that are not started for this, and not stopped either: they will be needed soon
    usual: float = 0.0  # work that usually arrives at the time of the larger of the two; 0: not known


Policy = Callable[[Load, Arrivals, AutoscaleConfig], Need]


def imported_policy(path: str) -> Policy:
    """`package.module:name`, the name of a function with the arguments and the result of a `Policy`."""
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise StartupError(f"policy {path} cannot be imported: {error}", param="policy") from error
    if not callable(found):
        raise StartupError(f"policy {path} must be a function, not {type(found).__name__}", param="policy")
    policy: Policy = found
    return policy
