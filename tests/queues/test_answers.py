from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from penstock.core.errors import InvalidRequest
from penstock.queues.answers import AnswerStore
from penstock.queues.requests import read_request


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
