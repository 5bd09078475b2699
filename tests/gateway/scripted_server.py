"""A gateway before a scripted engine, as a program that can be sent signals."""

from __future__ import annotations

import asyncio
import sys

from penstock.checkpoint.source import BUILT_IN, resolve
from penstock.gateway.api.models import ServedModel
from penstock.gateway.app import create_app
from penstock.gateway.http.listener import bind
from penstock.gateway.http.server import serve
from penstock.settings import Settings
from penstock.simulation.scripted_engine import MODEL, ScriptedEngine
from penstock.text.tokenizer import Tokenizer, load_tokenizer


def load_built_in_tokenizer() -> Tokenizer:
    return load_tokenizer(resolve(BUILT_IN))


def main(drain_seconds: float) -> int:
    """Each answer is one token, then waits for a line on stdin, then goes on to its end. Prints the port."""
    tokenizer = load_built_in_tokenizer()
    first, second = tokenizer.encode("before after", add_special_tokens=False)[:2]

    async def wait_for_line() -> None:
        line = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin, line.set)
        await line.wait()

    engine = ScriptedEngine(tokenizer, lambda request: [[first], wait_for_line, [second], [tokenizer.eos_ids[0]]])
    app = create_app([ServedModel([MODEL], tokenizer, engine)], Settings())
    return asyncio.run(serve(app, bind("127.0.0.1", 0), lambda host, port: print(port, flush=True), drain_seconds))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
