"""The public keys that an identity provider publishes: a JSON web key set behind a URL."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any
from urllib.parse import urlsplit

import jwt

from penstock.client.http import HttpClient
from penstock.core.errors import PenstockError, Unavailable

logger = logging.getLogger("penstock.gateway")

FETCH_SECONDS = 5.0
UNKNOWN_SECONDS = 10.0  # between two fetches for the sake of ids that are not known: anybody can make them up
REFRESH_SECONDS = 300.0  # after which a key that was withdrawn is forgotten
KINDS = {"RS": "RSA", "ES": "EC"}  # of keys, by the beginning of an algorithm's name


class IssuerKeys:
    """Fetched when a token names a key that is not known, and again now and then. While the issuer cannot be reached,
    the keys it gave last stay valid."""

    def __init__(self, url: str, kind: str) -> None:
        self.url = url
        self.kind = kind
        self._keys: dict[str, Any] = {}
        self._failed = False
        self._fetching: asyncio.Task[None] | None = None
        self._tried = float("-inf")  # time.monotonic()

    async def find(self, id: str) -> Any:
        """None: the issuer has no such key."""
        since = time.monotonic() - self._tried
        if self._fetching is None and since >= (REFRESH_SECONDS if id in self._keys else UNKNOWN_SECONDS):
            self._fetching = asyncio.create_task(self._refresh())
        if id not in self._keys and self._fetching is not None:
            await asyncio.shield(self._fetching)  # others may wait for it as well
        if id not in self._keys and self._failed:
            raise Unavailable(
                "the token cannot be checked: the keys of its issuer cannot be fetched; try again in a few seconds",
                code="issuer_unavailable",
            )
        return self._keys.get(id)

    async def _refresh(self) -> None:
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                self._keys = await self._fetch()
            self._failed = False
        except (PenstockError, jwt.PyJWTError, TimeoutError, AttributeError, TypeError, ValueError) as error:
            # The last three: PyJWT trusts the shape of a key set.
            self._failed = True
            reason = str(error) or f"no answer within {FETCH_SECONDS:g} s"
            logger.warning("cannot fetch keys from jwt.jwks_url %s: %s", self.url, reason)
        finally:
            self._tried = time.monotonic()
            self._fetching = None

    async def _fetch(self) -> dict[str, Any]:
        parts = urlsplit(self.url)
        async with HttpClient(f"{parts.scheme}://{parts.netloc}") as http:
            response = await http.get(f"{parts.path or '/'}{parts.query and '?'}{parts.query}")
        if response.status != 200:
            raise Unavailable(f"it answered {response.status}")
        found = response.json()
        if not isinstance(found, dict):
            raise Unavailable("it is not a key set")
        return {
            key.key_id: key.key
            for key in jwt.PyJWKSet.from_dict(found).keys
            if key.key_id and key.key_type == self.kind and key.public_key_use in ("sig", None)
        }
