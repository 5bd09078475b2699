"""A server for the tests of those that work off lines and messages: it serves one model, to everybody."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.errors import PenstockError


class ServesOne:
    """All of `runner.Answers` but `answer`."""

    draining = False

    def __init__(self, model: str) -> None:
        self._model = model

    async def served(self) -> Sequence[Sequence[str]]:
        return [[self._model]]

    def models(self, tenant: str, served: Sequence[Sequence[str]]) -> Sequence[str]:
        return [self._model]

    async def groups(self) -> Sequence[Sequence[str]]:
        return [[self._model]]

    def refusal(self, model: str) -> PenstockError | None:
        return None

    def room(self, group: Sequence[str], running: int, most: int) -> int:
        return most - running
