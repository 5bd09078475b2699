from __future__ import annotations

from pathlib import Path

from penstock.queues.answers import AnswerStore


async def test_only_deaths_without_a_new_token_count_against_a_request(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    await store.open()
    begun = [(await store.begin("a")).begun for _ in range(3)]
    await store.keep_journals({"a": b"a token"})
    begun.append((await store.begin("a")).begun)
    assert begun == [0, 1, 2, 1]
    await store.close()
