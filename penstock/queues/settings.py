"""The `consume` section of the settings: the queue that requests come from, and where their answers go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from penstock.core.settings import check

Kind = Literal["redis", "rabbitmq", "kafka"]

_KINDS: dict[str, Kind] = {
    "redis": "redis",
    "rediss": "redis",
    "unix": "redis",
    "amqp": "rabbitmq",
    "amqps": "rabbitmq",
    "kafka": "kafka",
}


@dataclass(frozen=True, slots=True)
class ConsumeConfig:
    """A stream, queue or topic of requests, each answered into another."""

    url: str  # redis://HOST:PORT/DB, amqp://USER:PASSWORD@HOST/VHOST or kafka://HOST:PORT,HOST:PORT
    requests: str = "penstock-requests"
    results: str = "penstock-results"
    dead_letters: str = "penstock-dead-letters"
    group: str = "penstock"  # consumers of one group share the requests; RabbitMQ's always do
    tenant: str | None = None  # whose requests these are; default: that of requests without a key
    answers: Literal["whole", "chunks"] = "whole"
    concurrent: int = 256  # at most; fewer if the forecast says so
    lease_seconds: float = 30.0  # on Redis: after which requests of a consumer that is silent go to others
    remember_hours: float = 24.0  # ids, and answers for requests that are delivered again

    def __post_init__(self) -> None:
        known = urlsplit(self.url).scheme in _KINDS
        check(known, "url", "must begin with redis://, rediss://, unix://, amqp://, amqps:// or kafka://")
        names = (self.requests, self.results, self.dead_letters)
        check(all(names) and len(set(names)) == 3, "results", "must differ from requests and dead_letters")
        check(bool(self.group), "group", "must not be empty")
        check(1 <= self.concurrent <= 4096, "concurrent", "must be between 1 and 4096")
        check(1 <= self.lease_seconds <= 3600, "lease_seconds", "must be between 1 and 3600")
        check(0 < self.remember_hours <= 8760, "remember_hours", "must be above 0 and at most 8760")

    @property
    def kind(self) -> Kind:
        return _KINDS[urlsplit(self.url).scheme]
