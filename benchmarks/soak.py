"""Everything at once for as long as you like: what fails, what grows, and what becomes slower.

    python benchmarks/soak.py --minutes 15

Starts a server with a chat model, a small KV cache and an encoder, and keeps it busy with clients of every kind:
streams, n, logprobs, JSON by schema, tools, Responses and Messages, embeddings, batches, answers nobody reads to their
end, prompts near the context limit, and requests that must be refused. Prints a line a minute; at the end the latency
of every kind in the first and in the last third, and the memory of every process. Exits with 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from embedding_flood import percentile, words

SETTINGS = """
server: {{port: {port}, log_level: warning}}
models:
  chat: {{model: smollm2-135m, engine: {{kv_memory_gib: 0.3}}}}
  minilm: {{model: all-minilm-l6-v2}}
state: sqlite:///{folder}/state.db
batches: {{folder: {folder}/batches}}
"""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "tags": {"enum": ["a", "b"]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TOOL = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}},
}


class Failed(Exception):
    pass


class Client:
    """Sends one request of a kind, and says what is wrong with its answer."""

    def __init__(self, http: httpx.AsyncClient, seed: int) -> None:
        self.http = http
        self.draw = random.Random(seed)

    async def post(self, path: str, body: dict[str, Any], status: int = 200) -> Any:
        response = await self.http.post(path, json=body)
        if response.status_code == 429:
            return None
        if response.status_code != status:
            raise Failed(f"{path}: {response.status_code} {response.text[:200]}")
        return response.json()

    def chat(self, count: int = 40, **options: Any) -> dict[str, Any]:
        message = {"role": "user", "content": words(self.draw, count)}
        return {"model": "chat", "messages": [message], "max_tokens": 24, **options}

    async def stream(self) -> None:
        async with self.http.stream("POST", "/v1/chat/completions", json=self.chat(stream=True)) as response:
            lines = [line async for line in response.aiter_lines() if line]
        if response.status_code == 200 and lines[-1] != "data: [DONE]":
            raise Failed(f"a stream ended with {lines[-1]}")

    async def left(self) -> None:
        body = self.chat(stream=True, max_tokens=400, ignore_eos=True)
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_lines():
                if self.draw.random() < 0.2:
                    return

    async def several(self) -> None:
        answer = await self.post("/v1/chat/completions", self.chat(n=2, logprobs=True, top_logprobs=3, temperature=1.0))
        if answer and len(answer["choices"]) != 2:
            raise Failed("n=2 gave another number of choices")

    async def schema(self) -> None:
        wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
        answer = await self.post("/v1/chat/completions", self.chat(response_format=wanted, max_tokens=80))
        if answer and answer["choices"][0]["finish_reason"] == "stop":
            person = json.loads(answer["choices"][0]["message"]["content"])
            if set(person) != set(SCHEMA["required"]):
                raise Failed(f"not by the schema: {person}")

    async def tool(self) -> None:
        tools = [{"type": "function", "function": TOOL}]
        answer = await self.post("/v1/chat/completions", self.chat(tools=tools, tool_choice="required", max_tokens=60))
        if answer and answer["choices"][0]["finish_reason"] == "tool_calls":
            json.loads(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])

    async def responses(self) -> None:
        body = {"model": "chat", "input": words(self.draw, 20), "max_output_tokens": 16}
        if first := await self.post("/v1/responses", body):
            await self.post("/v1/responses", {**body, "previous_response_id": first["id"]})

    async def messages(self) -> None:
        await self.post("/v1/messages", self.chat(20, max_tokens=16))

    async def long(self) -> None:
        await self.post("/v1/chat/completions", self.chat(self.draw.randrange(1500, 4500), max_tokens=4))

    async def embeddings(self) -> None:
        texts = [words(self.draw, 30) for _ in range(16)]
        answer = await self.post("/v1/embeddings", {"model": "minilm", "input": texts})
        if answer and len(answer["data"]) != 16:
            raise Failed("16 texts gave another number of vectors")

    async def refused(self) -> None:
        field, value = self.draw.choice(
            [("temprature", 1), ("max_tokens", -1), ("n", 0), ("messages", []), ("top_p", 7)]
        )
        await self.post("/v1/chat/completions", {**self.chat(), field: value}, status=400)

    async def batch(self) -> None:
        path = "/v1/chat/completions"
        lines = [{"custom_id": str(i), "method": "POST", "url": path, "body": self.chat()} for i in range(20)]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        uploaded = await self.http.post("/v1/files", files={"file": ("b.jsonl", content)}, data={"purpose": "batch"})
        wanted = {"input_file_id": uploaded.json()["id"], "endpoint": path, "completion_window": "24h"}
        made = await self.post("/v1/batches", wanted)
        while made["status"] not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.5)
            made = (await self.http.get(f"/v1/batches/{made['id']}")).json()
        if made["request_counts"] != {"total": 20, "completed": 20, "failed": 0}:
            raise Failed(f"a batch ended as {made['status']} with {made['request_counts']}")


KINDS: dict[str, tuple[float, Callable[[Client], Awaitable[None]]]] = {  # how often, relative to each other
    "stream": (6, Client.stream),
    "left": (2, Client.left),
    "several": (2, Client.several),
    "schema": (3, Client.schema),
    "tool": (2, Client.tool),
    "responses": (1, Client.responses),
    "messages": (1, Client.messages),
    "long": (0.3, Client.long),
    "embeddings": (3, Client.embeddings),
    "refused": (2, Client.refused),
    "batch": (0.1, Client.batch),
}


class Soak:
    def __init__(self) -> None:
        self.began = time.monotonic()
        self.seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)  # by kind: when, how long
        self.failures: Counter[str] = Counter()

    async def keep_busy(self, client: Client, until: float) -> None:
        while (sent := time.monotonic()) < until:
            (kind,) = client.draw.choices([*KINDS], [share for share, _ in KINDS.values()])
            try:
                await KINDS[kind][1](client)
            except (Failed, httpx.HTTPError, ValueError, KeyError) as error:
                self.failures[f"{kind}: {error!r}"[:300]] += 1
            self.seconds[kind].append((sent - self.began, time.monotonic() - sent))
            await asyncio.sleep(client.draw.expovariate(4.0))

    async def watch(self, http: httpx.AsyncClient, server: int, until: float) -> None:
        while time.monotonic() < until:
            await asyncio.sleep(min(60.0, until - time.monotonic()))
            metrics = (await http.get("/metrics")).text
            errors = re.findall(r'penstock_step_time_error\{[^}]*model="(\w+)"[^}]*\} (\S+)', metrics)
            print(
                f"{(time.monotonic() - self.began) / 60:5.1f} min",
                f"{sum(map(len, self.seconds.values()))} requests, {sum(self.failures.values())} failed;",
                "step-time error " + ", ".join(f"{model} {float(value):.1%}" for model, value in errors) + ";",
                "MiB " + ", ".join(f"{name} {size}" for name, size in memory(server).items()),
                flush=True,
            )

    def report(self, seconds: float) -> None:
        for kind, values in sorted(self.seconds.items()):
            first = [took for at, took in values if at < seconds / 3]
            last = [took for at, took in values if at > seconds * 2 / 3]
            row = [f"{percentile(part, q) * 1e3:8.0f}" for part in (first, last) for q in (0.5, 0.99)]
            print(
                f"{kind:<12} {len(values):6} requests; p50, p99 ms at first {row[0]}{row[1]}, at last{row[2]}{row[3]}"
            )
        for failure, count in self.failures.most_common():
            print(f"{count} times {failure}")


def memory(server: int) -> dict[str, int]:
    """Resident MiB of the server's processes."""
    sizes = {"gateway": _resident(server)}
    for task in Path(f"/proc/{server}/task").glob("*"):
        for child in (task / "children").read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            sizes[f"{command[2] if len(command) > 2 else command[0]} {child}"] = _resident(int(child))
    return sizes


def _resident(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) // 1024 if found else 0


async def run(args: argparse.Namespace, server: int) -> int:
    url = f"http://127.0.0.1:{args.port}"
    limits = httpx.Limits(max_connections=200, max_keepalive_connections=200)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        while True:
            try:
                if (await http.get("/ready")).status_code == 200:
                    break
            except httpx.TransportError:
                await asyncio.sleep(0.2)
        soak, until = Soak(), time.monotonic() + args.minutes * 60
        clients = [soak.keep_busy(Client(http, args.seed + number), until) for number in range(args.clients)]
        await asyncio.gather(soak.watch(http, server, until), *clients)
    soak.report(args.minutes * 60)
    return 1 if soak.failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8475)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as name:
        config = Path(name) / "settings.yaml"
        config.write_text(SETTINGS.format(port=args.port, folder=name))
        command = [sys.executable, "-m", "penstock.cli.main", "serve", "--config", str(config)]
        process = subprocess.Popen(command)
        try:
            return asyncio.run(run(args, process.pid))
        finally:
            process.terminate()
            process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
