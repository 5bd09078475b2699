"""Within what limits llguidance compiles a grammar, here and in the process where one is tried first.

It counts what it builds and gives up at a limit, but not all that it does on the way. Its recursion, which follows
chains of `$ref`, has a stack for the longest chain that fits into a source.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

STACK_BYTES = 256 * 2**20  # reserved, not used: a chain of 5,000 $ref, the longest that fits into a source, takes 14 MB
SHORT_SECONDS = 0.02  # ordinary grammars take 1 ms; what takes longer gives way to the threads that compute steps
LONG_NICENESS = 10

# Fuel is a unit of llguidance: about 50,000 a millisecond when compiling, 14,000 when computing a mask.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


def new_matcher(tokens: Any, source: str) -> Any:
    """At the beginning of an output, with its first mask computed; in error where the grammar is none."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokens, source, log_level=0, limits=LLParserLimits(**LIMITS))
    if not matcher.is_error() and not matcher.get_grammar_warnings():
        matcher.compute_bitmask()  # what goes wrong here would go wrong for every request
    return matcher


def on_deep_stack(work: Callable[[], T]) -> T:
    """Run on a thread that has a stack for the deepest recursion of the compiler."""
    outcome: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join(SHORT_SECONDS)
    if thread.is_alive() and sys.platform == "linux":
        with suppress(ProcessLookupError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, LONG_NICENESS)
    thread.join()
    made, error = outcome[0]
    if error is not None:
        raise error
    return made  # type: ignore[return-value]


_stack_size = threading.Lock()  # of threads that are started next: one setting for the process
