"""Requests for LoRA adapters by name, while the names are given to other adapters: is each answer the right one's?

    PYTHONPATH=. python benchmarks/adapter_swaps.py --requests 10000 --kills 3 --json swaps.json

A server of the built-in model, with several gateway processes and replicas, serves random adapters, more of them than
the engine has slots and than host memory is allowed to hold. First every adapter answers every prompt under a name of
its own. Then clients ask by shared names, half of them past the answer cache, while another client loads one adapter
after the other under these names, and for one name overwrites the weights in its folder before the load. Workers are
killed meanwhile.

An answer is right if it is that of an adapter which its name could mean while the request was under way: from the
moment that a load was sent until the next one was answered. No two adapters answer a prompt alike, so an answer tells
whose it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.bench.chaos.faults import Admin
from penstock.bench.report import describe_machine
from penstock.checkpoint.source import BUILT_IN, resolve
from penstock.client.http import HttpClient
from penstock.lora.fit import projections
from penstock.models.config import read_config
from tests.lora.peft_folder import write_adapter

SETTINGS = """
server: {{processes: {processes}, log_level: warning}}
replicas: {replicas}
adapter_folder: {folder}/adapters
engine: {{max_adapters: 4, adapter_memory_gib: {memory}, kv_memory_gib: 0.2, max_model_len: 512}}
"""
KINDS = tuple(f"{kind}_proj" for kind in ("q", "k", "v", "o", "gate", "up", "down"))
RANK, SIZE = 16, 0.06  # large enough that each adapter answers in another way
NAMES = ("red", "green", "blue", "rewritten")
REWRITTEN = "rewritten"  # the name whose folder gets other weights before each load
STORY = "The harbour master wrote down every ship that came in before the storm, with its name and what it carried. "
PROMPTS = tuple(f"{STORY}Number {number} was the" for number in range(4))
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Load:
    """An adapter given a name. Until the answer has come, the name may mean the one before or this one."""

    adapter: int
    sent: float
    answered: float


@dataclass(slots=True)
class Tally:
    answers: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    load_ms: list[float] = field(default_factory=list)
    kills: int = 0
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not (self.answers["wrong"] or self.answers["unknown"] or self.answers["failed"])


@contextmanager
def serving(folder: Path, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """A server's address and an admin key."""
    weights = next((folder / "adapters").glob(f"*/{WEIGHTS}")).stat().st_size
    memory = 1.5 * args.adapters / 4 * weights / 2**30  # so that some must be read again
    config, state = folder / "settings.yaml", f"sqlite:///{folder}/state.db"
    config.write_text(
        SETTINGS.format(processes=args.processes, replicas=args.replicas, folder=folder, memory=round(memory, 4))
    )
    penstock = [sys.executable, "-m", "penstock.cli.main"]
    create = [*penstock, "keys", "create", "--admin", "--state", state]
    key = subprocess.run(create, capture_output=True, text=True, check=True).stdout.strip()
    command = [*penstock, "serve", "--port", "0", "--config", str(config), "--state", state]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert server.stdout is not None
    try:
        yield next(found[0] for line in server.stdout if (found := re.search(r"http://[\w.:]+", line))), key
    finally:
        server.terminate()
        server.wait()


class Swaps:
    def __init__(self, http: HttpClient, admin: HttpClient, folder: Path, args: argparse.Namespace) -> None:
        self._http, self._admin, self._folder, self._args = http, admin, folder, args
        self._random = random.Random(args.seed)
        self._right: dict[tuple[int, str], str] = {}  # the answer of each adapter to each prompt
        self._loads: dict[str, list[Load]] = {name: [] for name in NAMES}
        self._kill_at = {args.requests * (number + 1) // (args.kills + 1) for number in range(args.kills)}
        self._killing: list[asyncio.Task[None]] = []
        self.tally = Tally()

    async def run(self) -> None:
        for adapter in range(self._args.adapters):
            await self._load(f"own-{adapter}", adapter)
            for prompt in PROMPTS:
                self._right[adapter, prompt] = await self._answer(f"own-{adapter}", prompt, cached=False)
        for prompt in PROMPTS:
            answers = {self._right[adapter, prompt] for adapter in range(self._args.adapters)}
            assert len(answers) == self._args.adapters, "two adapters answer alike: choose another seed"
        for name in NAMES:
            await self._swap(name)
        began = time.perf_counter()
        left = iter(range(self._args.requests))
        swapping = asyncio.create_task(self._keep_swapping())
        await asyncio.gather(*(self._ask(left) for _ in range(self._args.clients)))
        self.tally.seconds = time.perf_counter() - began
        swapping.cancel()
        await asyncio.gather(swapping, *self._killing, return_exceptions=True)

    async def _ask(self, left: Iterator[int]) -> None:
        for _ in left:
            name, prompt = self._random.choice(NAMES), self._random.choice(PROMPTS)
            sent = time.perf_counter()
            try:
                answer = await self._answer(name, prompt, cached=self._random.random() < 0.5)
            except AnswerError as error:
                # Its folder has other weights by now, and no worker that was asked has the old ones in memory.
                changed = name == REWRITTEN and error.status == 400 and "content" in str(error)
                self.tally.answers["refused" if changed else "failed"] += 1
                if not changed:
                    self.tally.errors.append(str(error))
            else:
                self.tally.answers[self._judge(name, prompt, answer, sent)] += 1
            if self.tally.answers.total() in self._kill_at:
                self._killing.append(asyncio.create_task(self._kill()))

    def _judge(self, name: str, prompt: str, answer: str, sent: float) -> str:
        """Of an answer that has just come."""
        loads = self._loads[name]
        ends = [load.answered for load in loads[1:]]
        possible = {load.adapter for load, end in zip(loads, [*ends, float("inf")], strict=True) if end >= sent}
        if answer in {self._right[adapter, prompt] for adapter in possible}:
            return "right"
        known = any(answer == self._right[adapter, prompt] for adapter in range(self._args.adapters))
        self.tally.errors.append(f"{name}, {prompt[-15:]!r}: {answer!r}")
        return "wrong" if known else "unknown"

    async def _keep_swapping(self) -> None:
        while True:
            await self._swap(self._random.choice(NAMES))
            await asyncio.sleep(self._args.pause)

    async def _swap(self, name: str) -> None:
        """The name means another adapter once this returns, and may mean it from now on."""
        adapter, sent = self._random.randrange(self._args.adapters), time.perf_counter()
        pending = Load(adapter, sent, float("inf"))
        self._loads[name].append(pending)
        if name == REWRITTEN:
            folder = self._folder / "adapters" / REWRITTEN
            shutil.copyfile(self._folder / "adapters" / str(adapter) / WEIGHTS, folder / "new")
            os.replace(folder / "new", folder / WEIGHTS)
        await self._load(name, adapter)
        self._loads[name][-1] = Load(adapter, sent, time.perf_counter())

    async def _load(self, name: str, adapter: int) -> None:
        path, sent = REWRITTEN if name == REWRITTEN else str(adapter), time.perf_counter()
        response = await self._admin.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        assert response.status == 200, response.error_message
        self.tally.load_ms.append(1000 * (time.perf_counter() - sent))

    async def _answer(self, name: str, prompt: str, cached: bool) -> str:
        body: dict[str, Any] = {"model": name, "prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        headers = {} if cached else {"Cache-Control": "no-store"}
        async with self._http.stream("POST", "/v1/completions", body, headers) as response:
            if response.status != 200:
                raise AnswerError(response.status, await response.read_error())
            text: str = json.loads(await response.read())["choices"][0]["text"]
            return text

    async def _kill(self) -> None:
        """The worker with the most requests."""
        admin = Admin(self._admin, BUILT_IN)
        replicas = await admin.until_ready()
        await admin.inject("kill", max(replicas, key=lambda replica: replica["streams"])["id"], 0)
        self.tally.kills += 1


class AnswerError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


def write_adapters(folder: Path, count: int, seed: int) -> None:
    base = projections(read_config(resolve(BUILT_IN)))
    for number, name in enumerate([*map(str, range(count)), REWRITTEN]):
        write_adapter(folder / name, base, seed * 1000 + number, RANK, SIZE, KINDS)


async def measure(args: argparse.Namespace) -> Tally:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_adapters(folder / "adapters", args.adapters, args.seed)
        with serving(folder, args) as (url, key):
            async with HttpClient(url, timeout=300) as http, HttpClient(url, api_key=key, timeout=60) as admin:
                swaps = Swaps(http, admin, folder, args)
                await swaps.run()
                return swaps.tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default, meaning in (
        ("requests", 10_000, "in all"),
        ("clients", 32, "that send requests at the same time"),
        ("adapters", 12, "that names are given to"),
        ("processes", 2, "of the gateway"),
        ("replicas", 2, "workers"),
        ("kills", 0, "of workers meanwhile"),
        ("seed", 1, "of the weights, of the requests and of the swaps"),
    ):
        parser.add_argument(f"--{option}", type=int, default=default, help=f"{meaning} (%(default)s)")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two swaps (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    args = parser.parse_args()
    tally = asyncio.run(measure(args))
    for error in tally.errors[:10]:
        print(error, file=sys.stderr)
    counted = {kind: tally.answers[kind] for kind in ("right", "wrong", "unknown", "refused", "failed")}
    figures = {
        **counted,
        "swaps": len(tally.load_ms),
        "load_ms_median": round(statistics.median(tally.load_ms), 1),
        "kills": tally.kills,
        "seconds": round(tally.seconds, 1),
    }
    print(", ".join(f"{name} {value}" for name, value in figures.items()))
    if args.json:
        args.json.write_text(
            json.dumps({"machine": describe_machine(), **figures, "errors": tally.errors}, indent=2) + "\n"
        )
    return 0 if tally.passed else 1


if __name__ == "__main__":
    sys.exit(main())
