"""A gateway that only copies bytes: `python -m peers.bare_relay PORT UPSTREAM_PORT`.

What it adds to the time to the first token is what this machine takes for two more hops between processes.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop


class Side(asyncio.Protocol):
    transport: asyncio.Transport
    other: Side | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are not derived from it

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


class Accepted(Side):
    upstream_port = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.early = b""  # what came before the upstream was there
        self.connecting = asyncio.get_running_loop().create_task(self.connect())

    def data_received(self, data: bytes) -> None:
        self.early += data if self.other is None else b""
        super().data_received(data)

    async def connect(self) -> None:
        _, other = await asyncio.get_running_loop().create_connection(Side, "127.0.0.1", self.upstream_port)
        other.transport.write(self.early)
        self.other, other.other = other, self


async def main(port: int, upstream_port: int) -> None:
    Accepted.upstream_port = upstream_port
    server = await asyncio.get_running_loop().create_server(Accepted, "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2])))
