"""What the page is made of, and how it is served."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from penstock.web.files import files
from tests.gateway.conftest import Gateway, serving
from tests.gateway.scripted_server import load_built_in_tokenizer

MAX_BYTES = 150_000
# What turns text into HTML or script, and addresses of other hosts, except the name of SVG's namespace.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|https?://(?!www\.w3\.org/2000/svg)\w"
)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    gateway: Gateway
    with serving(load_built_in_tokenizer()) as gateway, gateway.http() as http:
        yield http


def test_it_is_small_and_loads_nothing_from_elsewhere() -> None:
    assert sum(len(file.content) for file in files().values()) <= MAX_BYTES
    for name, file in files().items():
        assert not FORBIDDEN.findall(file.content.decode()), name


def test_every_file_is_there_under_a_strict_policy(http: httpx.Client) -> None:
    pages = {"index.html": "/", "docs.html": "/docs"}
    wanted = {name for file in files().values() for name in re.findall(r'from "\./([\w.-]+)"', file.content.decode())}
    for name, path in pages.items():
        page = http.get(path, headers={"accept": "text/html"})
        assert page.content == files()[name].content
        wanted |= {*re.findall(r'"/web/([\w.-]+)"', page.text)}
    assert wanted | pages.keys() == files().keys()
    for name in wanted:
        response = http.get(f"/web/{name}")
        assert response.content == files()[name].content
        policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
        assert (policy["default-src"], policy["script-src"], policy["style-src"]) == ("'none'", "'self'", "'self'")
        assert policy["require-trusted-types-for"] == "'script'"
        assert response.headers["x-content-type-options"] == "nosniff"
        same = http.get(f"/web/{name}", headers={"if-none-match": response.headers["etag"]})
        assert (same.status_code, same.content) == (304, b"")


def test_programs_get_a_hint_and_unknown_files_are_not_found(http: httpx.Client) -> None:
    assert "POST /v1/chat/completions" in http.get("/").text
    assert http.get("/web/..%2Ffiles.py").status_code == 404
    assert http.get("/web/other.js").json()["error"]["code"] == "unknown_file"
