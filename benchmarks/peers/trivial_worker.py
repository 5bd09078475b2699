"""A worker without a model, to measure the gateway before it: `python -m peers.trivial_worker ADDRESS`.

The address is the path of a Unix socket or, for gateways that have the secret of the environment, tcp://HOST:PORT.

It speaks the worker's protocol and behaves like an engine of no cost: every step gives each running request one token,
in one frame, and steps follow each other as fast as the gateway takes them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import cast

import uvloop

from penstock.core.engine import EngineInfo, EngineStats
from penstock.core.ledger import Ledger, PrefillChunk
from penstock.core.request import Chunk, GenerateRequest
from penstock.worker.protocol import (
    HEARTBEAT_SECONDS,
    Abort,
    Chunks,
    Heartbeat,
    Hello,
    Submit,
    decode_to_worker,
    frame,
    take_frames,
)
from penstock.worker.remote import SECRET, prove_as_worker

VOCAB_SIZE = 49_152  # of the built-in tokenizer, which the gateway runs with
FIRST_TOKEN = 1_000


@dataclass(slots=True)
class Running:
    request: GenerateRequest
    arrived: float
    sent: int = 0


class Client(asyncio.Protocol):
    """One gateway's connection."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.received = bytearray()
        self.running: dict[str, Running] = {}
        self.loop = asyncio.get_running_loop()
        self.stepping = False
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(frame(Hello(EngineInfo("trivial", 8192, VOCAB_SIZE), EngineStats())))
        self.beat()

    def beat(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(frame(Heartbeat(EngineStats(kv_blocks=1000))))
            self.loop.call_later(HEARTBEAT_SECONDS, self.beat)

    def data_received(self, data: bytes) -> None:
        for body in take_frames(self.received, data):
            message = decode_to_worker(body)
            if isinstance(message, Abort):
                self.running.pop(message.request_id, None)
            elif isinstance(message, Submit):
                self.running[message.request.id] = Running(message.request, time.monotonic())
        if not self.stepping:
            self.step()

    def step(self) -> None:
        self.stepping = bool(self.running) and not self.paused
        if self.stepping:
            chunks = [advance(one) for one in self.running.values()]
            for chunk in chunks:
                if chunk.finish_reason is not None:
                    del self.running[chunk.request_id]
            self.transport.write(frame(Chunks(chunks)))
            self.loop.call_soon(self.step)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if not self.stepping:
            self.step()


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


async def main(address: str) -> None:
    if address.startswith("tcp://"):
        await serve_tcp(address.removeprefix("tcp://"))
    else:
        server = await asyncio.get_running_loop().create_unix_server(Client, address)
        print("ready", flush=True)
        await server.serve_forever()


async def serve_tcp(address: str) -> None:
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))) as listener:
        listener.setblocking(False)
        print("ready", flush=True)
        while True:
            connection, _ = await loop.sock_accept(listener)
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await prove_as_worker(connection, os.environ[SECRET])
            await loop.create_connection(Client, sock=connection)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
