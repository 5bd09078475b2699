"""Who asks for a generation, for what and how soon: known once a request is authenticated, read and classified."""

from __future__ import annotations

import time
from typing import Any, Protocol

from msgspec import Struct

from penstock.core.errors import DeadlineExceeded
from penstock.core.request import Objective
from penstock.gateway.api.adapters import NamedAdapter
from penstock.gateway.api.models import Model
from penstock.gateway.tenancy.tenants import Tenant


class Options(Protocol):
    """What requests of all endpoints may say beside what they ask for."""

    @property
    def model(self) -> str: ...
    @property
    def service_tier(self) -> str | None: ...
    @property
    def deadline_ms(self) -> float | None: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def prompt_cache_key(self) -> Any: ...


class Context(Struct, frozen=True, kw_only=True):
    id: str  # ours; the client's own is `request_id`
    request_id: str
    arrived: float  # time.monotonic()
    endpoint: str
    tenant: Tenant
    asked: str  # what the client called the model
    model: Model  # that is to answer
    adapter: NamedAdapter | None = None  # the LoRA adapter that the model computes with
    why: str  # a phrase for people: why this one; empty if it is the one that was asked for
    session: str  # requests of one session should meet on one replica; empty: none
    objective: Objective
    deadline: float | None  # seconds after arrival
    output_asked: bool  # whether the client said how many tokens it wants

    @property
    def answered_by(self) -> str:
        """What clients call the model or adapter that is to answer."""
        return self.model.name if self.adapter is None else self.adapter.name

    def remaining(self) -> float | None:
        """Seconds from now to the deadline; raises when it has passed."""
        if self.deadline is None:
            return None
        left = self.arrived + self.deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"the deadline of {self.deadline * 1000:.0f} ms passed before the work began")
        return left
