"""A worker without a model, to measure the gateway before it: `python -m peers.trivial_worker SOCKET`.

It speaks the worker's protocol and behaves like an engine of no cost: every step gives each running request one token,
in one frame, and steps follow each other as fast as the gateway takes them.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass

import uvloop

from penstock.core.engine import EngineInfo, EngineStats
from penstock.core.ledger import Ledger, PrefillChunk
from penstock.core.request import Chunk, GenerateRequest
from penstock.worker.protocol import BEAT_SECONDS, Abort, Beat, Chunks, Hello, decode_to_worker, frame, read_frame

VOCAB_SIZE = 49_152  # of the built-in tokenizer, which the gateway runs with
FIRST_TOKEN = 1_000


@dataclass(slots=True)
class Running:
    request: GenerateRequest
    arrived: float
    sent: int = 0


async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    running: dict[str, Running] = {}
    work = asyncio.Event()
    tasks = [asyncio.create_task(step(writer, running, work)), asyncio.create_task(beat(writer))]
    writer.write(frame(Hello(EngineInfo("trivial", 8192, VOCAB_SIZE))))
    try:
        while True:
            message = decode_to_worker(await read_frame(reader))
            if isinstance(message, Abort):
                running.pop(message.request_id, None)
            else:
                running[message.request.id] = Running(message.request, time.monotonic())
                work.set()
    except asyncio.IncompleteReadError:
        for task in tasks:
            task.cancel()


async def step(writer: asyncio.StreamWriter, running: dict[str, Running], work: asyncio.Event) -> None:
    while True:
        await work.wait()
        chunks = [advance(one) for one in running.values()]
        for chunk in chunks:
            if chunk.finish_reason is not None:
                del running[chunk.request_id]
        if not running:
            work.clear()
        writer.write(frame(Chunks(chunks)))
        await writer.drain()
        await asyncio.sleep(0)


def advance(one: Running) -> Chunk:
    one.sent += 1
    chunk = Chunk(one.request.id, [FIRST_TOKEN + one.sent % 100])
    if one.sent == one.request.params.max_tokens:
        seconds = time.monotonic() - one.arrived
        chunk.finish_reason = "length"
        chunk.ledger = Ledger(
            one.request.id,
            one.request.tenant,
            one.request.objective.name,
            total=seconds,
            prefill=[PrefillChunk(len(one.request.prompt), seconds)],
            output_tokens=one.sent,
        )
    return chunk


async def beat(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(frame(Beat(EngineStats(kv_blocks=1000))))
        await asyncio.sleep(BEAT_SECONDS)


async def main(path: str) -> None:
    server = await asyncio.start_unix_server(converse, path)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
