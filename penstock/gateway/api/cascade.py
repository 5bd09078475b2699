"""A small model answers first; the large one does where that is not sure of its answer or cannot give one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from penstock.core.errors import EngineFailure, Overloaded, Unavailable
from penstock.gateway.api.generation import Answer, Generation
from penstock.gateway.api.trial import Escalated


class CascadedAnswer:
    """Nothing has been sent when the large model takes over. What the small one computed is then not charged."""

    def __init__(
        self, small: Answer, large: Callable[[Escalated], Awaitable[Answer]], count: Callable[[str], None]
    ) -> None:
        self._answer = small
        self._large = large
        self._count = count

    @property
    def generation(self) -> Generation:
        return self._answer.generation

    async def respond(self) -> None:
        tried = self.generation
        try:
            await self._answer.respond()
            self._count("small")
            return
        except Escalated as unsure:
            escalated = unsure
        except (Unavailable, Overloaded, EngineFailure) as error:
            if not tried.discarded:
                raise
            escalated = Escalated("failed", f"the small model failed: {error.message}")
        self._count(escalated.outcome)
        attempt = tried.attempt(escalated.message)
        self._answer = await self._large(escalated)
        self.generation.attempts.append(attempt)
        await self._answer.respond()
