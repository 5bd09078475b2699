"""The least that an HTTP server in Python can do: `python -m peers.bare_asgi PORT`. No JSON, no upstream."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn

HEADERS = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"300")]}
BODY = {"type": "http.response.body", "body": b"x" * 300}


async def app(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["more_body"]:
        pass
    await send(HEADERS)
    await send(BODY)


if __name__ == "__main__":
    print("ready", flush=True)
    uvicorn.run(
        app, port=int(sys.argv[1]), http="httptools", loop="uvloop", lifespan="off", ws="none", log_level="warning"
    )
