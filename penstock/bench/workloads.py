"""What to run: prompts and output lengths as a pure function of a seed, so that every engine is given the same work.

A workload is named on the command line; `slo_mix@10` is the open-loop one at ten arrivals a second. Prompts are random
token ids (so nothing is shared by chance between two seeds) and output lengths are fixed (so end-of-text is ignored).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.core.errors import InvalidRequest

Metric = Literal["ms_per_token", "decode_tok_s", "prompt_tok_s", "output_tok_s", "share_met"]

FIRST_ID = 100  # below lie the control tokens of most vocabularies
VOCAB = 100_000
SLO_MIX_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    """One request to be made. `arrival` is in seconds after the start; closed-loop workloads leave it at 0."""

    prompt: list[int]
    output_len: int
    arrival: float = 0.0
    kind: str = ""  # which objective applies, in slo_mix


class Source:
    """The seeded stream that a workload draws from. The order of the draws is part of the workload's definition."""

    def __init__(self, seed: int, vocab: int) -> None:
        self.random = random.Random(seed)
        self.vocab = vocab

    def ids(self, count: int) -> list[int]:
        draw, vocab = self.random.randrange, self.vocab
        return [draw(FIRST_ID, vocab) for _ in range(count)]

    def uniform(self, count: int, prompt_len: int, output_len: int) -> list[Job]:
        return [Job(self.ids(prompt_len), output_len) for _ in range(count)]

    def shared(self, count: int, prefix_len: int, own_len: int, output_len: int) -> list[Job]:
        prefix = self.ids(prefix_len)
        return [Job(prefix + self.ids(own_len), output_len) for _ in range(count)]

    def mixed(self, count: int, low: int, high: int) -> list[Job]:
        def one() -> Job:
            prompt = self.ids(self.random.randint(low, high))
            return Job(prompt, self.random.randint(low, high))

        return [one() for _ in range(count)]

    def slo_mix(self, rate: float, seconds: float, long_share: float = 0.05) -> list[Job]:
        """Poisson arrivals: mostly short chats with log-normal lengths, a few prompts of 12k to 16k tokens."""
        rng = self.random
        jobs: list[Job] = []
        now = rng.expovariate(rate)
        while now <= seconds:
            if rng.random() < long_share:
                kind, prompt_len, output_len = "long", rng.randint(12_000, 16_000), 64
            else:
                kind = "short"
                prompt_len = _clamp(rng.lognormvariate(5.4, 0.8), 16, 2048)
                output_len = _clamp(rng.lognormvariate(4.8, 0.6), 8, 512)
            jobs.append(Job(self.ids(prompt_len), output_len, now, kind))
            now += rng.expovariate(rate)
        return jobs


def _clamp(value: float, low: int, high: int) -> int:
    return max(low, min(high, int(value)))


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    about: str
    metric: Metric  # the figure its target is stated in
    generate: Callable[[Source], list[Job]]
    clients: int | None = None  # requests in flight; None: all of them at once
    open_loop: bool = False  # requests arrive at their time, whatever has finished

    def jobs(self, seed: int, vocab: int = VOCAB) -> list[Job]:
        return self.generate(Source(seed, vocab))

    def endless(self, seed: int, vocab: int = VOCAB) -> Iterator[Job]:
        """The jobs of this seed, then fresh ones of the same shape for ever."""
        rounds = random.Random(seed)
        while True:
            yield from self.jobs(seed, vocab)
            seed = rounds.getrandbits(48)


# name, what it is, the figure it is judged by, how its jobs are drawn, requests in flight (None: all at once)
_TABLE: list[tuple[str, str, Metric, Callable[[Source], list[Job]], int | None]] = [
    ("single", "1 x 128 in, 256 out", "ms_per_token", lambda s: s.uniform(1, 128, 256), None),
    ("batch32", "32 x 128 in, 256 out", "output_tok_s", lambda s: s.uniform(32, 128, 256), None),
    ("throughput", "1024 x 512 in, 256 out", "output_tok_s", lambda s: s.uniform(1024, 512, 256), None),
    ("mixed", "256 x 100-1024 in, 100-1024 out", "output_tok_s", lambda s: s.mixed(256, 100, 1024), None),
    ("prefix", "256 x (2048 shared + 64) in, 64 out", "output_tok_s", lambda s: s.shared(256, 2048, 64, 64), None),
    ("prefill", "64 x 4096 in, 1 out", "prompt_tok_s", lambda s: s.uniform(64, 4096, 1), None),
    ("cpu_single", "1 x 128 in, 128 out", "decode_tok_s", lambda s: s.uniform(1, 128, 128), None),
    ("cpu_prefill", "1 x 1024 in, 1 out", "prompt_tok_s", lambda s: s.uniform(1, 1024, 1), None),
    ("cpu_clients8", "8 clients, 16 x 128 in, 128 out", "output_tok_s", lambda s: s.uniform(16, 128, 128), 8),
    ("cpu_clients32", "32 clients, 64 x 128 in, 128 out", "output_tok_s", lambda s: s.uniform(64, 128, 128), 32),
    ("cpu_prefix", "32 x (768 shared + 32) in, 32 out", "output_tok_s", lambda s: s.shared(32, 768, 32, 32), None),
]
WORKLOADS = {row[0]: Workload(*row) for row in _TABLE}


def slo_mix_workload(rate: float, seconds: float = SLO_MIX_SECONDS) -> Workload:
    return Workload(
        name=f"slo_mix@{rate:g}",
        about=f"Poisson, {rate:g}/s for {seconds:g} s, 5% prompts of 12k-16k",
        metric="share_met",
        generate=lambda source: source.slo_mix(rate, seconds),
        open_loop=True,
    )


def find_workload(name: str) -> Workload:
    """A workload by its name on the command line; `slo_mix@RATE` carries its arrival rate."""
    base, _, rate = name.partition("@")
    if base == "slo_mix":
        try:
            value = float(rate)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise InvalidRequest("slo_mix needs arrivals per second, as in slo_mix@10", param="workload")
        return slo_mix_workload(value)
    if name not in WORKLOADS:
        known = ", ".join([*WORKLOADS, "slo_mix@RATE"])
        raise InvalidRequest(f"workload {name!r} is not known; known: {known}", param="workload")
    return WORKLOADS[name]


def uniform_workload(prompt_len: int, output_len: int, count: int, clients: int) -> Workload:
    about = f"{prompt_len} in, {output_len} out"
    return Workload("uniform", about, "output_tok_s", lambda s: s.uniform(count, prompt_len, output_len), clients)
