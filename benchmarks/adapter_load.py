"""How long a LoRA adapter takes from being loaded over HTTP to its first token, and what other streams notice of it.

    PYTHONPATH=. python benchmarks/adapter_load.py --adapters 20

A server of the built-in model serves random adapters. One after the other is loaded, then asked for one token twice,
with prompts of the same length that no cache knows: the first time the worker reads and packs it, the second time it
lies in its slot. Beside that streams without an adapter run, whose inter-token latencies around first requests are
compared with those around second ones.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.checkpoint.source import BUILT_IN, resolve
from penstock.client.http import HttpClient
from penstock.lora.fit import projections
from penstock.models.config import read_config
from tests.lora.peft_folder import write_adapter

SETTINGS = (
    "{{adapter_folder: {folder}, cache: {{enabled: false}}, engine: {{kv_memory_gib: 0.2, max_model_len: 4096}}}}"
)
KINDS = tuple(f"{kind}_proj" for kind in ("q", "k", "v", "o", "gate", "up", "down"))


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    config = folder / "settings.yaml"
    config.write_text(SETTINGS.format(folder=folder))
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "--port", "0", "--config", str(config)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert server.stdout is not None
    try:
        yield next(found[0] for line in server.stdout if (found := re.search(r"http://[\w.:]+", line)))
    finally:
        server.terminate()
        server.wait()


async def asked(http: HttpClient, model: str, number: int) -> float:
    """Seconds until the answer of one token."""
    body = {"model": model, "prompt": f"{number:06d} ships came into the harbour", "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    response = await http.post("/v1/completions", body)
    assert response.status == 200, response.error_message
    return time.perf_counter() - began


async def keep_streaming(http: HttpClient, number: int, gaps: list[tuple[float, float]]) -> None:
    """Appends when each token came and how long after the one before."""
    while True:
        body = {"model": BUILT_IN, "prompt": f"Story {number}:", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", body, {}) as response:
            last = None
            async for _ in response.events():
                now = time.perf_counter()
                if last is not None:
                    gaps.append((now, now - last))
                last = now


async def measure(url: str, adapters: int, streams: int) -> dict[str, list[float]]:
    """Milliseconds."""
    found: dict[str, list[float]] = {}
    gaps: list[tuple[float, float]] = []

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(1000 * seconds)

    async with HttpClient(url, timeout=300) as http, HttpClient(url, timeout=300) as others:
        running = [asyncio.create_task(keep_streaming(others, number, gaps)) for number in range(streams)]
        for number in range(3):
            await asked(http, BUILT_IN, number)
        for adapter in range(adapters):
            name, began = f"loaded-{adapter}", time.perf_counter()
            response = await http.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(adapter)})
            assert response.status == 200, response.error_message
            note("load", time.perf_counter() - began)
            for which in ("first", "second"):
                await asyncio.sleep(0.3)
                began = time.perf_counter()
                note(f"{which} token", await asked(http, name, 1000 + 2 * adapter + (which == "second")))
                await asyncio.sleep(0.3)
                near = [gap for at, gap in gaps if began < at]
                if near:
                    note(f"longest ITL of others at the {which} token", max(near))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=20)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=0, help="without an adapter, meanwhile (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = projections(read_config(resolve(BUILT_IN)))
        for number in range(args.adapters):
            write_adapter(Path(scratch) / str(number), base, args.seed * 1000 + number, args.rank, 0.06, KINDS)
        with serving(Path(scratch)) as url:
            found = asyncio.run(measure(url, args.adapters, args.streams))
    for name, values in found.items():
        print(f"{name}: median {statistics.median(values):.1f} ms, least {min(values):.1f} ms")


if __name__ == "__main__":
    main()
