"""Workloads: prompts and output lengths as a pure function of a seed, so that every engine is given the same work.

Prompts are random token ids (so nothing is shared by chance between two seeds) and output lengths are fixed (so
end-of-text is ignored). Some outputs are given as well, for
speculative decoding. The open-loop mixes also have arrival times and objectives.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from penstock.bench.sampling import GREEDY, sampling_of
from penstock.core.errors import InvalidRequest
from penstock.core.request import Objective, SamplingParams

Metric = Literal["ms_per_token", "decode_tok_s", "prompt_tok_s", "output_tok_s", "share_met"]

FIRST_ID = 100  # below lie the control tokens of most vocabularies
VOCAB = 100_000


@dataclass(frozen=True, slots=True)
class Job:
    """One request to be made. `arrival` is in seconds after the start; closed-loop workloads leave it at 0."""

    prompt: list[int]
    output_len: int
    arrival: float = 0.0
    kind: str = ""  # its class, which has an objective
    tenant: str = ""
    content: str | list[dict[str, Any]] | None = None  # text or messages to send as they are, in place of the ids
    sampling: SamplingParams = GREEDY  # how many tokens it may generate is `output_len`
    output: list[int] | None = None  # what it generates, whatever is sampled
    adapter: int | None = None  # number of a LoRA adapter with random weights


@dataclass(frozen=True, slots=True)
class Mix:
    """Short chats with log-normal lengths and a share of long prompts, arriving at random."""

    long_share: float
    long_prompt: tuple[int, int]  # uniform
    long_output: int
    short_prompt: tuple[float, float, int, int]  # mu and sigma of the logarithm, lowest, highest
    short_output: tuple[float, float, int, int]
    objectives: Mapping[str, Objective]


MIXES = {
    "slo_mix": Mix(
        long_share=0.05,
        long_prompt=(12_000, 16_000),
        long_output=64,
        short_prompt=(5.4, 0.8, 16, 2048),
        short_output=(4.8, 0.6, 8, 512),
        objectives={"short": Objective("short", 0.2, 0.05), "long": Objective("long", 4.0, 0.05)},
    ),
    # For a model of 135M parameters on two CPU cores, which hold these objectives up to some 4 arrivals a second.
    "slo_mix_cpu": Mix(
        long_share=0.1,
        long_prompt=(2_000, 4_000),
        long_output=32,
        short_prompt=(4.7, 0.4, 60, 200),
        short_output=(4.0, 0.5, 16, 128),
        objectives={"short": Objective("short", 0.5, 0.15), "long": Objective("long", 10.0, 0.15)},
    ),
}


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

    def edits(self, count: int, prompt_len: int) -> list[Job]:
        """Outputs that repeat their prompts with 1 token in 25 changed, left out or put in between."""

        def one() -> Job:
            prompt, output = self.ids(prompt_len), list[int]()
            for token in prompt:
                change = self.random.choice(("change", "leave out", "insert")) if self.random.random() < 0.04 else ""
                output += {"": [token], "change": self.ids(1), "leave out": [], "insert": [*self.ids(1), token]}[change]
            return Job(prompt, len(output), output=output)

        return [one() for _ in range(count)]

    def extractions(self, count: int, prompt_len: int, fields: int) -> list[Job]:
        """Outputs of records: a key of 6 tokens, always the same ones in the same order, and 8 to 40 of the prompt."""
        keys = [self.ids(6) for _ in range(4)]

        def one() -> Job:
            prompt, output = self.ids(prompt_len), list[int]()
            for number in range(fields):
                begin, length = self.random.randrange(prompt_len - 40), self.random.randint(8, 40)
                output += [*keys[number % len(keys)], *prompt[begin : begin + length]]
            return Job(prompt, len(output), output=output)

        return [one() for _ in range(count)]

    def chats(self, count: int, prompt_len: int, output_len: int) -> list[Job]:
        """Outputs that repeat hardly more than prose does: phrases of 1 to 5 tokens, some of them frequent."""
        phrases = [self.ids(self.random.randint(1, 5)) for _ in range(4000)]
        weights = [1 / (rank + 20) for rank in range(len(phrases))]

        def text(length: int) -> list[int]:
            tokens = list[int]()
            while len(tokens) < length:
                tokens += self.random.choices(phrases, weights)[0]
            return tokens[:length]

        return [Job(text(prompt_len), output_len, output=text(output_len)) for _ in range(count)]

    def arrivals(self, mix: Mix, rate: float, seconds: float) -> list[Job]:
        """Poisson arrivals."""
        rng = self.random
        jobs: list[Job] = []
        now = rng.expovariate(rate)
        while now <= seconds:
            if rng.random() < mix.long_share:
                kind, prompt_len, output_len = "long", rng.randint(*mix.long_prompt), mix.long_output
            else:
                kind, prompt_len, output_len = "short", self._length(mix.short_prompt), self._length(mix.short_output)
            jobs.append(Job(self.ids(prompt_len), output_len, now, kind))
            now += rng.expovariate(rate)
        return jobs

    def _length(self, shape: tuple[float, float, int, int]) -> int:
        mu, sigma, low, high = shape
        return max(low, min(high, int(self.random.lognormvariate(mu, sigma))))


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    about: str
    metric: Metric  # the figure its target is stated in
    generate: Callable[[Source], list[Job]]
    clients: int | None = None  # requests in flight; None: all of them at once
    rate: float | None = None  # arrivals a second of an open loop: requests come at their time, whatever has finished
    classes: Sequence[str] = ()  # of the jobs, which their `kind` names; empty: they have none
    objectives: Mapping[str, Objective] = field(default_factory=dict)  # by class
    sampling: str = "greedy"
    adapters: int = 0  # LoRA adapters, which the jobs use in turn

    def jobs(self, seed: int, vocab: int = VOCAB) -> list[Job]:
        jobs = self.generate(Source(seed, vocab))
        if not jobs:
            raise InvalidRequest("seconds is too short for a single arrival at this rate", param="seconds")
        sampling = sampling_of(self.sampling, len(jobs))
        return [
            replace(job, sampling=params, adapter=number % self.adapters if self.adapters else None)
            for number, (job, params) in enumerate(zip(jobs, sampling, strict=True))
        ]

    def endless(self, seed: int, vocab: int = VOCAB) -> Iterator[Job]:
        """The jobs of this seed, then fresh ones of the same shape for ever."""
        rounds = random.Random(seed)
        while True:
            yield from self.jobs(seed, vocab)
            seed = rounds.getrandbits(48)


def _chats(clients: int, source: Source) -> list[Job]:
    return source.chats(clients, 64, 128)


# name, what it is, the figure it is judged by, how its jobs are drawn, requests in flight (None: all at once)
_TABLE: list[tuple[str, str, Metric, Callable[[Source], list[Job]], int | None]] = [
    ("single", "1 x 128 in, 256 out", "ms_per_token", lambda s: s.uniform(1, 128, 256), None),
    ("batch32", "32 x 128 in, 256 out", "output_tok_s", lambda s: s.uniform(32, 128, 256), None),
    ("batch128", "128 x 128 in, 256 out", "output_tok_s", lambda s: s.uniform(128, 128, 256), None),
    ("throughput", "1024 x 512 in, 256 out", "output_tok_s", lambda s: s.uniform(1024, 512, 256), None),
    ("mixed", "256 x 100-1024 in, 100-1024 out", "output_tok_s", lambda s: s.mixed(256, 100, 1024), None),
    ("prefix", "256 x (2048 shared + 64) in, 64 out", "output_tok_s", lambda s: s.shared(256, 2048, 64, 64), None),
    ("prefill", "64 x 4096 in, 1 out", "prompt_tok_s", lambda s: s.uniform(64, 4096, 1), None),
    ("cpu_single", "1 x 128 in, 128 out", "decode_tok_s", lambda s: s.uniform(1, 128, 128), None),
    ("cpu_prefill", "1 x 1024 in, 1 out", "prompt_tok_s", lambda s: s.uniform(1, 1024, 1), None),
    ("cpu_clients8", "8 clients, 16 x 128 in, 128 out", "output_tok_s", lambda s: s.uniform(16, 128, 128), 8),
    ("cpu_clients32", "32 clients, 64 x 128 in, 128 out", "output_tok_s", lambda s: s.uniform(64, 128, 128), 32),
    ("edit", "1 client, 4 x 384 in, the same out with 4% changed", "output_tok_s", lambda s: s.edits(4, 384), 1),
    ("extract", "1 client, 4 x 384 in, parts of it out", "output_tok_s", lambda s: s.extractions(4, 384, 12), 1),
    *(
        (f"chat{n}", f"{n} x 64 in, 128 out as prose", "output_tok_s", partial(_chats, n), None)
        for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    ),
    ("cpu_prefix", "32 x (768 shared + 32) in, 32 out", "output_tok_s", lambda s: s.shared(32, 768, 32, 32), None),
]
WORKLOADS = {row[0]: Workload(*row) for row in _TABLE}


def mix_workload(name: str, rate: float, seconds: float) -> Workload:
    mix = MIXES[name]
    low, high = (tokens // 1000 for tokens in mix.long_prompt)
    return Workload(
        name=f"{name}@{rate:g}",
        about=f"Poisson, {rate:g}/s for {seconds:g} s, {mix.long_share:.0%} prompts of {low}k-{high}k",
        metric="share_met",
        generate=lambda source: source.arrivals(mix, rate, seconds),
        rate=rate,
        classes=list(mix.objectives),
        objectives=mix.objectives,
    )


def find_workload(name: str) -> Workload:
    """A closed-loop workload by its name on the command line."""
    if name not in WORKLOADS:
        known = ", ".join([*WORKLOADS, *MIXES])
        raise InvalidRequest(f"workload {name!r} is not known; known: {known}", param="workload")
    return WORKLOADS[name]


def uniform_workload(prompt_len: int, output_len: int, count: int, clients: int) -> Workload:
    about = f"{prompt_len} in, {output_len} out"
    return Workload("uniform", about, "output_tok_s", lambda s: s.uniform(count, prompt_len, output_len), clients)
