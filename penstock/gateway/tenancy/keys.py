"""API keys: `psk-ID-SECRET`. The id is public and finds the record, which holds a hash of the secret.

The secret has 192 random bits, so one round of SHA-256 protects it: there is nothing to guess.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time

import msgspec

from penstock.state.store import Store

KIND = "key"  # of records in the store
_KEY = re.compile(rb"psk-([0-9a-f]{12})-([0-9a-f]{48})")
_SECRETS = re.compile(r"(psk-[0-9a-fA-F]{0,12}|eyJ)[0-9A-Za-z_.-]*")
_NOBODY = hashlib.sha256(secrets.token_bytes(32)).hexdigest()


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    hash: str  # SHA-256 of the secret, hexadecimal
    tenant: str = ""  # "": an admin key
    created: int
    note: str = ""

    @property
    def admin(self) -> bool:
        return not self.tenant

    @property
    def prefix(self) -> str:
        return f"psk-{self.id}-…"


encode_record = msgspec.json.Encoder().encode
decode_record = msgspec.json.Decoder(KeyRecord).decode


def new_key(tenant: str, note: str = "") -> tuple[str, KeyRecord]:
    """The key, to be shown once, and what is kept of it. Without a tenant it is an admin key."""
    id, secret = secrets.token_hex(6), secrets.token_hex(24)
    return f"psk-{id}-{secret}", KeyRecord(
        id=id, hash=_hash(secret.encode()), tenant=tenant, created=int(time.time()), note=note
    )


def find_key(records: dict[str, KeyRecord], presented: bytes) -> KeyRecord | None:
    """The comparison takes as long for a wrong secret as for an unknown id."""
    match = _KEY.fullmatch(presented)
    if match is None:
        return None
    record = records.get(match[1].decode())
    equal = hmac.compare_digest(_hash(match[2]), record.hash if record else _NOBODY)
    return record if equal else None


async def create_key(store: Store, tenant: str, note: str = "") -> tuple[str, KeyRecord]:
    key, record = new_key(tenant, note)
    await store.put(KIND, record.id, encode_record(record).decode())
    return key, record


async def stored_keys(store: Store) -> list[KeyRecord]:
    found = [decode_record(value) for value in (await store.records(KIND)).values()]
    return sorted(found, key=lambda record: (record.tenant, record.created))


def redacted(text: str) -> str:
    """For logs: clients put keys where they do not belong."""
    return _SECRETS.sub(r"\1…", text) if "psk-" in text or "eyJ" in text else text


def looks_like_key(presented: bytes) -> bool:
    return presented.startswith(b"psk-")


def _hash(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()
