"""Whom a request belongs to: the session whose requests should meet on one replica, and the user who should always get
the same version of a model."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Any

from penstock.gateway.api.reading import Asked
from penstock.gateway.http.request import Request
from penstock.gateway.tenancy.tenants import Tenant

_SESSION_HEADERS = (b"x-penstock-session", b"x-session-id")
_SESSION = re.compile(rb"[\x21-\x7e]{1,256}")


def session_of(request: Request, tenant: Tenant, prompt_cache_key: Any) -> str:
    """The session that a request names, as a digest that differs between tenants; empty if it names none. What is not
    of the right form counts as not given."""
    key = _text(prompt_cache_key)
    for name in _SESSION_HEADERS:
        key = key or request.header(name, _SESSION) or ""
    return blake2b(f"{tenant.name}/{key}".encode(), digest_size=16).hexdigest() if key else ""


def sticky_key(request: Request, tenant: Tenant, asked: Asked) -> str:
    """What the version of a request depends on: its user, else its session, else its tenant. Where there are no tenants
    and nothing is said, every request may get another version."""
    user = _text(asked.user) or _text(asked.safety_identifier)
    if user:
        return f"user/{tenant.name}/{user}"
    session = session_of(request, tenant, asked.prompt_cache_key)
    return f"session/{session}" if session else f"tenant/{tenant.name}" if tenant.name else f"request/{request.unique}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
