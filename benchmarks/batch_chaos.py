"""Kill the server, its workers and its helpers at random moments while batches run; every line must come out once.

    python -m benchmarks.batch_chaos --kills 100 --lines 500
    python -m benchmarks.batch_chaos --state redis://127.0.0.1:6379/0 --gateways 2   # that share the batches

Starts `penstock serve` with a state of its own, runs one batch in peace for the texts to expect, then the same batch
over and over while processes are killed (SIGKILL): the gateway, or one of the processes that it has started. A gateway
that was killed is started again. Every line has its seed, so every batch must give the same texts; the cache of
answers is off. Exits with 1 if a line is missing, there twice, or has another text.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

MODEL = "smollm2-135m"
START_SECONDS = 300
OVER = ("completed", "failed", "expired", "cancelled")
SETTINGS = """
server: {{port: {port}, log_level: warning}}
engine: {{kv_memory_gib: 0.2, max_model_len: 1024}}
cache: {{enabled: false}}
state: {state}
batches: {{folder: {folder}}}
"""


class Server:
    """`penstock serve`, which is killed and started again."""

    def __init__(self, folder: Path, port: int, state: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._config = folder / f"settings-{port}.yaml"
        self._config.write_text(SETTINGS.format(port=port, folder=folder / "batches", state=state))
        self._log = (folder / "server.log").open("a")
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "serve", MODEL, "--config", str(self._config)],
            stdout=self._log,
            stderr=self._log,
        )

    def victims(self) -> list[tuple[str, int]]:
        """The gateway, and the processes that it has started."""
        found = [("gateway", self.process.pid)]
        for task in Path(f"/proc/{self.process.pid}/task").glob("*"):
            for child in (task / "children").read_text().split():
                words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
                kind = next((name for name in ("worker", "reader", "batches") if name in " ".join(words)), "other")
                found.append((kind, int(child)))
        return found

    def kill(self, chance: random.Random) -> str:
        try:
            kind, pid = chance.choice(self.victims())
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
            return "gone"
        if kind == "gateway":
            self.process.wait()
            self.start()
        return kind

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


class AnyServer(httpx.HTTPTransport):
    """Sends each request to one of several servers."""

    def __init__(self, servers: Sequence[Server]) -> None:
        super().__init__()
        self._urls = [httpx.URL(server.url) for server in servers]

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(port=random.choice(self._urls).port)
        return super().handle_request(request)


def ask(client: httpx.Client, method: str, path: str, **options: Any) -> httpx.Response:
    """Until it is answered: the server may be down, and the connection may end at any moment."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            response = client.request(method, path, **options)
            if response.status_code < 500:
                response.raise_for_status()
                return response
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise SystemExit(f"{method} {path} was not answered within {START_SECONDS} s")
        time.sleep(0.1)


def lines(count: int, chance: random.Random) -> bytes:
    """Most are short; one in fifty is long enough to be killed in the middle."""
    made = []
    for number in range(count):
        tokens = 300 if number % 50 == 49 else chance.randint(1, 8)
        text = f"Question {number}: what is {chance.randrange(1000)} plus {chance.randrange(1000)}?"
        body = {"model": MODEL, "prompt": text, "max_tokens": tokens, "temperature": 0.8, "seed": number}
        body["ignore_eos"] = True
        made.append({"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body})
    return "".join(json.dumps(each) + "\n" for each in made).encode()


def submit(client: httpx.Client, content: bytes) -> str:
    file = ask(client, "POST", "/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"}).json()
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return str(ask(client, "POST", "/v1/batches", json=wanted).json()["id"])


def answers(client: httpx.Client, batch: dict[str, Any]) -> dict[str, str]:
    """Texts by custom_id. Exits if one is missing or there twice."""
    if batch["status"] != "completed" or batch["error_file_id"] is not None:
        raise SystemExit(f"the batch went wrong: {batch}")
    content = ask(client, "GET", f"/v1/files/{batch['output_file_id']}/content").text
    found = [json.loads(text) for text in content.splitlines()]
    seen = Counter(each["custom_id"] for each in found)
    if len(seen) != batch["request_counts"]["total"] or max(seen.values()) > 1:
        raise SystemExit(f"{len(seen)} lines of {batch['request_counts']}, most often: {seen.most_common(3)}")
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in found}


def run(kills: int, count: int, seed: int, ports: Sequence[int], state: str | None) -> dict[str, Any]:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as name:
        folder = Path(name)
        servers = [Server(folder, port, state or f"sqlite:///{folder}/state.db") for port in ports]
        killed: Counter[str] = Counter()
        batches = differing = 0
        began = time.monotonic()
        try:
            with httpx.Client(base_url=servers[0].url, timeout=30, transport=AnyServer(servers)) as client:
                content = lines(count, chance)
                expected: dict[str, str] | None = None
                while expected is None or sum(killed.values()) < kills:
                    id = submit(client, content)
                    while (batch := ask(client, "GET", f"/v1/batches/{id}").json())["status"] not in OVER:
                        time.sleep(0.1 if expected is None else chance.uniform(0.1, 6.0))
                        if expected is not None and sum(killed.values()) < kills:
                            kind = chance.choice(servers).kill(chance)
                            killed[kind] += kind != "gone"
                            print(f"{sum(killed.values())}: {kind} {batch['request_counts']}", file=sys.stderr)
                    texts = answers(client, batch)
                    expected = expected or texts
                    differing += sum(texts[custom_id] != text for custom_id, text in expected.items())
                    batches += 1
            for server in servers:
                server.stop()
        finally:
            for server in servers:
                server.process.kill()
    return {
        "kills": dict(killed),
        "batches": batches - 1,
        "lines": (batches - 1) * count,
        "lost": 0,
        "doubled": 0,
        "with another text": differing,
        "seconds": round(time.monotonic() - began),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--port", type=int, default=8473)
    parser.add_argument("--gateways", type=int, default=1, help="with ports from the given one on")
    parser.add_argument("--state", help="redis://HOST:PORT/DB; default: SQLite")
    args = parser.parse_args()
    print(f"seed {args.seed}", file=sys.stderr)
    if args.gateways > 1 and args.state is None:
        parser.error("several gateways need a Redis: --state redis://HOST:PORT/DB")
    ports = range(args.port, args.port + args.gateways)
    result = run(args.kills, args.lines, args.seed, ports, args.state)
    print(json.dumps(result))
    return 1 if result["with another text"] else 0


if __name__ == "__main__":
    sys.exit(main())
