"""An OpenAI-compatible server without a model, to measure gateways before it: `python -m peers.trivial_openai PORT`.

Answers at once, streamed or not, with as many chunks as `max_tokens` says, each written on its own.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

IDS = {"id": "chatcmpl-0", "created": 1, "model": "trivial"}


def event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    data = json.dumps({**IDS, "object": "chat.completion.chunk", "choices": [choice]}).encode()
    return chunk(b"data: %b\n\n" % data)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
FIRST = event({"role": "assistant", "content": " word"})
NEXT = event({"content": " word"})
LAST = event({}, "length") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def answer(tokens: int) -> bytes:
    message = {"role": "assistant", "content": " word" * tokens}
    usage = {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}
    choices = [{"index": 0, "message": message, "finish_reason": "length"}]
    body = json.dumps({**IDS, "object": "chat.completion", "choices": choices, "usage": usage}).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
            body = json.loads(await reader.readexactly(length) or b"{}")
            tokens = body.get("max_tokens") or 1
            if not body.get("stream"):
                writer.write(answer(tokens))
                continue
            writer.write(STREAM_HEAD + FIRST)
            for _ in range(tokens - 1):
                await asyncio.sleep(0)
                writer.write(NEXT)
            writer.write(LAST)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main(port: int) -> None:
    server = await asyncio.start_server(converse, "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
