"""What the requests of a benchmark ask of the sampler, by the names of `bench engine --sampling`."""

from __future__ import annotations

from itertools import cycle, islice

from penstock.core.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
_KINDS = {
    "greedy": GREEDY,
    "temperature": SamplingParams(temperature=1.0),
    "top-p": SamplingParams(temperature=1.0, top_p=0.95),
    "top-k": SamplingParams(temperature=1.0, top_k=40),
    "min-p": SamplingParams(temperature=1.0, min_p=0.05),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5),
}
SAMPLING = {name: (params,) for name, params in _KINDS.items()} | {"mixed": tuple(_KINDS.values())}


def sampling_of(kind: str, requests: int) -> list[SamplingParams]:
    """Of so many requests, one after the other; `mixed` takes all kinds in turn."""
    return list(islice(cycle(SAMPLING[kind]), requests))
