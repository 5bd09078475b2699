"""How long an answer takes that the model need not compute: from memory, Redis, disk, or of a similar prompt.

    python benchmarks/answer_cache.py

Starts `penstock serve` with the built-in model (and a Redis server, if one is installed) on this machine, one client,
keep-alive connections, 64-token answers. Prints p50 and p99 in milliseconds, end to end over HTTP.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from penstock.client.http import HttpClient

REQUESTS = 1000
QUESTION = "How do I water a lemon tree in winter?"
REWORDED = "How should I water a lemon tree in winter?"


@contextmanager
def serving(settings: dict[str, Any]) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "penstock.yaml"
        settings = {"engine": {"kv_memory_gib": 0.5}, "server": {"port": 0, "log_level": "warning"}, **settings}
        file.write_text(json.dumps(settings))  # JSON is YAML
        command = [sys.executable, "-u", "-m", "penstock.cli.main", "serve", "--config", str(file)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            yield next(found[0] for line in process.stdout if (found := re.search(r"http://[\w.:]+", line)))
        finally:
            process.terminate()
            process.wait()


@contextmanager
def redis() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    process = subprocess.Popen(["redis-server", "--port", port, "--save", ""], stdout=subprocess.DEVNULL)
    try:
        time.sleep(0.5)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()


def body(text: str, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "smollm2-135m", "messages": messages, "temperature": 0, "max_tokens": 64, "stream": stream}


def measure(url: str, name: str, text: str, expected: str, requests: int = REQUESTS) -> None:
    # Blocking, because an event loop in the client would cost as much as the server does.
    http = HTTPConnection(url.removeprefix("http://"))

    def ask(text: str, stream: bool) -> str:
        http.request(
            "POST", "/v1/chat/completions", json.dumps(body(text, stream)), {"Content-Type": "application/json"}
        )
        answer = http.getresponse()
        answer.read()
        return answer.headers["x-penstock-cache"]

    ask(QUESTION, False)
    for stream in (False, True):
        seconds: list[float] = []
        for _ in range(requests):
            began = time.perf_counter()
            state = ask(text, stream)
            seconds.append(time.perf_counter() - began)
            assert state.startswith(expected), state
        seconds.sort()
        p50, p99 = (1000 * seconds[int(share * requests)] for share in (0.5, 0.99))
        print(f"| {name} | {'streamed' if stream else 'whole'} | {p50:.2f} | {p99:.2f} |", flush=True)


async def together(url: str) -> None:
    """A hundred clients ask the same at once."""
    async with HttpClient(url) as http:
        began = time.perf_counter()
        asked = [http.post("/v1/chat/completions", body("What is a penstock?", True)) for _ in range(100)]
        states = [answer.headers["x-penstock-cache"].split(";")[0] for answer in await asyncio.gather(*asked)]
        counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
        print(f"\n100 identical streams at once: {counts}; {time.perf_counter() - began:.2f} s until all had 64 tokens")


def main() -> None:
    print("| answered from | response | p50, ms | p99, ms |\n|---|---|---|---|")
    with serving({}) as url:
        measure(url, "memory", QUESTION, "hit; tier=memory")
    if shutil.which("redis-server"):
        with redis() as state, serving({"state": state, "cache": {"memory_mib": 0}}) as url:
            measure(url, "Redis", QUESTION, "hit; tier=redis")
    with tempfile.TemporaryDirectory() as folder:
        disk = {"memory_mib": 0, "disk_mib": 64, "disk_path": f"{folder}/answers.sqlite"}
        with serving({"cache": disk}) as url:
            measure(url, "disk", QUESTION, "hit; tier=disk")
    with serving({"cache": {"semantic": {"routes": ["/v1/chat/completions"]}}}) as url:
        measure(url, "a similar prompt", REWORDED, "semantic", 100)
    with serving({}) as url:
        asyncio.run(together(url))


if __name__ == "__main__":
    main()
