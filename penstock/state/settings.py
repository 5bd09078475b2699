"""The `state` setting: where gateways keep what they remember and share."""

from __future__ import annotations

import re

from penstock.core.settings import check

EXPECTED = "memory, sqlite:///PATH or redis://HOST:PORT/DB"
_URL = re.compile(r"memory|sqlite:///.+|rediss?://.+|unix://.+")


def check_state(url: str | None) -> None:
    """The message does not show the URL, which may hold a password."""
    check(url is None or _URL.fullmatch(url) is not None, "state", f"must be {EXPECTED}")
