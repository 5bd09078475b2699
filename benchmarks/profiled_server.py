"""Where the time of a server's steps goes, with random weights: it is started, kept busy over HTTP, and profiled.

    python benchmarks/profiled_server.py --model qwen3-0.6b [--streams 32] [--prompt 512] [--seconds 3] [--output FILE]

Prints what `penstock profile` prints, then the kernels that take the most time by their own names, how much of them is
in no part of the table, and what the profile cost: output tokens a second before it, and while it was taken.
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
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.bench.architectures import ARCHITECTURES, write_architecture
from penstock.client.http import HttpClient

OUTPUT = 256  # tokens of each answer
TOP = 15


def write_model(name: str, folder: Path, tokenizer_json: Path | None = None) -> Path:
    """Its configuration, and a tokenizer. Tokens that the given one lacks have no meaning, nor do any where none is."""
    path = write_architecture(name, folder)
    if tokenizer_json is None:
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(sorted(alphabet))}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        described = json.loads(tokenizer.to_str())
    else:
        described = json.loads(tokenizer_json.read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary.update({f"t{i}": i for i in range(len(vocabulary), ARCHITECTURES[name]["vocab_size"])})
    (path / "tokenizer.json").write_text(json.dumps(described))
    return path


@contextmanager
def served(model: str, tokenizer_json: Path | None = None) -> Iterator[str]:
    """A server with random weights of this architecture, at this address."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(model, Path(folder) / model, tokenizer_json)
        command = [sys.executable, "-m", "penstock.cli.main", "serve", f"dummy:{path}", "--port", "0"]
        server = subprocess.Popen([*command, "--state", "memory"], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            yield next(found[0] for line in server.stdout if (found := re.search(r"http://[\w.:]+", line)))
        finally:
            server.terminate()
            server.wait()


class Load:
    """Streams that follow each other without a pause."""

    def __init__(self, http: HttpClient, model: str, prompt: int, seed: int) -> None:
        self._http, self._model, self._prompt = http, model, prompt
        self._random = random.Random(seed)
        self.chunks = 0

    async def keep_busy(self) -> None:
        while True:
            body = {
                "model": self._model,
                "prompt": [self._random.randrange(1000) for _ in range(self._prompt)],
                "max_tokens": self._random.randrange(OUTPUT // 2, OUTPUT),
                "ignore_eos": True,
                "stream": True,
            }
            async with self._http.stream("POST", "/v1/completions", body) as response:
                if response.status != 200:
                    raise RuntimeError(await response.read_error())
                async for _ in response.events():
                    self.chunks += 1


async def measure(url: str, args: argparse.Namespace) -> None:
    async with HttpClient(url, timeout=600) as http:
        load = Load(http, args.model, args.prompt, args.seed)
        streams = [asyncio.create_task(load.keep_busy()) for _ in range(args.streams)]
        await asyncio.sleep(args.seconds)  # until all of them decode
        before = await rate(load, asyncio.sleep(args.seconds))
        command = [sys.executable, "-m", "penstock.cli.main", "profile", "--url", url, "--output", str(args.output)]
        profile = await asyncio.create_subprocess_exec(*command, "--seconds", str(args.seconds))
        during = await rate(load, profile.wait())
        for stream in streams:
            stream.cancel()
        for failure in await asyncio.gather(*streams, return_exceptions=True):
            if isinstance(failure, Exception):
                raise failure
    print(f"\n{before:.0f} chunks/s before, {during:.0f} while it was profiled, with the start and end of that")
    if profile.returncode == 0:
        print_kernels(json.loads(args.output.read_text()))


async def rate(load: Load, until: Any) -> float:
    began, chunks = time.monotonic(), load.chunks
    await until
    return (load.chunks - chunks) / (time.monotonic() - began)


def print_kernels(trace: dict[str, Any]) -> None:
    seconds: Counter[str] = Counter()
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernels":
            seconds[re.sub(r" \d+$", "", event["name"])] += event["dur"] / 1e6  # without the number of a layer
    total = sum(seconds.values())
    for name, spent in seconds.most_common(TOP):
        print(f"{spent / total:6.1%}  {spent * 1e3:9.2f} ms  {name[:100]}")
    for replica in trace["summary"]["replicas"]:
        other = [part["share"] for part in replica["kernels"] if part["name"] == "other"]
        print(f"{replica['replica']}: {sum(other):.1%} of a step is in kernels that belong to no part")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(ARCHITECTURES))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--output", type=Path, default=Path("trace.json"))
    args = parser.parse_args()
    with served(args.model) as url:
        asyncio.run(measure(url, args))


if __name__ == "__main__":
    main()
