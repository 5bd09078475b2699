"""/admin/fleet: the replicas behind this gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Literal, Protocol

import msgspec

from penstock.core.errors import NotFound
from penstock.gateway.api.serving import Serving, encode_json
from penstock.gateway.errors import require
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.tenants import Tenant

MAX_SECONDS = 3600.0


class Control(Protocol):
    """What acts on the fleet. Views are structs for JSON."""

    def replicas(self) -> Awaitable[list[Any]]: ...

    def gateways(self) -> Awaitable[list[Any]]: ...

    def autoscaling(self) -> Awaitable[list[Any]]: ...

    def add(self, model: str, count: int) -> Awaitable[list[Any]]: ...

    def remove(self, name: str, drain_seconds: float) -> Awaitable[Any]: ...

    def replace(self, model: str, checkpoint: str, drain_seconds: float) -> Awaitable[list[Any]]: ...

    def restart(self, name: str, drain_seconds: float) -> Awaitable[list[Any]]: ...

    def fault(self, name: str, fault: str, seconds: float) -> Awaitable[Any]: ...


class NoFleet:
    """Of a gateway whose engines are not its own to start and stop."""

    async def replicas(self) -> list[Any]:
        return []

    async def gateways(self) -> list[Any]:
        return []

    async def autoscaling(self) -> list[Any]:
        return []

    async def add(self, model: str, count: int) -> list[Any]:
        raise _no_fleet()

    async def remove(self, name: str, drain_seconds: float) -> Any:
        raise _no_fleet()

    async def replace(self, model: str, checkpoint: str, drain_seconds: float) -> list[Any]:
        raise _no_fleet()

    async def restart(self, name: str, drain_seconds: float) -> list[Any]:
        raise _no_fleet()

    async def fault(self, name: str, fault: str, seconds: float) -> Any:
        raise _no_fleet()


def _no_fleet() -> NotFound:
    return NotFound("this gateway has no replicas of its own", code="no_fleet")


class NewReplicas(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    count: int = 1


class Drain(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    drain_seconds: float = 30.0


class NewVersion(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`checkpoint` as in the settings' `model`."""

    model: str
    checkpoint: str
    drain_seconds: float = 30.0


class InjectedFault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """kill: SIGKILL; freeze: SIGSTOP; slow: four fifths of the time stopped, for `seconds`; cut: its connection goes
    dead."""

    fault: Literal["kill", "freeze", "slow", "cut"]
    seconds: float = 5.0


class Replicas(msgspec.Struct):
    data: list[Any]
    object: Literal["list"] = "list"


class WholeFleet(Replicas):
    autoscale: list[Any] = []  # the models whose replicas follow their load
    gateways: list[Any] = []  # where there are several over these replicas


_new_replicas = msgspec.json.Decoder(NewReplicas)
_drain = msgspec.json.Decoder(Drain)
_new_version = msgspec.json.Decoder(NewVersion)
_fault = msgspec.json.Decoder(InjectedFault)


class FleetEndpoints:
    def __init__(self, serving: Serving, control: Control) -> None:
        self.serving = serving
        self.control = control

    async def replicas(self, request: Request, response: Response, tenant: Tenant) -> None:
        control = self.control
        views = await asyncio.gather(control.replicas(), control.autoscaling(), control.gateways())
        await response.send(200, encode_json(WholeFleet(views[0], autoscale=views[1], gateways=views[2])))

    async def add(self, request: Request, response: Response, tenant: Tenant) -> None:
        body = await self.serving.read(request, _new_replicas)
        require(1 <= body.count <= 64, "count", "must be between 1 and 64")
        await response.send(201, encode_json(Replicas(await self.control.add(body.model, body.count))))

    async def drain(self, request: Request, response: Response, tenant: Tenant) -> None:
        body = await self.serving.read(request, _drain)
        _check_seconds("drain_seconds", body.drain_seconds)
        view = await self.control.remove(request.path_params["replica"], body.drain_seconds)
        await response.send(202, encode_json(view))

    async def replace(self, request: Request, response: Response, tenant: Tenant) -> None:
        body = await self.serving.read(request, _new_version)
        _check_seconds("drain_seconds", body.drain_seconds)
        views = await self.control.replace(body.model, body.checkpoint, body.drain_seconds)
        await response.send(200, encode_json(Replicas(views)))

    async def restart(self, request: Request, response: Response, tenant: Tenant) -> None:
        body = await self.serving.read(request, _drain)
        _check_seconds("drain_seconds", body.drain_seconds)
        views = await self.control.restart(request.path_params["replica"], body.drain_seconds)
        await response.send(200, encode_json(Replicas(views)))

    async def fault(self, request: Request, response: Response, tenant: Tenant) -> None:
        body = await self.serving.read(request, _fault)
        _check_seconds("seconds", body.seconds)
        view = await self.control.fault(request.path_params["replica"], body.fault, body.seconds)
        await response.send(202, encode_json(view))


def _check_seconds(param: str, value: float) -> None:
    require(0 <= value <= MAX_SECONDS, param, f"must be between 0 and {MAX_SECONDS:.0f}")
