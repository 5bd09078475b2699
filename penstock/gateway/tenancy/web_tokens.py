"""JSON web tokens of an identity provider."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jwt

from penstock.core.errors import StartupError, Unauthorized
from penstock.gateway.settings import JwtConfig
from penstock.gateway.tenancy.issuer_keys import KINDS, IssuerKeys

REMEMBERED_TOKENS = 4096


class TokenVerifier:
    """Checks signature, algorithm, issuer, audience and times. The outcome is kept until the token expires, as
    checking a signature takes longer than all the rest of a request's way in."""

    def __init__(self, config: JwtConfig) -> None:
        self.config = config
        self.key = None if config.jwks_url else _read_key(config)
        self.published = IssuerKeys(config.jwks_url, KINDS[config.algorithms[0][:2]]) if config.jwks_url else None
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    async def tenant(self, token: bytes) -> str:
        digest = hashlib.sha256(token).digest()
        known = self._known.get(digest)
        if known is None or known[1] < time.time():
            known = self._known[digest] = self._verify(token, await self._key(token))
            if len(self._known) > REMEMBERED_TOKENS:
                self._known.popitem(last=False)
        return known[0]

    async def _key(self, token: bytes) -> Any:
        if self.published is None:
            return self.key
        try:
            id = jwt.get_unverified_header(token).get("kid")
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise _not_valid() from None
        key = None if id is None else await self.published.find(id)
        if key is None:
            raise _not_valid()
        return key

    def _verify(self, token: bytes, key: Any) -> tuple[str, float]:
        config = self.config
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=list(config.algorithms),
                issuer=config.issuer,
                audience=config.audience,
                leeway=config.leeway_seconds,
                options={"require": ["exp", "iss", "aud", config.tenant_claim]},
            )
        except jwt.ExpiredSignatureError:
            raise Unauthorized("the token has expired") from None
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise _not_valid() from None
        name = claims[config.tenant_claim]
        if not isinstance(name, str):
            raise Unauthorized(f"the token's claim {config.tenant_claim} must be a name")
        return name, float(claims["exp"]) + config.leeway_seconds


def _not_valid() -> Unauthorized:
    """PyJWT's own messages may quote the token."""
    return Unauthorized("the bearer token is neither a key nor a valid token of the issuer")


def _read_key(config: JwtConfig) -> Any:
    try:
        text = Path(config.key_file).expanduser().read_bytes().strip()
        key = jwt.get_algorithm_by_name(config.algorithms[0]).prepare_key(text)
    except (OSError, ValueError, jwt.PyJWTError) as error:
        raise StartupError(f"jwt.key_file {config.key_file}: {error}", param="jwt.key_file") from error
    if config.algorithms[0].startswith("HS") and len(text) < 32:
        raise StartupError("jwt.key_file holds a secret shorter than 32 bytes", param="jwt.key_file")
    return key
