"""The broker that a URL names. Its client is imported here, since it may not be installed."""

from __future__ import annotations

from penstock.queues.broker import Broker
from penstock.queues.settings import ConsumeConfig


def make_broker(config: ConsumeConfig) -> Broker:
    if config.kind == "redis":
        from penstock.queues.redis_streams import RedisStreams

        return RedisStreams(config)
    if config.kind == "rabbitmq":
        from penstock.queues.rabbitmq import RabbitMQ

        return RabbitMQ(config)
    from penstock.queues.kafka import Kafka

    return Kafka(config)
