"""The `consume` section of the settings: the queue that requests come from, and where their answers go."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

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
_PORTS = {"redis": 6379, "rediss": 6379, "unix": 0, "amqp": 5672, "amqps": 5671, "kafka": 9092}


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

    @property
    def scope(self) -> str:
        """Within which a custom_id names one request: broker, queue, group and tenant. Without the password."""
        group = "" if self.kind == "rabbitmq" else self.group  # whose consumers share a queue in any case
        return json.dumps([self.kind, *_place(self.kind, self.url), self.requests, group, self.tenant or ""])


def _place(kind: Kind, url: str) -> tuple[str, str]:
    """The address of a broker, and which of its databases or virtual hosts."""
    parts = urlsplit(url)
    hosts = parts.netloc.rpartition("@")[2].lower().split(",")
    address = ",".join(sorted(host if _has_port(host) else f"{host}:{_PORTS[parts.scheme]}" for host in hosts))
    if kind == "kafka":
        return address, ""
    path = unquote(parts.path)
    if kind == "rabbitmq":
        return address, path.removeprefix("/") or "/"
    database = parse_qs(parts.query).get("db", ["0" if parts.scheme == "unix" else path.strip("/") or "0"])[0]
    return (path if parts.scheme == "unix" else address), database


def _has_port(host: str) -> bool:
    return host.rpartition(":")[2].isdigit()
