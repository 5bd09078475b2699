"""Web pages and the server: whose requests are let in where no key is needed, and which pages may read answers (CORS).

A page that somebody has open can send requests to addresses that only its reader reaches. Without keys, all that tells
them from the reader's own is what the browser adds: the name under which the page found the server (`Host`; a name that
its owner points to this machine is DNS rebinding) and where the page comes from (`Origin`).
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

from penstock.core.errors import Forbidden
from penstock.gateway.http.request import Request
from penstock.gateway.settings import ServerConfig

MAX_HOST = 261  # bytes: a name of 255, a colon and a port
PREFLIGHT_SECONDS = 600  # for which a browser need not ask again

_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[^\[\]:/@\s]+?)\.?)(?::[0-9]{0,5})?")
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,4096}")


class Origins:
    def __init__(self, server: ServerConfig) -> None:
        self._readers = frozenset(origin.lower().encode() for origin in server.cors or ())
        self._names = frozenset(name.lower() for name in (server.host, *(server.allowed_hosts or ())))
        self.private = is_loopback(server.host)  # whether nobody but this machine can connect
        self._is_ours = lru_cache(256)(self._names_this_server)

    def check(self, request: Request) -> None:
        """Refuse what a page of somebody else may have sent."""
        host = request.headers.get(b"host", b"localhost")  # only clients older than browsers send none
        if len(host) > MAX_HOST or not self._is_ours(host):
            raise Forbidden(
                f"Host is {_shown(host)}, which is not known as a name of this server: add it to server.allowed_hosts, "
                "or create a key with 'penstock keys create NAME'",
                param="host",
                code="host_not_allowed",
            )
        origin = request.headers.get(b"origin")
        if origin is None or self._may_read(origin) or origin.lower().partition(b"://")[2] == host.lower():
            return
        raise Forbidden(
            f"pages from {_shown(origin)} may not use this server: add the origin to server.cors, "
            "or create a key with 'penstock keys create NAME'",
            param="origin",
            code="origin_not_allowed",
        )

    def add_cors_headers(self, request: Request, headers: dict[bytes, bytes]) -> None:
        """Let the page read the response, whatever that will be, and send what its preflight asks for."""
        origin = request.headers.get(b"origin")
        if origin is None or not self._may_read(origin):
            return
        headers[b"access-control-allow-origin"] = b"*" if b"*" in self._readers else origin
        headers[b"vary"] = b"Origin"
        headers[b"access-control-expose-headers"] = b"*"
        method = request.headers.get(b"access-control-request-method")
        if request.method == "OPTIONS" and method is not None:
            headers[b"access-control-allow-methods"] = b"GET, HEAD, POST, PUT, DELETE"
            wanted = request.headers.get(b"access-control-request-headers", b"")
            if _HEADER_NAMES.fullmatch(wanted):
                headers[b"access-control-allow-headers"] = wanted
            headers[b"access-control-max-age"] = b"%d" % PREFLIGHT_SECONDS

    def _may_read(self, origin: bytes) -> bool:
        return b"*" in self._readers or origin.lower() in self._readers

    def _names_this_server(self, host: bytes) -> bool:
        """Names can be pointed here by anybody, addresses cannot."""
        found = _HOST.fullmatch(host.decode("latin-1").strip().lower())
        if found is None:
            return False
        name = found["v6"] or found["name"]
        return not self._names.isdisjoint(("*", name)) or is_loopback(name) or (not self.private and _is_address(name))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _shown(value: bytes) -> str:
    return repr(value[:200].decode("latin-1"))
