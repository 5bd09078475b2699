from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from penstock.core.errors import InvalidRequest
from penstock.queues.answers import AnswerStore
from penstock.queues.requests import read_request
from penstock.queues.settings import ConsumeConfig


async def test_only_deaths_without_a_new_token_count_against_a_request(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    await store.open()
    begun = [(await store.begin("a")).begun for _ in range(3)]
    await store.keep_journals({"a": b"a token"})
    begun.append((await store.begin("a")).begun)
    assert begun == [0, 1, 2, 1]
    await store.close()


@pytest.mark.parametrize(("given", "taken"), [("true", False), ("1", False), ("false", True), ("null", True)])
def test_answers_are_not_to_be_fetched_later(given: str, taken: bool) -> None:
    payload = b'{"custom_id": "a", "url": "/v1/responses", "body": {"background": %b}}' % given.encode()
    with nullcontext() if taken else pytest.raises(InvalidRequest, match="background must be left out"):
        read_request(payload, ["/v1/responses"], stream=False)


SCOPES = [
    ConsumeConfig("redis://10.0.0.1/0"),
    ConsumeConfig("redis://10.0.0.1/1"),
    ConsumeConfig("redis://10.0.0.1:6380/0"),
    ConsumeConfig("redis://10.0.0.2/0"),
    ConsumeConfig("redis://10.0.0.1/0", tenant="acme"),
    ConsumeConfig("redis://10.0.0.1/0", group="others"),
    ConsumeConfig("redis://10.0.0.1/0", requests="others"),
    ConsumeConfig("unix:///run/redis.sock"),
    ConsumeConfig("unix:///run/redis.sock?db=1"),
    ConsumeConfig("amqp://10.0.0.1/"),
    ConsumeConfig("amqp://10.0.0.1/blue"),
    ConsumeConfig("kafka://10.0.0.1:9092,10.0.0.2:9092"),
]


def test_an_id_is_one_of_its_broker_queue_group_and_tenant() -> None:
    assert len({config.scope for config in SCOPES}) == len(SCOPES)


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("redis://10.0.0.1", "redis://:changed@10.0.0.1:6379/?db=0"),
        ("amqp://10.0.0.1", "amqp://guest:changed@10.0.0.1:5672/"),
        ("kafka://a:9092,b", "kafka://B:9092,a:9092/"),
    ],
)
def test_a_password_and_defaults_make_no_other_queue(url: str, same: str) -> None:
    assert ConsumeConfig(url).scope == ConsumeConfig(same).scope
    assert "changed" not in ConsumeConfig(same).scope
