"""docs/observability.md says how much is kept of what; this is what the code keeps."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.autoscaling import arrivals
from penstock.core import ledger
from penstock.engine import block_pool, deadlines, fairness, forecast
from penstock.fleet import failover, fleet, prefix_index
from penstock.fleet.upstream import engine as upstream
from penstock.gateway.api import live, shadow
from penstock.gateway.tenancy import web_tokens
from penstock.grammar import compiler
from penstock.observability import request_log
from penstock.speculative import suffix
from penstock.state import redis
from penstock.text import segments
from penstock.worker import client

PAGE = Path(__file__).parents[2] / "docs" / "observability.md"
KEPT = {
    "accounts of requests": (request_log.MAX_REQUESTS, request_log.MAX_BYTES // 2**20),
    "frames of the live page": (live.MAX_FRAMES, live.MAX_RUNNING, live.MAX_ENDED, live.MAX_REFUSED),
    "verified web tokens": (web_tokens.REMEMBERED_TOKENS,),
    "pieces of text": (segments.MAX_CHARACTERS, segments.MAX_WORDS),
    "where prefixes are cached": (prefix_index.MAX_ENTRIES,),
    "requests that wait for a replica": (fleet.MAX_HELD,),
    "requests that crash workers": (failover.QUARANTINED, int(failover.QUARANTINE_SECONDS / 60)),
    "ledgers of aborted requests": (int(client.KEPT_LEDGER_SECONDS), upstream.KEPT_LEDGERS),
    "settlements while Redis is away": (redis.MAX_UNSETTLED,),
    "shadow requests": (shadow.MAX_SEQUENCES,),
    "arrivals": (arrivals._PERIODS, arrivals._PROFILE_BINS),
    "a request's ledger": (ledger.MAX_CHUNKS, ledger.MAX_STALLS),
    "deadlines": (deadlines._LEAST_CLEANED,),
    "contents that were evicted": (block_pool._REMEMBERED_SALTS,),
    "tenants that are away": (fairness._REMEMBERED,),
    "promises": (forecast._REMEMBERED,),
    "answers that drafts": (suffix._SCOPES, 2 * suffix._ANSWERS),
    "compiled grammars": (compiler.MAX_COMPILED,),
}


def test_documented_sizes_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| ([^|]*) \| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    for what, sizes in KEPT.items():
        (said,) = [size for name, size in rows if name.startswith(what)]
        assert [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", said)] == [*sizes], what
