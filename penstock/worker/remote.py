"""Workers and gateways on different machines: a TCP port, and a secret that both know.

Neither sends the secret. Each proves that it has it by a MAC over random bytes of both sides, so what is overheard
cannot be used again. Both say which version of the protocol they speak, and different ones end the connection. What
follows is not encrypted: the network between them must be trusted.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
from collections.abc import Callable, Coroutine

from penstock import __version__
from penstock.core.errors import StartupError
from penstock.worker.protocol import VERSION
from penstock.worker.server import GatewayConnection, WorkerServer

log = logging.getLogger(__name__)

SECRET = "PENSTOCK_WORKER_SECRET"  # the environment variable
_NONCE = 32
_MAC = 32
_VERSION_BYTES = 2
_HANDSHAKE_SECONDS = 5.0
_LOOK_SECONDS = 1.0
LEASE_SECONDS = 10.0  # how long a worker that was launched for a gateway waits for it to connect again


class HandshakeFailed(StartupError):
    """The two ends do not work together."""


class WrongSecret(HandshakeFailed):
    """The other end has another secret, or is no Penstock."""


class SaidNothing(WrongSecret):
    """The other end has closed the connection without a byte, as probes of an orchestrator do."""


async def prove_as_gateway(connection: socket.socket, secret: str) -> None:
    async with asyncio.timeout(_HANDSHAKE_SECONDS):
        loop = asyncio.get_running_loop()
        theirs, mine = await _receive(connection, _NONCE), os.urandom(_NONCE)
        await loop.sock_sendall(connection, mine + _mac(secret, b"gateway", theirs, mine) + _version())
        answer = await _receive(connection, _MAC + _VERSION_BYTES)
        if not hmac.compare_digest(answer[:_MAC], _mac(secret, b"worker", theirs, mine)):
            raise WrongSecret(f"the worker has another secret; give both the same in {SECRET}")
        _check_version("worker", answer[_MAC:])


async def prove_as_worker(connection: socket.socket, secret: str) -> None:
    async with asyncio.timeout(_HANDSHAKE_SECONDS):
        loop, mine = asyncio.get_running_loop(), os.urandom(_NONCE)
        await loop.sock_sendall(connection, mine)
        answer = await _receive(connection, _NONCE + _MAC + _VERSION_BYTES)
        theirs, proof = answer[:_NONCE], answer[_NONCE : _NONCE + _MAC]
        if not hmac.compare_digest(proof, _mac(secret, b"gateway", mine, theirs)):
            raise WrongSecret("a gateway came with another secret")
        await loop.sock_sendall(connection, _mac(secret, b"worker", mine, theirs) + _version())
        _check_version("gateway", answer[_NONCE + _MAC :])


def _version() -> bytes:
    return VERSION.to_bytes(_VERSION_BYTES)


def _check_version(role: str, theirs: bytes) -> None:
    if theirs != _version():
        raise HandshakeFailed(
            f"the {role} is of another release of Penstock: it speaks version {int.from_bytes(theirs)} of the worker "
            f"protocol, and this end ({__version__}) version {VERSION}; install the same release at both ends"
        )


def _mac(secret: str, role: bytes, of_worker: bytes, of_gateway: bytes) -> bytes:
    return hmac.digest(secret.encode(), role + of_worker + of_gateway, "sha256")


async def _receive(connection: socket.socket, size: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        more = await loop.sock_recv(connection, size - len(data))
        if not more:
            raise (WrongSecret if data else SaidNothing)(
                f"the connection ended during the handshake; is {SECRET} the same at both ends?"
            )
        data += more
    return data


class Port:
    """A worker's port, for gateways that have its secret. With `lease_seconds` the worker ends when no gateway has been
    connected for so long."""

    def __init__(self, listener: socket.socket, secret: str, lease_seconds: float | None = None) -> None:
        self._listener = listener
        self._secret = secret
        self._lease_seconds = lease_seconds
        self._tasks: set[asyncio.Task[None]] = set()

    async def attach(self, server: WorkerServer, stop: Callable[[], None]) -> None:
        self._listener.listen()
        self._listener.setblocking(False)
        self._start(self._accept(server))
        if self._lease_seconds is not None:
            self._start(self._end_when_left(server, stop, self._lease_seconds))

    async def _end_when_left(self, server: WorkerServer, stop: Callable[[], None], seconds: float) -> None:
        """Time is counted in rounds of this loop: a process that was suspended must not take the gap for absence."""
        alone = 0.0
        while alone < seconds:
            await asyncio.sleep(_LOOK_SECONDS)
            alone = alone + _LOOK_SECONDS if server.is_left_alone else 0.0
        log.warning("no gateway for %.0f s; this worker ends", alone)
        stop()

    async def _accept(self, server: WorkerServer) -> None:
        """Whatever keeps one connection from being accepted, such as too many open files, may be over for the next."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("no gateway can connect for now: %s", error)
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            self._start(self._connect(server, connection, address))

    async def _connect(self, server: WorkerServer, connection: socket.socket, address: object) -> None:
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await prove_as_worker(connection, self._secret)
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: GatewayConnection(server, remote=True), sock=connection)
            log.info("a gateway connected from %s", address)
        except (OSError, TimeoutError, HandshakeFailed) as error:
            level = logging.DEBUG if isinstance(error, SaidNothing | ConnectionError) else logging.WARNING
            log.log(level, "a connection from %s was refused: %s", address, error or "it timed out")
            connection.close()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
