"""The gateway's address, taken before anything is loaded. Imports next to nothing, for it comes first in a start."""

from __future__ import annotations

import socket

from penstock.core.errors import StartupError


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Take the address. It does not listen yet: until somebody can answer, clients are refused instead of kept waiting.

    Port 0 takes a free one. A `shared` address is for several processes, between which the system deals out
    connections.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from error
    return listener


def cannot_listen(host: str, port: int, error: OSError) -> StartupError:
    return StartupError(f"cannot listen on {host}:{port}: {error.strerror or error}", param="port")
