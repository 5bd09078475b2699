"""One file, opened by several at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.batches.sqlite import SCHEMA
from penstock.batches.sqlite_file import connect


def test_a_new_file_is_opened_by_all_that_start_together(tmp_path: Path) -> None:
    together, processes = threading.Barrier(4), ThreadPoolExecutor(4)

    def start(path: Path) -> None:
        together.wait()
        connect(path, SCHEMA).close()

    for number in range(25):
        for started in [processes.submit(start, tmp_path / f"{number}.db") for _ in range(4)]:
            started.result()
    processes.shutdown()
