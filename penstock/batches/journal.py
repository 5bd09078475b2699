"""The tokens that a line has been given so far. Kept with the line, so that another process goes on from there.

Sampling is a function of seed and position: with the line's seed and these tokens any engine of the same model and
revision continues as the lost one would have.
"""

from __future__ import annotations

from array import array

import msgspec


class LineJournal:
    """By the name of a stream: which model, which revision, which choice."""

    __slots__ = ("_outputs", "changed", "seed")

    def __init__(self, seed: int, kept: bytes = b"") -> None:
        self.seed = seed
        self.changed = False  # since it was last packed
        self._outputs: dict[str, array[int]] = {}
        if kept:
            self._outputs = {name: array("i", packed) for name, packed in msgspec.msgpack.decode(kept).items()}

    def output(self, stream: str) -> list[int]:
        found = self._outputs.get(stream)
        return [] if found is None else found.tolist()

    def add(self, stream: str, token_ids: list[int]) -> None:
        if token_ids:
            self._outputs.setdefault(stream, array("i")).extend(token_ids)
            self.changed = True

    def packed(self) -> bytes:
        self.changed = False
        return msgspec.msgpack.encode({name: output.tobytes() for name, output in self._outputs.items()})
