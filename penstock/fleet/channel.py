"""Calls in both directions between two processes, over a socket pair or a TCP connection.

A handler answers with anything that MessagePack has. Over a socket pair it can also be a socket, whose descriptor goes
along.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from penstock.core.errors import EngineFailure, Failure, PenstockError, Unavailable

log = logging.getLogger(__name__)

Handler = Callable[..., Awaitable[Any]]

_LENGTH = struct.Struct("<I")
_READ = 1 << 18


class _Call(msgspec.Struct, tag="call", array_like=True):
    id: int  # 0: no answer is wanted
    method: str
    arguments: list[Any]


class _Answer(msgspec.Struct, tag="answer", array_like=True):
    id: int
    value: Any


class _Passed(msgspec.Struct, tag="passed", array_like=True):
    """The answer is the descriptor that comes with it."""

    id: int


class _Failed(msgspec.Struct, tag="failed", array_like=True):
    id: int
    failure: Failure


_Message = _Call | _Answer | _Passed | _Failed
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Message).decode


class Channel:
    """One end. `closed` is done when the other end has gone; calls that wait then fail with Unavailable."""

    def __init__(self, connection: socket.socket, handlers: Mapping[str, Handler]) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._handlers = handlers
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._received = bytearray()
        self._descriptors: deque[int] = deque()  # that have come, for the messages that name them
        self._unsent: deque[tuple[bytes, list[socket.socket]]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(connection, self._read)

    async def call(self, method: str, *arguments: Any) -> Any:
        if self.closed.done():
            raise Unavailable("the other process has gone")
        id, answer = next(self._ids), self._loop.create_future()
        self._calls[id] = answer
        self._send(_Call(id, method, list(arguments)))
        try:
            return await answer
        finally:
            del self._calls[id]

    def tell(self, method: str, *arguments: Any) -> None:
        """A call without an answer."""
        self._send(_Call(0, method, list(arguments)))

    def close(self) -> None:
        if self.closed.done():
            return
        self.closed.set_result(None)
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(Unavailable("the other process has gone"))
        for task in self._tasks:
            task.cancel()

    def _send(self, message: _Message, *passed: socket.socket) -> None:
        if self.closed.done():
            return
        body = _encode(message)
        self._unsent.append((_LENGTH.pack(len(body)) + body, list(passed)))
        if len(self._unsent) == 1:
            self._write()

    def _write(self) -> None:
        while self._unsent:
            data, passed = self._unsent[0]
            try:
                if passed:
                    sent = socket.send_fds(self._socket, [data], [each.fileno() for each in passed])
                else:
                    sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.close()
                return
            if sent:
                for each in passed:
                    each.close()
                passed = []
            if sent < len(data):
                self._unsent[0] = (data[sent:], passed)
                self._loop.add_writer(self._socket, self._write)
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data, descriptors, *_ = socket.recv_fds(self._socket, _READ, 16)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self.close()
            return
        self._descriptors += descriptors
        self._received += data
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            end = _LENGTH.size + length
            if len(self._received) < end:
                return
            message = _decode(self._received[_LENGTH.size : end])
            del self._received[:end]
            self._take(message)

    def _take(self, message: _Message) -> None:
        if isinstance(message, _Call):
            task = self._loop.create_task(self._answer(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        passed = None
        if isinstance(message, _Passed):
            passed = socket.socket(fileno=self._descriptors.popleft())
            passed.set_inheritable(False)
        answer = self._calls.get(message.id)
        if answer is None or answer.done():  # whoever asked has been cancelled
            if passed is not None:
                passed.close()
        elif isinstance(message, _Failed):
            answer.set_exception(message.failure.exception())
        else:
            answer.set_result(message.value if isinstance(message, _Answer) else passed)

    async def _answer(self, call: _Call) -> None:
        try:
            value = await self._handlers[call.method](*call.arguments)
        except PenstockError as error:
            if call.id:
                self._send(_Failed(call.id, Failure.of(error)))
            return
        except Exception as error:
            log.exception("%s failed", call.method)
            if call.id:
                self._send(_Failed(call.id, Failure.of(EngineFailure(f"{call.method} failed: {error!r}"))))
            return
        if call.id:
            if isinstance(value, socket.socket):
                self._send(_Passed(call.id), value)
            else:
                self._send(_Answer(call.id, value))
