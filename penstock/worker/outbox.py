"""Frames on their way to one gateway, sent by the thread that has them: the engine's does not wait for another one."""

from __future__ import annotations

import asyncio
import os
import socket
import threading


class Outbox:
    """The writing side of a connection whose reading side is a transport. `write` may be called from any thread."""

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        """On the event loop's thread, as all else but `write`."""
        descriptor = os.dup(transport.get_extra_info("socket").fileno())  # a transport lets nobody else use its own
        self._socket = socket.socket(fileno=descriptor)
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._unsent = bytearray()  # for which the kernel has no room yet
        self._transport = transport
        self._closing = False
        self._closed = False

    def write(self, data: bytes) -> None:
        """Never blocks. What cannot be sent now goes later, from the event loop."""
        with self._lock:
            if self._closed:
                return
            if self._unsent:
                self._unsent += data
                return
            if (sent := self._send(data)) == len(data):
                return
            self._unsent += memoryview(data)[sent:]
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._watch)

    def _send(self, data: bytes | bytearray) -> int:
        """How many bytes need not be sent again. Where the gateway has gone, its transport will find out."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)

    def _watch(self) -> None:
        if not self._closed:
            self._loop.add_writer(self._socket, self._send_rest)

    def _send_rest(self) -> None:
        with self._lock:
            del self._unsent[: self._send(self._unsent)]
            if self._unsent:
                return
        self._loop.remove_writer(self._socket)
        if self._closing:
            self._transport.close()

    def close(self) -> None:
        """End the connection once all is sent."""
        with self._lock:  # another thread may be in the middle of a frame
            self._closing = True
            sent = not self._unsent
        if sent:
            self._transport.close()

    def discard(self) -> None:
        """The connection has ended."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._unsent:
                self._loop.remove_writer(self._socket)
            self._socket.close()
