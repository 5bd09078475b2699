"""For how long one request can hold up everybody else's streams in the gateway.

    python benchmarks/gateway_stalls.py
    python benchmarks/gateway_stalls.py --max-model-len 131072

Starts a gateway with the built-in tokenizer before an engine that does nothing but send a token every 5 ms. While one
client reads such a stream, another sends requests that are as long or as strange as a body may be. Prints for each the
status, the time to the answer, the longest time for which the gateway's event loop did not run, and the longest gap in
the stream, which also has what the machine needs to run clients, gateway and reader at once. Needs an otherwise idle
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any

MODEL = "metronome"
TICK_SECONDS = 0.005
PROBE_SECONDS = 0.001
SETTLE_SECONDS = 0.2
MAX_BODY = 16 * 2**20 - 1024
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


# ---------------------------------------------------------------- the gateway, in a process of its own


async def serve_gateway(max_model_len: int) -> int:
    from penstock.checkpoint.source import BUILT_IN, resolve
    from penstock.core.engine import EngineInfo, EngineStats, Health
    from penstock.core.ledger import Ledger
    from penstock.core.request import Chunk, GenerateRequest, TokenLogprob
    from penstock.gateway.api.models import ServedModel
    from penstock.gateway.app import create_app
    from penstock.gateway.http.listener import bind
    from penstock.gateway.http.server import serve, tune_interpreter
    from penstock.settings import Settings
    from penstock.text.tokenizer import load_tokenizer

    class Metronome:
        """Never tires of one token."""

        def __init__(self, vocab_size: int) -> None:
            self.info = EngineInfo(MODEL, max_model_len, vocab_size)
            self.stats = EngineStats()

        def health(self) -> Health:
            return Health(True, "idle")

        async def submit(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
            params = request.params
            for number in range(1, (params.max_tokens or 1) + 1):
                chunk = Chunk(request.id, [100], "length" if number == params.max_tokens else None)
                if number == 1 and params.prompt_logprobs is not None:
                    top = tuple((token, -1.0) for token in range(params.prompt_logprobs))
                    chunk.prompt_logprobs = [None, *(TokenLogprob(token, -1.0, top) for token in request.prompt[1:])]
                yield chunk
                await asyncio.sleep(TICK_SECONDS)

        async def aborted(self, request_id: str) -> Ledger | None:
            return None

    tokenizer = load_tokenizer(resolve(BUILT_IN))
    app = create_app([ServedModel([MODEL], tokenizer, Metronome(tokenizer.vocab_size))], Settings())
    probe = Probe()

    def on_ready(host: str, port: int) -> None:
        print(port, flush=True)
        probe.start()

    tune_interpreter()
    return await serve(app, bind("127.0.0.1", 0), on_ready, 0.0)


@dataclass
class Probe:
    """Says for each line on standard input how long the event loop has been late at most since the last one."""

    worst: float = 0.0
    tasks: list[Any] = field(default_factory=list)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.tasks.append(loop.create_task(self._watch()))
        loop.add_reader(sys.stdin, self._report)

    async def _watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(PROBE_SECONDS)
            self.worst = max(self.worst, time.monotonic() - before - PROBE_SECONDS)

    def _report(self) -> None:
        if sys.stdin.readline():
            print(self.worst, flush=True)
            self.worst = 0.0


# ---------------------------------------------------------------- what is sent


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": content}], **fields}


def completion(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 2, "prompt": prompt, **fields}


def nested_arrays() -> bytes:
    arrays = ",".join(["[]"] * (MAX_BODY // 3 - 100))
    return f'{{"model": "{MODEL}", "messages": [], "chat_template_kwargs": {{"x": [{arrays}]}}}}'.encode()


def attacks(max_model_len: int) -> Iterator[tuple[str, str, Any]]:
    words = "The rain in Spain falls mainly on the plain, and 12 more words follow. "
    fits = max_model_len - 200
    yield "nothing, for comparison", CHAT, chat("Hi")
    yield "a chat of 10 kB", CHAT, chat(words * 140)
    yield "16 MB of digits", CHAT, chat("1" * (MAX_BODY - 200))
    yield "16 MB of spaces", TEXT, completion(" " * (MAX_BODY - 200))
    yield "0.8 MB of prose", CHAT, chat(words * 11_000)
    yield "100,000 tiny messages", CHAT, chat("") | {"messages": [{"role": "user", "content": "a"}] * 100_000}
    yield "15 MB of nested arrays", CHAT, nested_arrays()
    yield "a prompt of 5 million token ids", TEXT, completion([1] * 5_000_000)
    yield "a prompt of token ids that fits", TEXT, completion([100] * fits)
    yield "the same with n = 128", TEXT, completion([100] * fits, n=128)
    yield "1,024 prompts of 2,000 token ids", TEXT, completion([[100] * min(fits, 2000)] * 1024)
    yield "log-probabilities of a long prompt", TEXT, completion([100] * fits, echo=True, logprobs=20)
    yield "prompt_logprobs of a long prompt", CHAT, chat("rain " * (fits - 50), prompt_logprobs=20)
    yield "a million stop_token_ids", CHAT, chat("Hi", stop_token_ids=[5] * 1_000_000)
    yield "a logit_bias of 49,000 tokens", CHAT, chat("Hi", logit_bias={str(i): 1 for i in range(49_000)})
    yield "stop strings of 60 kB, n = 128", CHAT, chat("Hi", n=128, stop=["ab" * 1900] * 15)
    yield "/tokenize 4 MB", "/tokenize", {"prompt": words * 57_000}
    yield "/detokenize 2 million ids", "/detokenize", {"tokens": [100] * 2_000_000}


# ---------------------------------------------------------------- the clients


def read_stream(port: int, gaps: list[float], stop: threading.Event) -> None:
    connection = HTTPConnection("127.0.0.1", port)
    while not stop.is_set():
        body = json.dumps(chat("Hi", stream=True, max_tokens=500))
        connection.request("POST", CHAT, body, {"content-type": "application/json"})
        response = connection.getresponse()
        last = time.monotonic()
        while response.readline() and not stop.is_set():
            now = time.monotonic()
            gaps.append(now - last)
            last = now
        response.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--only", help="cases whose name has this in it")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            sys.exit(runner.run(serve_gateway(args.max_model_len)))
    command = [sys.executable, __file__, "--serve", "--max-model-len", str(args.max_model_len)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as gateway:  # type: ignore[call-overload]
        try:
            measure(args, gateway)
        finally:
            gateway.kill()


def measure(args: argparse.Namespace, gateway: Any) -> None:
    port = int(gateway.stdout.readline())

    def worst() -> float:
        gateway.stdin.write("\n")
        gateway.stdin.flush()
        return float(gateway.stdout.readline())

    gaps: list[float] = []
    stop = threading.Event()
    reader = threading.Thread(target=read_stream, args=(port, gaps, stop))
    reader.start()
    print(f"{'request':36} {'status':>6} {'answer ms':>9} {'loop stalled ms':>15} {'longest gap ms':>14}")
    try:
        for name, path, body in attacks(args.max_model_len):
            if args.only and args.only not in name:
                continue
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            gc.collect()  # not while the stream is measured
            time.sleep(SETTLE_SECONDS)
            gaps.clear()
            worst()
            connection = HTTPConnection("127.0.0.1", port)
            begun = time.monotonic()
            connection.request("POST", path, data, {"content-type": "application/json"})
            response = connection.getresponse()
            response.read()
            took = time.monotonic() - begun
            time.sleep(SETTLE_SECONDS)
            print(f"{name:36} {response.status:6} {took * 1e3:9.0f} {worst() * 1e3:15.1f} {max(gaps) * 1e3:14.1f}")
    finally:
        stop.set()
        reader.join()


if __name__ == "__main__":
    main()
