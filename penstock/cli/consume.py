"""`penstock consume`: a server that takes its requests from a queue, beside those over HTTP."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli.serve import add_arguments, read_values, serve_settings
from penstock.core.errors import StartupError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("consume", help="serve requests from Redis Streams, RabbitMQ or Kafka")
    add_arguments(parser)
    queue = parser.add_argument_group("queue")
    queue.add_argument("--from", dest="from_url", metavar="URL", help="redis://, amqp:// or kafka://HOST:PORT,...")
    queue.add_argument("--requests", metavar="NAME", help="stream, queue or topic (default penstock-requests)")
    queue.add_argument("--results", metavar="NAME", help="where answers go (default penstock-results)")
    queue.add_argument("--group", metavar="NAME", help="of consumers that share the requests (default penstock)")
    queue.add_argument("--answers", choices=("whole", "chunks"), help="default whole")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    values = read_values(args)
    given = {name: getattr(args, name) for name in ("requests", "results", "group", "answers")}
    given["url"] = args.from_url
    given = {name: value for name, value in given.items() if value is not None}
    values["consume"] = {**(values.get("consume") or {}), **given}
    if not values["consume"].get("url"):
        raise StartupError("penstock consume needs a queue: give --from URL, or consume.url in the settings")
    return serve_settings(values, args.on)
