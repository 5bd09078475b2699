from __future__ import annotations

import asyncio

from tests.queues.conftest import Queue

COUNT = 300


def test_more_answers_at_once_than_connections_are_no_lost_broker(redis_url: str) -> None:
    queue = Queue(redis_url)
    sender = queue._broker(queue.config.results)

    async def publish() -> None:
        await asyncio.gather(*(sender.publish("many", "x", [b"%d" % number]) for number in range(COUNT)))

    try:
        queue.run(publish)
        assert sorted(queue.take(COUNT, "many")) == [*range(COUNT)]  # type: ignore[type-var]
    finally:
        queue.close()
