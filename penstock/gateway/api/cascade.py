"""A small model answers first; the large one does where that is not sure of its answer or cannot give one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from penstock.core.errors import EngineFailure, InvalidRequest, Overloaded, Unavailable
from penstock.gateway.api.generation import Answer, Generation
from penstock.gateway.api.trial import Escalated, Outcome


class CascadedAnswer:
    """Nothing has been sent when the large model takes over. What the small one computed is then not charged."""

    def __init__(
        self, small: Answer, large: Callable[[str], Awaitable[Answer]], count: Callable[[Outcome], None]
    ) -> None:
        """`large` is called with the reason."""
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
            outcome, why = unsure.outcome, unsure.message
        except InvalidRequest as error:  # by an engine that cannot do what others can, such as an upstream
            if not tried.discarded:
                raise
            outcome, why = "skipped", cannot_take(error)
        except (Unavailable, Overloaded, EngineFailure) as error:
            if not tried.discarded:
                raise
            outcome, why = "failed", f"the small model failed: {error.message}"
        self._count(outcome)
        attempt = tried.attempt(why)
        self._answer = await self._large(why)
        self.generation.attempts.append(attempt)
        await self._answer.respond()


def cannot_take(error: InvalidRequest) -> str:
    """Why the large model is asked where the small one refuses. That may have room for it, or refuses it in its own
    words."""
    return f"the small model cannot take it: {error.message}"
