"""Kill the consumer of a queue at random moments; every request must be answered, and repeats must be identical.

    python -m benchmarks.queue_chaos redis --kills 50 --messages 1000
    python -m benchmarks.queue_chaos rabbitmq
    python -m benchmarks.queue_chaos kafka

Starts a broker (redis-server, rabbitmq-server of Debian, or the mock cluster inside librdkafka) and `penstock consume`,
which is killed (SIGKILL) and started again while it works. Every request has its seed and the cache of answers is off.
Says how long it took from a kill to the next answer, most of which is the start of the consumer, and how many answers
came in a second between first answer and next kill. Gives up when no answer has come for ten minutes. Exits with 1 if a
request has no answer, or two answers to one id have different texts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.queues.broker import Broker
from penstock.queues.open import make_broker
from penstock.queues.settings import ConsumeConfig
from tests.rabbitmq_server import RabbitServer
from tests.redis_server import RedisServer

MODEL = "smollm2-135m"
GIVE_UP_SECONDS = 600  # without a new answer
SETTINGS = """
server: {{port: 0, log_level: warning}}
engine: {{kv_memory_gib: 0.2, max_model_len: 1024}}
cache: {{enabled: false}}
state: sqlite:///{folder}/state.db
batches: {{folder: {folder}/batches}}
consume: {{url: "{url}", lease_seconds: 3}}
"""


@contextmanager
def broker_url(kind: str, folder: Path) -> Iterator[str]:
    if kind == "kafka":
        import confluent_kafka

        cluster = confluent_kafka.Producer({"bootstrap.servers": "", "test.mock.num.brokers": 1})
        (broker,) = cluster.list_topics(timeout=20).brokers.values()
        yield f"kafka://{broker.host}:{broker.port}"
        return
    server = RedisServer() if kind == "redis" else RabbitServer(folder)
    try:
        yield server.url
    finally:
        server.stop()


def request(number: int, chance: random.Random) -> bytes:
    """Most are short; one in fifty is long enough to be killed in the middle."""
    tokens = 200 if number % 50 == 49 else chance.randint(1, 8)
    text = f"Question {number}: what is {chance.randrange(1000)} plus {chance.randrange(1000)}?"
    body = {"model": MODEL, "prompt": text, "max_tokens": tokens, "temperature": 0.8, "ignore_eos": True}
    return json.dumps({"custom_id": f"m{number}", "url": "/v1/completions", "body": body}).encode()


class Consumer:
    def __init__(self, folder: Path, url: str) -> None:
        self._config = folder / "settings.yaml"
        self._config.write_text(SETTINGS.format(folder=folder, url=url))
        self._log = (folder / "server.log").open("a+")
        self.start()

    def last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:]

    def start(self) -> None:
        command = [sys.executable, "-m", "penstock.cli.main", "consume", MODEL, "--config", str(self._config)]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.start()


@dataclass
class Life:
    """Of a consumer, from its start to its end."""

    began: float
    known: int  # answers before
    first: float | None = None  # when it gave its first answer
    latest: float | None = None
    answers: int = 0

    def goes_on(self, known: int) -> bool:
        """Takes note of the answers so far. False: none came for too long."""
        now = time.monotonic()
        if known - self.known > self.answers:
            self.answers = known - self.known
            self.first, self.latest = self.first or now, now
        return now - (self.latest or self.began) < GIVE_UP_SECONDS

    @property
    def waited(self) -> float:
        return (self.first or time.monotonic()) - self.began

    @property
    def worked(self) -> float:
        return 0.0 if self.first is None or self.latest is None else self.latest - self.first


async def read(broker: Broker, answers: dict[str, list[str]]) -> None:
    while True:
        for message in await broker.receive(200):
            answer = json.loads(message.payload)
            body = answer["response"]["body"]
            answers[answer["custom_id"]].append(body["choices"][0]["text"] if "choices" in body else json.dumps(body))
            await broker.acknowledge(message)


async def read_dead_letters(broker: Broker, letters: list[str]) -> None:
    while True:
        for message in await broker.receive(200):
            letters.append(message.payload.decode())
            await broker.acknowledge(message)


async def run(args: argparse.Namespace, folder: Path, url: str) -> dict[str, Any]:
    chance = random.Random(args.seed)
    config = ConsumeConfig(url)
    reader = make_broker(ConsumeConfig(url, config.results, config.requests, config.dead_letters, group="reader"))
    await reader.open()
    await reader.publish(config.requests, "", [request(number, chance) for number in range(args.messages)])
    undertaker = make_broker(ConsumeConfig(url, config.dead_letters, "unused", "unused too", group="reader"))
    await undertaker.open()
    answers: dict[str, list[str]] = defaultdict(list)
    dead: list[str] = []
    reading = asyncio.gather(read(reader, answers), read_dead_letters(undertaker, dead))
    consumer = Consumer(folder, url)
    kills, began, last = 0, time.monotonic(), 0
    lives = [Life(began, 0)]
    try:
        while len(answers) + len(dead) < args.messages and lives[-1].goes_on(len(answers)) and not reading.done():
            if consumer.process.poll() is not None:
                raise SystemExit(f"the consumer ended by itself: {consumer.last_words()}")
            if kills == args.kills:
                await asyncio.sleep(0.02)
                continue
            # At a moment when it has answered something since the last kill, so that each meets a consumer at work.
            share = args.messages * (kills + 1) // (args.kills + 5)
            if len(answers) >= share or (len(answers) > last and chance.random() < 0.02):
                await asyncio.sleep(chance.uniform(0, 0.3))
                last, kills = len(answers), kills + 1
                lives[-1].goes_on(last)
                consumer.kill()
                lives.append(Life(time.monotonic(), last))
                print(f"{kills}: {last} answered", file=sys.stderr)
            await asyncio.sleep(0.02)
        await asyncio.sleep(5)  # for repeats
    finally:
        consumer.process.terminate()
        consumer.process.wait(60)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
    return {
        "broker": args.broker,
        "kills": kills,
        "messages": args.messages,
        "unanswered": args.messages - len(answers),
        "dead letters": len(dead),
        "repeated": sum(len(texts) - 1 for texts in answers.values()),
        "repeated with another text": sum(len(set(texts)) > 1 for texts in answers.values()),
        "seconds": round(time.monotonic() - began),
        "seconds to the first answer": {
            "median": round(statistics.median(life.waited for life in lives), 1),
            "most": round(max(life.waited for life in lives), 1),
        },
        "answers per second afterwards": round(
            sum(life.answers for life in lives) / max(1e-9, sum(life.worked for life in lives)), 1
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("broker", choices=("redis", "rabbitmq", "kafka"))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--messages", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    args = parser.parse_args()
    print(f"seed {args.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="penstock-queue-") as name:
        folder = Path(name)
        with broker_url(args.broker, folder) as url:
            result = asyncio.run(run(args, folder, url))
    print(json.dumps(result))
    return 1 if result["unanswered"] or result["repeated with another text"] else 0


if __name__ == "__main__":
    sys.exit(main())
