"""Adapters in a worker's host memory: read once, dropped by age, and never another one than was asked for."""

from __future__ import annotations

import gc
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.core.errors import InvalidRequest
from penstock.core.request import Adapter
from penstock.engine.executor import AdapterWeights
from penstock.lora import host_memory
from penstock.lora.checkpoint import adapter_digest, read_adapter
from penstock.lora.host_memory import HostAdapters
from tests.lora.peft_folder import BASE, write_adapter


@pytest.fixture
def adapters(tmp_path: Path) -> list[Adapter]:
    folders = [write_adapter(tmp_path / str(seed), BASE, seed) for seed in range(4)]
    return [Adapter(adapter_digest(folder), str(folder)) for folder in folders]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that are read, in order."""
    found: list[str] = []

    def read(folder: str) -> AdapterWeights:
        found.append(Path(folder).name)
        return read_adapter(folder)

    monkeypatch.setattr(host_memory, "read_adapter", read)
    return found


def test_the_least_recently_used_are_dropped(adapters: list[Adapter], reads: list[str]) -> None:
    one = read_adapter(adapters[0].folder).nbytes
    memory = HostAdapters(BASE, 8, max_bytes=2 * one)
    for number in (0, 1, 0, 2, 0, 1):
        assert memory.get(adapters[number]).digest == adapters[number].digest
        gc.collect()
    assert reads == ["0", "1", "2", "1"]


def test_one_that_is_used_is_not_read_again(adapters: list[Adapter], reads: list[str]) -> None:
    memory = HostAdapters(BASE, 8, max_bytes=1)
    used = memory.get(adapters[0])
    memory.get(adapters[1])
    assert memory.get(adapters[0]) is used
    assert reads == ["0", "1"]


def test_threads_that_want_the_same_read_it_once(adapters: list[Adapter], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that want another one meanwhile do not wait."""
    begun, go_on = threading.Event(), threading.Event()
    reads: list[str] = []

    def read(folder: str) -> AdapterWeights:
        reads.append(folder)
        if folder == adapters[0].folder:
            begun.set()
            assert go_on.wait(60)
        return read_adapter(folder)

    monkeypatch.setattr(host_memory, "read_adapter", read)
    memory = HostAdapters(BASE, 8, max_bytes=2**30)
    with ThreadPoolExecutor(8) as pool:
        same = [pool.submit(memory.get, adapters[0]) for _ in range(6)]
        assert begun.wait(60)
        assert pool.submit(memory.get, adapters[1]).result(60).digest == adapters[1].digest
        go_on.set()
        assert len({id(each.result(60)) for each in same}) == 1
    assert reads == [adapters[0].folder, adapters[1].folder]


def test_a_folder_with_another_content_is_refused(adapters: list[Adapter]) -> None:
    memory = HostAdapters(BASE, 8, max_bytes=2**30)
    held = memory.get(adapters[0])
    for adapter in adapters[:2]:
        write_adapter(Path(adapter.folder), BASE, seed=9)
    assert memory.get(adapters[0]) is held
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="another content than when") as caught:
            memory.get(adapters[1])
        assert caught.value.code == "adapter_changed"
    shutil.rmtree(adapters[2].folder)
    with pytest.raises(InvalidRequest, match=r"cannot read .*adapter_config.json"):
        memory.get(adapters[2])
    with pytest.raises(InvalidRequest, match=r"rank is 4 .*supported: up to 2"):
        HostAdapters(BASE, 2, max_bytes=2**30).get(adapters[3])
