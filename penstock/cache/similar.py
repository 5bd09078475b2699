"""Semantic matching: finds the stored answer of the nearest prompt in the same bucket.

Everything happens on one thread beside the event loop: encoding takes milliseconds, and one thread needs no locks.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

FIRST_ROWS = 8
NEGATIONS = frozenset(["no", "not", "never", "none", "nothing", "nobody", "nor", "neither", "without", "cannot"])

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


class Encoder(Protocol):
    def encode(self, text: str) -> Array | None:
        """A unit vector; None if the text cannot be judged."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prompt lies, to remember its answer there, and the nearest answer if one is near enough."""

    bucket: bytes
    text: str
    vector: Array
    nearest: bytes | None = None  # the key of an answer
    score: float = 0.0


class SimilarPrompts:
    def __init__(self, encoder: Encoder, threshold: float, max_prompts: int) -> None:
        self._encoder = encoder
        self._threshold = threshold
        self._max_prompts = max_prompts
        self._buckets: OrderedDict[bytes, _Bucket] = OrderedDict()  # least recently used first
        self._count = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="similar-prompts")

    def __len__(self) -> int:
        return self._count

    async def place(self, bucket: bytes, text: str) -> Place | None:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._place, bucket, text)

    def remember(self, place: Place, key: bytes) -> None:
        """Remember that `key` holds the answer to the prompt at this place."""
        self._thread.submit(self._remember, place, key)

    def forget(self, place: Place) -> None:
        """Forget the prompt whose answer, `place.nearest`, is gone."""
        self._thread.submit(self._forget, place)

    def clear(self) -> None:
        self._thread.submit(self._clear)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _place(self, name: bytes, text: str) -> Place | None:
        vector = self._encoder.encode(text)
        if vector is None:
            return None
        bucket = self._buckets.get(name)
        if bucket is not None:
            self._buckets.move_to_end(name)
            for key, known, score in bucket.near(vector, self._threshold):
                if may_mean_the_same(text, known):
                    return Place(name, text, vector, key, score)
        return Place(name, text, vector)

    def _remember(self, place: Place, key: bytes) -> None:
        bucket = self._buckets.setdefault(place.bucket, _Bucket(len(place.vector)))
        self._buckets.move_to_end(place.bucket)
        self._count -= len(bucket)
        bucket.put(key, place.text, place.vector)
        self._count += len(bucket)
        while self._count > self._max_prompts:
            name, oldest = next(iter(self._buckets.items()))
            self._drop(name, oldest.oldest)

    def _forget(self, place: Place) -> None:
        if place.nearest is not None and place.bucket in self._buckets:
            self._drop(place.bucket, place.nearest)

    def _clear(self) -> None:
        self._buckets.clear()
        self._count = 0

    def _drop(self, name: bytes, key: bytes) -> None:
        bucket = self._buckets[name]
        self._count -= bucket.drop(key)
        if not len(bucket):
            del self._buckets[name]


def may_mean_the_same(one: str, other: str) -> bool:
    """What an encoder is blind to: other numbers, a "not", and who does what to whom (the order of shared words)."""
    ones, others = _WORD.findall(one.casefold()), _WORD.findall(other.casefold())
    shared = set(ones) & set(others)
    return (
        _numbers(ones) == _numbers(others)
        and _negations(ones) == _negations(others)
        and [word for word in ones if word in shared] == [word for word in others if word in shared]
    )


def _numbers(words: list[str]) -> list[str]:
    return [word for word in words if any(character.isdigit() for character in word)]


def _negations(words: list[str]) -> int:
    return sum(word in NEGATIONS or word.endswith("n't") for word in words)


class _Bucket:
    """Vectors of one bucket, as the first rows of one matrix."""

    def __init__(self, width: int) -> None:
        self._row_of: OrderedDict[bytes, int] = OrderedDict()  # the oldest first
        self._rows: list[tuple[bytes, str]] = []
        self._matrix: Array = np.zeros((FIRST_ROWS, width), np.float32)

    def __len__(self) -> int:
        return len(self._rows)

    def near(self, vector: Array, threshold: float) -> Iterator[tuple[bytes, str, float]]:
        """Key, prompt and score of those at least so near, the nearest first."""
        scores = self._matrix[: len(self._rows)] @ vector
        rows = np.flatnonzero(scores >= threshold)
        for row in rows[np.argsort(-scores[rows])]:
            yield *self._rows[row], float(scores[row])

    def put(self, key: bytes, text: str, vector: Array) -> None:
        self.drop(key)
        row = len(self._rows)
        if row == len(self._matrix):
            self._matrix = np.concatenate([self._matrix, np.zeros_like(self._matrix)])
        self._matrix[row] = vector
        self._rows.append((key, text))
        self._row_of[key] = row

    def drop(self, key: bytes) -> bool:
        row = self._row_of.pop(key, None)
        if row is None:
            return False
        last = self._rows.pop()
        if row < len(self._rows):  # the last row fills the gap
            self._matrix[row] = self._matrix[len(self._rows)]
            self._rows[row] = last
            self._row_of[last[0]] = row
        return True

    @property
    def oldest(self) -> bytes:
        return next(iter(self._row_of))
