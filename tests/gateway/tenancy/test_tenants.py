"""Who gets in: keys, JSON web tokens, administrators; and what refuses to let out a secret."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import jwt
import openai
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from penstock.core.errors import StartupError
from penstock.gateway.tenancy import issuer_keys
from penstock.gateway.tenancy.tenants import Directory
from penstock.settings import Settings, settings_from_mapping
from penstock.simulation.scripted_engine import MODEL
from penstock.state.memory import MemoryStore
from penstock.text.tokenizer import Tokenizer
from tests.gateway.api.test_bad_input import check_error
from tests.gateway.conftest import Gateway, serving

HI: list[Any] = [{"role": "user", "content": "Hi"}]
BODY = {"model": MODEL, "messages": HI}
CHAT = "/v1/chat/completions"
TENANTS: dict[str, Any] = {"acme": {"weight": 2}, "other": {"models": ["another-model"]}}


@pytest.fixture(scope="module")
def closed(tokenizer: Tokenizer) -> Iterator[Gateway]:
    with serving(tokenizer, settings_from_mapping({"tenants": TENANTS})) as gateway:
        yield gateway


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_a_key_leads_to_its_tenant(closed: Gateway) -> None:
    answer = closed.client(closed.key("acme")).chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == "Hello there, friend!"
    assert (closed.engine.requests[-1].tenant, closed.engine.requests[-1].weight) == ("acme", 2.0)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/requests", "/metrics", "/admin/keys"])
def test_nothing_without_a_key_but_health(closed: Gateway, path: str) -> None:
    with closed.http() as http:
        response = http.get(path)
        assert response.headers["www-authenticate"] == "Bearer"
        check_error(response, 401, None)
        assert {http.get(public).status_code for public in ("/health", "/ready", "/version")} == {200}


def test_a_key_may_come_in_either_header(closed: Gateway) -> None:
    key, other = closed.key("acme"), closed.key("acme")
    with closed.http() as http:
        for headers in ({"x-api-key": key}, {"x-api-key": key, **bearer(key)}):
            assert http.post(CHAT, json=BODY, headers=headers).status_code == 200
        for headers in ({"x-api-key": other, **bearer(key)}, {"x-api-key": ""}, {"x-api-key": "psk-no"}):
            check_error(http.post(CHAT, json=BODY, headers=headers), 401, None)
        check_error(http.get("/v1/models", headers=[("x-api-key", key), ("x-api-key", key)]), 401, None)
        assert http.get("/admin/keys", headers={"x-api-key": closed.key("")}).status_code == 200


def test_admin_and_tenant_keys_are_for_different_doors(closed: Gateway) -> None:
    admin, tenant = closed.key(""), closed.key("acme")
    with closed.http() as http:
        assert "/metrics" in check_error(http.post(CHAT, json=BODY, headers=bearer(admin)), 403, None)["message"]
        for path in ("/admin/fleet", "/metrics"):
            for headers in ({}, bearer("psk-1-2")):
                told = check_error(http.get(path, headers=headers), 401, None)["message"]
                assert "penstock keys create --admin" in told
                assert "create NAME" not in told, "a tenant's key would not open this"
        check_error(http.get("/admin/keys", headers=bearer(tenant)), 403, None)
        assert http.get("/admin/keys", headers=bearer(admin)).status_code == 200
        assert "penstock_spend_total" in http.get("/metrics", headers=bearer(admin)).text


def test_models_a_tenant_may_not_use_do_not_exist_for_it(closed: Gateway) -> None:
    client = closed.client(closed.key("other"))
    assert list(client.models.list()) == []
    with pytest.raises(openai.NotFoundError, match="nothing for this tenant"):
        client.chat.completions.create(model=MODEL, messages=HI)


def test_keys_through_the_admin_api(closed: Gateway) -> None:
    with closed.http() as http:
        http.headers.update(bearer(closed.key("")))
        fields = {"weight": 3, "requests_per_minute": 5, "model_limits": {MODEL: {"concurrent": 2}}}
        assert http.put("/admin/tenants/new", json=fields).status_code == 200
        made = http.post("/admin/keys", json={"tenant": "new", "note": "for tests"}).json()
        client = closed.client(made["key"])
        client.models.list()
        listed = http.get("/admin/keys").json()["data"]
        assert [key["note"] for key in listed if key["id"] == made["id"]] == ["for tests"]
        assert made["key"] not in http.get("/admin/keys").text
        assert http.delete(f"/admin/keys/{made['id']}").json() == {"id": made["id"], "deleted": True}
        with pytest.raises(openai.AuthenticationError, match="revoked"):
            client.models.list()
        check_error(http.delete(f"/admin/keys/{made['id']}"), 404, "id")
        names = {tenant["name"]: tenant for tenant in http.get("/admin/tenants").json()["data"]}
        assert names["new"] == {"name": "new", "source": "store", **fields}
        assert names["acme"]["source"] == "settings"
        check_error(http.put("/admin/tenants/acme", json={}), 400, "name")
        check_error(http.put("/admin/tenants/new", json={"wieght": 3}), 400, "tenants.new.wieght")
        check_error(http.put("/admin/tenants/new", json={"concurrent": 0}), 400, "tenants.new.concurrent")
        check_error(http.put("/admin/tenants/new", json={"model_limits": 3}), 400, "tenants.new.model_limits")
        check_error(http.put("/admin/tenants/new", json={"default_class": "best"}), 400, "default_class")
        check_error(http.post("/admin/keys", json={"tenant": "nobody"}), 400, "tenant")
        check_error(http.post("/admin/keys", json={}), 400, "tenant")
        last = http.post("/admin/keys", json={"tenant": "new"}).json()["key"]
        assert http.delete("/admin/tenants/new").status_code == 200
        check_error(http.get("/v1/models", headers=bearer(last)), 401, None)


def test_a_key_revoked_in_another_process_is_refused_soon(tokenizer: Tokenizer, tmp_path: Path) -> None:
    state = f"sqlite:///{tmp_path}/state.db"

    def penstock(*arguments: str) -> str:
        command = [sys.executable, "-m", "penstock.cli.main", *arguments, "--state", state]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with serving(tokenizer, settings_from_mapping({"state": state})) as gateway, gateway.http() as http:
        assert http.get("/v1/models").status_code == 200, "open: there is no tenant"
        key = penstock("keys", "create", "acme", "--note", "ci").strip()
        while http.get("/v1/models").status_code == 200:
            pass
        gateway.client(key).chat.completions.create(model=MODEL, messages=HI)
        id = penstock("keys", "list").split()[0]
        assert id in key
        for number in range(4):  # each at once, wherever the gateway's looks at the store are
            other, admin = (
                penstock("keys", "create", f"tenant{number}").strip(),
                penstock("keys", "create", "--admin").strip(),
            )
            assert http.get("/v1/models", headers=bearer(other)).status_code == 200
            assert http.get("/admin/keys", headers=bearer(admin)).status_code == 200
        penstock("keys", "revoke", id)
        while http.get("/v1/models", headers=bearer(key)).status_code == 200:
            pass
        check_error(http.get("/v1/models", headers=bearer(key)), 401, None)
    table = penstock("usage", "--csv").splitlines()
    assert table[1].split(",")[1:4] == ["acme", MODEL, "1"]
    assert key.split("-")[2].encode() not in (tmp_path / "state.db").read_bytes(), "only a hash is kept"


def test_limits_and_prices_of_models_that_are_not_served_are_named(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"gpt-9": {"concurrent": 1}, "org/alias": {"concurrent": 2}}
    tenants = {"acme": {"model_limits": limits, "models": ["gpt-7", "org/alias"]}, "other": {}}
    given = {"tenants": tenants, "tenant_defaults": {"models": ["gpt-6", MODEL]}}
    with serving(tokenizer, settings_from_mapping({**given, "prices": {"gpt-8": {"input": 1}, MODEL: {}}})):
        pass
    named = [record.getMessage().split()[0] for record in caplog.records if "has no effect" in record.getMessage()]
    assert named == [
        "model_limits.gpt-9",
        "prices.gpt-8",
        "tenant_defaults.models.gpt-6",
        "tenants.acme.models.gpt-7",
    ]


@pytest.mark.parametrize(
    ("given", "warns"),
    [
        ({"tenants": {"acme": {"budget_per_day": 5}}}, True),
        ({"tenant_defaults": {"budget_per_month": 5}, "prices": {"gpt-8": {"input": 1}}}, True),
        ({"tenants": {"acme": {"budget_per_day": 5}}, "prices": {"org/alias": {"input": 1}}}, False),
        ({"tenants": {"acme": {"budget_per_day": 5}}, "machine_per_hour": 2.5}, False),
        ({"tenants": {"acme": {"budget_per_day": 5, "models": ["org/alias"]}}}, True),
        ({"tenants": {"acme": {"budget_per_day": 5, "models": ["gpt-7"]}}}, False),
        ({"tenants": {"acme": {}}}, False),
    ],
)
def test_budgets_that_a_model_without_a_price_never_spends_are_named(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, given: dict[str, Any], warns: bool
) -> None:
    with serving(tokenizer, settings_from_mapping(given)):
        pass
    assert (f"{MODEL} has no price, so the budget of" in caplog.text) == warns


def test_open_mode_is_for_loopback_only(caplog: pytest.LogCaptureFixture) -> None:
    def check(server: dict[str, Any], **more: Any) -> Directory:
        directory = Directory(settings_from_mapping({"server": server, **more}), MemoryStore())
        directory.check_open()
        return directory

    assert check({"host": "localhost"}).open
    assert "need no key" in caplog.text
    assert check({"host": "0.0.0.0", "open": True}).open
    assert not check({"host": "0.0.0.0"}, tenants=TENANTS).open
    assert not check({"host": "::1"}, tenants=TENANTS).open
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.com"):
        with pytest.raises(StartupError, match="penstock keys create"):
            check({"host": host})


# ---------------------------------------------------------------- JSON web tokens

ISSUER, AUDIENCE = "https://login.example.com", "penstock"
RSA, OTHER_RSA = (rsa.generate_private_key(65537, 2048) for _ in range(2))
EC = ec.generate_private_key(ec.SECP256R1())
SECRET = "a shared secret of more than thirty-two bytes"


def pem(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def claims(**changed: Any) -> dict[str, Any]:
    base = {"iss": ISSUER, "aud": AUDIENCE, "sub": "acme", "exp": int(time.time()) + 600}
    return {name: value for name, value in {**base, **changed}.items() if value is not None}


def with_jwt(folder: Path, key: bytes, *algorithms: str) -> dict[str, Any]:
    file = folder / "key"
    file.write_bytes(key)
    return {"key_file": str(file), "issuer": ISSUER, "audience": AUDIENCE, "algorithms": list(algorithms)}


@pytest.fixture(scope="module")
def rs_gateway(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    section = with_jwt(tmp_path_factory.mktemp("jwt"), pem(RSA), "RS256")
    with serving(tokenizer, settings_from_mapping({"tenants": TENANTS, "jwt": section})) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def rs_http(rs_gateway: Gateway) -> Iterator[httpx.Client]:
    with rs_gateway.http() as http:
        yield http


@pytest.fixture(scope="module")
def rs_key(rs_gateway: Gateway) -> str:
    return rs_gateway.key("acme")


def status_of(gateway: Gateway, token: str) -> int:
    with gateway.http() as http:
        response = http.get("/v1/models", headers=bearer(token))
    if response.status_code != 200:
        check_error(response, response.status_code, None)
        assert token not in response.text
    return response.status_code


@pytest.mark.parametrize(
    ("algorithm", "public", "private"),
    [("RS256", pem(RSA), RSA), ("ES256", pem(EC), EC), ("HS256", SECRET.encode(), SECRET)],
)
def test_tokens_of_every_kind_of_signature(
    tokenizer: Tokenizer, tmp_path: Path, algorithm: str, public: bytes, private: Any
) -> None:
    section = with_jwt(tmp_path, public, algorithm)
    with serving(tokenizer, settings_from_mapping({"tenants": TENANTS, "jwt": section})) as gateway:
        token = jwt.encode(claims(), private, algorithm)
        assert status_of(gateway, token) == status_of(gateway, token) == 200
        assert status_of(gateway, gateway.key("acme")) == 200, "keys go on working"


class Issuer:
    """Publishes keys over HTTP, and counts how often it is asked."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {}
        self.body: bytes | None = None  # in place of the keys
        self.status = 200
        self.fetched = 0
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.fetched += self.path == "/keys?all=yes"
                body = issuer.body
                if body is None:
                    body = json.dumps({"keys": [jwk(id, key) for id, key in issuer.keys.items()]}).encode()
                self.send_response(issuer.status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/keys?all=yes"

    def __enter__(self) -> Issuer:
        threading.Thread(target=self.server.serve_forever).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def jwk(id: str, key: Any) -> Any:
    algorithm = RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else ECAlgorithm
    return algorithm.to_jwk(key.public_key(), as_dict=True) | {"kid": id, "use": "sig"}


def signed(id: str | None, key: Any, algorithm: str = "RS256") -> str:
    return jwt.encode(claims(), key, algorithm, headers=None if id is None else {"kid": id})


def with_issuer(issuer: Issuer, algorithm: str = "RS256") -> Settings:
    section = {"jwks_url": issuer.url, "issuer": ISSUER, "audience": AUDIENCE, "algorithms": [algorithm]}
    return settings_from_mapping({"tenants": TENANTS, "jwt": section})


@pytest.mark.parametrize(("algorithm", "key"), [("RS256", RSA), ("RS512", RSA), ("ES256", EC)])
def test_keys_that_an_issuer_publishes(tokenizer: Tokenizer, algorithm: str, key: Any) -> None:
    with Issuer() as issuer, serving(tokenizer, with_issuer(issuer, algorithm)) as gateway:
        issuer.keys = {"one": RSA, "two": EC, "three": OTHER_RSA, "its": key}
        assert issuer.fetched == 0, "nothing before the first token"
        assert status_of(gateway, signed("its", key, algorithm)) == 200
        assert status_of(gateway, signed("three", key, algorithm)) == 401, "signed with another key than it names"
        assert status_of(gateway, signed(None, key, algorithm)) == 401
        assert issuer.fetched == 1


def test_a_new_key_is_found_and_made_up_ones_do_not_reach_the_issuer(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Issuer() as issuer, serving(tokenizer, with_issuer(issuer)) as gateway:
        issuer.keys = {"old": RSA}
        assert status_of(gateway, signed("old", RSA)) == 200
        issuer.keys = {"new": OTHER_RSA}
        for number in range(5):
            assert status_of(gateway, signed(f"made up {number}", RSA)) == 401
        assert issuer.fetched == 1
        monkeypatch.setattr(issuer_keys, "UNKNOWN_SECONDS", 0.0)  # ten seconds later
        assert status_of(gateway, signed("new", OTHER_RSA)) == 200
        assert status_of(gateway, jwt.encode(claims(jti="another"), RSA, "RS256", headers={"kid": "old"})) == 401


def test_while_the_issuer_is_away_known_keys_stay_valid(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(issuer_keys, "UNKNOWN_SECONDS", 0.0)
    with Issuer() as issuer, serving(tokenizer, with_issuer(issuer)) as gateway:
        issuer.keys, issuer.status = {"old": RSA}, 500
        assert status_of(gateway, signed("old", RSA)) == 503
        assert f"{issuer.url}: it answered 500" in caplog.text
        issuer.status = 200
        assert status_of(gateway, signed("old", RSA)) == 200
        issuer.status = 404
        assert status_of(gateway, signed("new", OTHER_RSA)) == 503
        assert status_of(gateway, jwt.encode(claims(jti="another"), RSA, "RS256", headers={"kid": "old"})) == 200


@pytest.mark.parametrize("published", [b"", b"[]", b'{"keys": 3}', b'{"keys": [1]}', b'{"keys": [{"kty": "RSA"}]}'])
def test_a_broken_key_set_is_no_crash(tokenizer: Tokenizer, published: bytes) -> None:
    with Issuer() as issuer, serving(tokenizer, with_issuer(issuer)) as gateway:
        issuer.body = published
        assert status_of(gateway, signed("any", RSA)) == 503


def unsigned() -> str:
    return jwt.encode(claims(), "", "none")


def tampered() -> str:
    head, _, signature = jwt.encode(claims(sub="other"), RSA, "RS256").split(".")
    return f"{head}.{jwt.encode(claims(), RSA, 'RS256').split('.')[1]}.{signature}"


# Made when they are sent: by then another of these tests may have taken longer than a token lives.
BAD_TOKENS: dict[str, Callable[[], str]] = {
    "alg none": unsigned,
    "expired": lambda: jwt.encode(claims(exp=int(time.time()) - 60), RSA, "RS256"),
    "no expiry": lambda: jwt.encode(claims(exp=None), RSA, "RS256"),
    "not valid yet": lambda: jwt.encode(claims(nbf=int(time.time()) + 300), RSA, "RS256"),
    "wrong audience": lambda: jwt.encode(claims(aud="someone"), RSA, "RS256"),
    "no audience": lambda: jwt.encode(claims(aud=None), RSA, "RS256"),
    "wrong issuer": lambda: jwt.encode(claims(iss="https://evil.example.com"), RSA, "RS256"),
    "another key": lambda: jwt.encode(claims(), OTHER_RSA, "RS256"),
    "another algorithm of the kind": lambda: jwt.encode(claims(), RSA, "RS512"),
    "tampered": tampered,
    "no tenant": lambda: jwt.encode(claims(sub=None), RSA, "RS256"),
    "tenant a number": lambda: jwt.encode(claims() | {"sub": 5}, RSA, "RS256"),
    "public key as secret": lambda: jwt.api_jws.encode(
        json.dumps(claims()).encode(), b"x" * 32, "HS256", headers={"typ": "JWT"}
    ),
}


@pytest.mark.parametrize("name", BAD_TOKENS)
def test_bad_tokens_are_refused(rs_gateway: Gateway, name: str) -> None:
    assert status_of(rs_gateway, BAD_TOKENS[name]()) == 401


def test_a_valid_token_of_a_stranger_is_forbidden(rs_gateway: Gateway) -> None:
    assert status_of(rs_gateway, jwt.encode(claims(sub="stranger"), RSA, "RS256")) == 403


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"algorithms": ["none"]}, "jwt.algorithms"),
        ({"algorithms": ["RS256", "HS256"]}, "one kind"),
        ({"audience": ""}, "jwt.audience must be given"),
        ({"key_file": ""}, "jwt.key_file must be given, or jwt.jwks_url"),
        ({"jwks_url": "https://login.example.com/keys"}, "but not both"),
        ({"key_file": "", "jwks_url": "http://login.example.com/keys"}, "jwt.jwks_url must begin with https"),
        ({"key_file": "", "jwks_url": "http://localhost:1@example.com/keys"}, "jwt.jwks_url must begin with https"),
        ({"key_file": "", "jwks_url": "https://login.example.com", "algorithms": ["HS256"]}, "must be RS or ES"),
    ],
)
def test_unsafe_token_settings_are_refused(changed: dict[str, Any], message: str) -> None:
    section = {"key_file": "key.pem", "issuer": ISSUER, "audience": AUDIENCE, **changed}
    with pytest.raises(StartupError, match=message):
        settings_from_mapping({"jwt": section})


# ---------------------------------------------------------------- whatever else may come

ANYTHING = st.binary(max_size=200).map(lambda raw: bytes(b for b in raw if b >= 32 and b != 127))
KEY_LIKE = st.from_regex(rb"psk-[0-9a-f]{0,13}-[0-9a-f]{0,50}", fullmatch=True)
TOKEN_LIKE = st.from_regex(rb"eyJ[\w-]{0,40}\.[\w-]{0,80}\.[\w-]{0,80}", fullmatch=True)
SQL = st.sampled_from([b"psk-' OR '1'='1", b"psk-000000000000-'; DROP TABLE records; --", b"Bearer Bearer x"])


@given(header=st.one_of(ANYTHING, KEY_LIKE, TOKEN_LIKE, SQL), scheme=st.sampled_from([b"", b"Bearer ", b"bearer  "]))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_fuzzed_keys_are_refused(rs_http: httpx.Client, header: bytes, scheme: bytes) -> None:
    for path in ("/v1/models", "/admin/keys"):
        response = rs_http.get(path, headers={b"authorization": (scheme + header).strip()})
        assert response.status_code in (400, 401), response.text


NAMES = (b"x-penstock-class", b"x-penstock-deadline-ms", b"x-request-id", b"cache-control", b"traceparent")


@given(headers=st.dictionaries(st.sampled_from(NAMES), ANYTHING.map(bytes.strip), min_size=1))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_fuzzed_headers_break_nothing(rs_http: httpx.Client, rs_key: str, headers: dict[bytes, bytes]) -> None:
    sent = {**headers, b"authorization": f"Bearer {rs_key}".encode()}
    in_time = 504 if b"x-penstock-deadline-ms" in headers else 200  # some numbers are milliseconds, and few
    assert rs_http.post(CHAT, json=BODY, headers=sent).status_code in (200, 400, in_time)


def test_no_secret_is_ever_logged(closed: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    key, token = closed.key("acme"), jwt.encode(claims(), SECRET, "HS256")
    wrong = key[:-1] + ("0" if key[-1] != "0" else "1")
    with caplog.at_level(logging.DEBUG), closed.http() as http:
        for secret in (key, token, wrong):
            http.get("/v1/models", headers=bearer(secret))
            http.get(f"/{secret}", headers={"authorization": secret})
            http.get("/v1/models/" + secret, headers=bearer(key))
            http.get("/health", headers={"x-request-id": secret[:120]})
            http.post(
                CHAT, json={"model": secret, "messages": HI}, headers={**bearer(key), "x-request-id": secret[:100]}
            )
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("penstock")]
    assert len(logged) >= 12
    for secret in (key.split("-")[2], wrong.split("-")[2], token[4:40]):
        assert not [line for line in logged if secret in line]


def test_two_authorization_headers_are_ambiguous(closed: Gateway) -> None:
    key = closed.key("acme")
    with closed.http() as http:
        request = httpx.Request("GET", closed.url + "/v1/models", headers=[("authorization", f"Bearer {key}")] * 2)
        check_error(http.send(request), 401, None)
