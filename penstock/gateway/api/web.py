"""The web page at /, and the page of the API at /docs. Programs that do not ask for HTML get a hint in text at /."""

from __future__ import annotations

from penstock.core.errors import NotFound
from penstock.gateway.http.request import Header, Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.tenants import Tenant
from penstock.web.files import DOCS, PAGE, File, files

HINT = b"""Penstock serves the OpenAI API: POST /v1/chat/completions, POST /v1/completions, GET /v1/models.
Vectors of texts: POST /v1/embeddings, POST /v1/rerank, POST /v1/score.
Also POST /tokenize, POST /detokenize, GET /health, GET /ready, GET /version, GET /metrics.
Other APIs: POST /v1/responses, POST /v1/messages. All of them: GET /openapi.json, in a browser /docs.
A browser gets a page here: chat, what the engine does now, and administration.
"""

# Nothing but this server's own files is loaded, nothing inline is run, and no text can become HTML or script.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS: list[Header] = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),  # kept by the browser, but asked for again: after an upgrade no file is stale
]


class WebEndpoints:
    async def page(self, request: Request, response: Response, tenant: Tenant) -> None:
        if b"text/html" in request.headers.get(b"accept", b""):
            await _send(request, response, files()[PAGE])
        else:
            await response.send(200, HINT, (b"content-type", b"text/plain; charset=utf-8"), (b"vary", b"accept"))

    async def docs(self, request: Request, response: Response, tenant: Tenant) -> None:
        await _send(request, response, files()[DOCS])

    async def file(self, request: Request, response: Response, tenant: Tenant) -> None:
        found = files().get(request.path_params["name"])
        if found is None:
            raise NotFound("the web page has no such file", param="name", code="unknown_file")
        await _send(request, response, found)


async def _send(request: Request, response: Response, file: File) -> None:
    headers = [*_HEADERS, (b"etag", file.etag), (b"vary", b"accept")]
    if request.headers.get(b"if-none-match") == file.etag:
        await response.send(304, b"", *headers)
    else:
        await response.send(200, file.content, (b"content-type", file.media), *headers)
