"""What web pages can do to a server that needs no key, and what `server.cors` allows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest

from penstock.core.errors import StartupError
from penstock.gateway.settings import ServerConfig, TenantConfig
from penstock.settings import Settings, settings_from_mapping
from penstock.simulation.scripted_engine import MODEL
from penstock.text.tokenizer import Tokenizer
from tests.gateway.conftest import Gateway, serving

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
PAGE = "https://page.example"
TENANTS = {"acme": TenantConfig()}

Start = Callable[[Settings], Gateway]


@pytest.fixture
def start(tokenizer: Tokenizer) -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda settings: stack.enter_context(serving(tokenizer, settings))


def post(gateway: Gateway, **headers: str) -> httpx.Response:
    with gateway.http() as http:
        return http.post(CHAT, json=BODY, headers=headers)


def status_by_host(gateway: Gateway, path: str, *hosts: str) -> dict[str, int]:
    with gateway.http() as http:
        return {host: http.get(path, headers={"host": host}).status_code for host in hosts}


@pytest.mark.parametrize(
    "type", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json", "application/json ;x"]
)
def test_json_is_taken_under_each_of_its_names(gateway: Gateway, type: str) -> None:
    assert post(gateway, **{"content-type": type}).status_code == 200


def test_a_compressed_body_is_refused_by_name(gateway: Gateway) -> None:
    response = post(gateway, **{"content-encoding": "gzip"})
    assert (response.status_code, response.json()["error"]["param"]) == (415, "content-encoding")
    assert post(gateway, **{"content-encoding": "identity"}).status_code == 200


@pytest.mark.parametrize(
    "type",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/plain;application/json", ""],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
def test_what_a_page_may_send_without_asking_is_refused(shared_gateway: Gateway, path: str, type: str) -> None:
    """Without a type too: pages can send bytes without one."""
    response = httpx.post(shared_gateway.url + path, content=b"{}", headers={"content-type": type} if type else {})
    assert response.status_code == 415
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("content-type", "unsupported_media_type")
    assert "application/json" in error["message"]


def test_on_a_loopback_address_only_its_own_names_are_served(start: Start) -> None:
    gateway = start(Settings(server=ServerConfig(allowed_hosts=("llm.example",))))
    ours = ("localhost", "LOCALHOST.:8000", "127.0.0.1", "127.1.2.3:80", "[::1]:8000", "llm.example", "llm.example:1")
    assert set(status_by_host(gateway, "/v1/models", *ours).values()) == {200}
    others = ("evil.example", "192.168.1.2", "localhost.evil.example", "0.0.0.0:8000", "a@localhost", "x" * 300, "")
    for path in ("/v1/models", "/metrics"):
        assert set(status_by_host(gateway, path, *others).values()) == {403}
    refused = httpx.get(gateway.url + "/v1/models", headers={"host": "evil.example"}).json()["error"]
    assert (refused["param"], refused["code"]) == ("host", "host_not_allowed")
    assert "server.allowed_hosts" in refused["message"]


def test_where_others_can_connect_addresses_and_allowed_names_are_served(start: Start) -> None:
    gateway = start(Settings(server=ServerConfig(host="0.0.0.0", open=True, allowed_hosts=("llm.example",))))
    ours = ("localhost", "192.168.1.2:8000", "[fe80::1]", "llm.example")
    assert set(status_by_host(gateway, "/v1/models", *ours).values()) == {200}
    assert set(status_by_host(gateway, "/v1/models", "evil.example", "service").values()) == {403}
    for path in ("/health", "/metrics"):  # load balancers and Prometheus know it by names of their own
        assert set(status_by_host(gateway, path, "service:8000", "10.0.0.1").values()) == {200}


def test_all_names_can_be_allowed(start: Start) -> None:
    gateway = start(Settings(server=ServerConfig(allowed_hosts=("*",))))
    assert status_by_host(gateway, "/v1/models", "anything.example") == {"anything.example": 200}


@pytest.mark.parametrize("origin", [PAGE, "null", "http://localhost:1", "http://evil.example"])
def test_pages_of_others_are_refused(gateway: Gateway, origin: str) -> None:
    response = post(gateway, origin=origin)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"
    assert "server.cors" in response.json()["error"]["message"]
    assert "access-control-allow-origin" not in response.headers
    assert gateway.engine.requests == []


def test_pages_of_the_server_itself_are_served(gateway: Gateway) -> None:
    assert post(gateway, origin=gateway.url).status_code == 200


@pytest.mark.parametrize("cors", [(PAGE,), ("*",)])
def test_pages_in_cors_may_use_the_server_and_read_errors_and_streams(start: Start, cors: tuple[str, ...]) -> None:
    gateway = start(Settings(server=ServerConfig(cors=cors)))
    shown = PAGE if cors == (PAGE,) else "*"
    with gateway.http() as http:
        for body, status in ((BODY, 200), ({**BODY, "stream": True}, 200), ({}, 400)):
            response = http.post(CHAT, json=body, headers={"origin": PAGE})
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == shown
            assert response.headers["access-control-expose-headers"] == "*"
        missing = http.get("/no/such/path", headers={"origin": PAGE})
        assert (missing.status_code, missing.headers["access-control-allow-origin"]) == (404, shown)
        without = http.get("/v1/models")
        assert (without.status_code, "access-control-allow-origin" in without.headers) == (200, False)


@pytest.mark.parametrize("closed", [False, True])
def test_browsers_that_ask_first_are_answered_without_a_key(start: Start, closed: bool) -> None:
    gateway = start(Settings(server=ServerConfig(cors=(PAGE,)), tenants=TENANTS if closed else {}))
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    with gateway.http() as http:
        allowed = http.options(CHAT, headers={"origin": PAGE, **asked})
        refused = http.options(CHAT, headers={"origin": "https://evil.example", **asked})
    assert allowed.status_code == refused.status_code == 204
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert allowed.headers["access-control-allow-headers"] == "authorization,content-type"
    assert not [name for name in refused.headers if name.startswith("access-control")]


def test_options_of_every_path(shared_gateway: Gateway) -> None:
    with shared_gateway.http() as http:
        for path, allow in (
            (CHAT, "OPTIONS, POST"),
            ("/v1/models/a/b", "GET, HEAD, OPTIONS"),
            ("/admin/tenants/acme", "DELETE, OPTIONS, PUT"),
        ):
            response = http.options(path)
            assert (response.status_code, response.headers["allow"], response.content) == (204, allow, b"")
            assert "content-length" not in response.headers
        assert http.options("/no/such/path").status_code == 404


def test_where_a_key_is_needed_names_and_origins_are_not_looked_at(start: Start) -> None:
    gateway = start(Settings(server=ServerConfig(cors=("https://other.example",)), tenants=TENANTS))
    key = {"authorization": f"Bearer {gateway.key('acme')}"}
    assert post(gateway, host="llm.example", origin=PAGE, **key).status_code == 200
    assert post(gateway, host="llm.example", origin="https://other.example").status_code == 401
    told = post(gateway, origin="https://other.example").headers["access-control-allow-origin"]
    assert told == "https://other.example"


@pytest.mark.parametrize(
    ("field", "value"),
    [("cors", "page.example"), ("cors", PAGE + "/"), ("allowed_hosts", "a:80"), ("allowed_hosts", "http://a")],
)
def test_what_can_never_match_is_refused_at_the_start(field: str, value: str) -> None:
    with pytest.raises(StartupError, match=rf"server\.{field} must hold"):
        settings_from_mapping({"server": {field: [value]}})
