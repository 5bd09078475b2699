"""Reading and writing files of packed weights."""

from __future__ import annotations

import os
from pathlib import Path


def read_into(piece: memoryview, fd: int, offset: int) -> None:
    """Fill the memory from the file, as far as the file goes."""
    while piece and (count := os.preadv(fd, [piece], offset)):
        piece, offset = piece[count:], offset + count


def remove_leftovers(path: Path) -> None:
    """Remove the partial files of processes that were killed while they wrote this file."""
    for partial in path.parent.glob(f"{path.name}.*.partial"):
        try:
            os.kill(int(partial.name.split(".")[-2]), 0)
        except ProcessLookupError:
            partial.unlink(missing_ok=True)
        except PermissionError:
            pass  # it lives, as another user's


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step
