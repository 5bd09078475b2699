from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import StartupError
from penstock.core.settings import convert_section
from penstock.fleet.upstream.settings import UpstreamConfig

URL = "https://host:8443/v1"


def test_converts_nested_sections() -> None:
    values = {"url": URL, "headers": {"x-org": "a"}, "capabilities": {"seed": False}, "timeouts": {"first_token": 9}}
    config = convert_section(UpstreamConfig, "upstreams.0", values)
    assert (config.capabilities.seed, config.capabilities.logprobs) == (False, None)
    assert config.timeouts.first_token == 9
    assert config.headers == {"x-org": "a"}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"url": "host:80"}, "url"),
        ({"url": "http://user:secret@host"}, "url"),
        ({"url": URL, "kind": "grpc"}, "kind"),
        ({"url": URL, "server": "ollama"}, "server"),
        ({"url": URL, "timeouts": {"next_token": 0}}, "timeouts.next_token"),
        ({"url": URL, "capabilities": {"seeds": True}}, "capabilities.seeds"),
        ({"url": URL, "headers": {"a b": "c"}}, "headers"),
        ({"url": URL, "headers": {"a": "b\r\nc: d"}}, "headers"),
        ({"url": URL, "kind": "triton"}, "model"),
        ({"url": URL, "kind": "triton", "model": "m", "triton": {"parameters": {}}}, "triton.parameters"),
    ],
)
def test_errors_name_the_setting(values: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError) as refused:
        convert_section(UpstreamConfig, "upstreams.0", values)
    assert refused.value.param == f"upstreams.0.{named}"
