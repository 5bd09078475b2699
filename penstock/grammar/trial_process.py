"""The process in which grammars are tried: `python -m penstock.grammar.trial_process`.

Reads a kind and a source a line, as JSON, and answers with what llguidance takes for it and what is wrong with that,
when it has been compiled. It ends when nobody will write any more, and is ended by the system where a grammar takes too
long (SIGPROF) or too much memory.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from functools import partial
from typing import Any

from penstock.grammar.limits import STACK_BYTES, new_matcher, on_deep_stack
from penstock.grammar.sources import llguidance_source
from penstock.grammar.trial import MAX_BYTES, MAX_SECONDS

OWN_BYTES = 512 * 2**20  # of address space, of Python and libraries; they use 20 MiB


def main() -> None:
    from llguidance import LLTokenizer

    for sig in (signal.SIGINT, signal.SIGHUP):  # a terminal's Ctrl-C and its end are for the server
        signal.signal(sig, signal.SIG_IGN)
    if hasattr(os, "sched_setaffinity"):  # the thread that started it may be one that computes, kept on one CPU
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    memory = OWN_BYTES + STACK_BYTES + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokens = LLTokenizer("byte")  # how long compiling takes does not depend on the vocabulary
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        answer = on_deep_stack(partial(_try, tokens, *json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def _try(tokens: Any, kind: str, source: str) -> tuple[str, str]:
    try:
        found = llguidance_source(kind, source)
    except ValueError as error:
        return "", str(error) or "is no grammar"
    with suppress(BaseException):  # a panic is one. It will come again, where somebody can be told
        new_matcher(tokens, found)
    return found, ""


if __name__ == "__main__":
    main()
