"""Requests from Redis Streams, RabbitMQ or Kafka, and their answers back (docs/queues.md)."""
