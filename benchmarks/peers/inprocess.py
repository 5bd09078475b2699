"""The runner's end of the pipes. Standard library only: it runs in the environments of the peers.

The first line out says that a token has been generated. After that, each line in is a run of a workload
(`prompts`, `output_lens`, `clients`) and the line out its `timelines` and `wall_s`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field


@dataclass
class Timeline:
    """In seconds on the clock of time.perf_counter; the fields of `penstock.bench.measure.Timeline`."""

    sent: float
    prompt_tokens: int
    output_tokens: int = 0
    token_times: list[float] = field(default_factory=list)
    finished: float = 0.0


Generate = Callable[[list[str], list[int], int], list[Timeline]]


def serve(load: Callable[[], Generate]) -> None:
    """Load the peer and run what comes in until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    generate = load()
    generate(["The penstock feeds the"], [2], 1)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        run = json.loads(line)
        start = time.perf_counter()
        timelines = generate(run["prompts"], run["output_lens"], run["clients"])
        wall_s = time.perf_counter() - start
        answer = {"timelines": [asdict(timeline) for timeline in timelines], "wall_s": wall_s}
        print(json.dumps(answer), file=answers, flush=True)
