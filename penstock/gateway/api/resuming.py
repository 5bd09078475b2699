"""Go on with the choices of a request where an earlier attempt, in a process that is gone, has left them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.core.output_journal import OutputJournal
from penstock.core.request import SamplingParams, choice_seed
from penstock.gateway.api.context import Context


@dataclass(frozen=True, slots=True)
class Resumed:
    """One choice: its seed, the same in every attempt, the tokens it has, and what keeps further ones."""

    seed: Callable[[int], int]
    output: list[int]
    note: Callable[[list[int]], None] | None


def resume(journal: OutputJournal, context: Context, params: SamplingParams, index: int) -> Resumed:
    """Log-probabilities are not kept, and some engines cannot go on from output: those choices begin anew. So do those
    of an adapter whose name means another one by now."""
    info, adapter = context.model.engine.info, context.adapter

    def seed(number: int) -> int:
        return choice_seed(params.seed, number) if params.seed is not None else choice_seed(journal.seed, index)

    if not info.continues or params.logprobs is not None or params.prompt_logprobs is not None:
        return Resumed(seed, [], None)
    computed_by = f"{info.model}@{info.revision}" + (f"+{adapter.adapter.digest}" if adapter is not None else "")
    stream = f"{computed_by}:{index}"
    return Resumed(seed, journal.output(stream), lambda token_ids: journal.add(stream, token_ids))
