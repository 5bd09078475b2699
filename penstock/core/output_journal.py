"""What is kept of the output of a request that outlives the process which answers it."""

from __future__ import annotations

from typing import Protocol


class OutputJournal(Protocol):
    """Streams are named by whoever generates them; with the same seed and output a stream goes on as it would have."""

    @property
    def seed(self) -> int: ...

    def output(self, stream: str) -> list[int]:
        """The tokens of a stream that earlier attempts have given."""
        ...

    def add(self, stream: str, token_ids: list[int]) -> None: ...
