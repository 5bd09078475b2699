"""What a step has to read and to compute at least, kernel by kernel, and the seam to whoever times its kernels.

No step can be faster than its bytes divided by the memory bandwidth, nor than its FLOPs divided by the peak.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from penstock.engine.executor import Step


class Work(NamedTuple):
    bytes: float = 0.0
    flops: float = 0.0

    def plus(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True, slots=True)
class Gemm:
    """The matrices of one kind in all layers."""

    parameters: int
    nbytes: int
    share: float = 1.0  # of the parameters that one token uses; less than 1 with experts

    def work(self, tokens: int) -> Work:
        if not tokens:
            return Work()
        return Work(self.nbytes * min(1.0, self.share * tokens), 2.0 * self.parameters * self.share * tokens)


@dataclass(frozen=True, slots=True)
class ModelWork:
    gemms: Mapping[str, Gemm]  # by the name of the kernel
    lm_head: Gemm
    kv_token_bytes: float  # keys and values of one token in all layers
    attention_width: int  # layers times heads times the size of a head
    lm_head_part: str = "lm_head"  # the kernel that computes it

    def of(self, step: Step) -> dict[str, Work]:
        """By kernel. Every query attends to all tokens before it: what a sliding window saves is not subtracted."""
        tokens, context, pairs = len(step.tokens), 0, 0
        for start, count in zip(step.starts, step.counts, strict=True):
            context += start + count
            pairs += count * start + count * (count + 1) // 2
        work = {name: gemm.work(tokens) for name, gemm in self.gemms.items()}
        work["attention"] = Work((context + tokens) * self.kv_token_bytes, 4.0 * pairs * self.attention_width)
        work[self.lm_head_part] = work.get(self.lm_head_part, Work()).plus(self.lm_head.work(sum(step.samples)))
        return work


@dataclass(frozen=True, slots=True)
class Limits:
    """What the device can do at best; None: not known. `source` says for people where the figures come from."""

    bytes_per_second: float | None
    flops_per_second: float | None
    source: str


class Kernel(NamedTuple):
    """One kernel that ran, on the clock of time.monotonic_ns."""

    part: str  # of the step, as in `ModelWork.of`
    name: str
    began: int
    ended: int
    stream: int = 0  # CUDA stream


@dataclass(slots=True)
class KernelRecord:
    kernels: list[Kernel] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # for people: what is missing, and why


class KernelProbe(Protocol):
    """Times the kernels of an executor while a profile is taken."""

    @property
    def work(self) -> ModelWork: ...

    @property
    def most_steps(self) -> int | None:
        """After so many steps the recording is to be stopped. None: it may go on."""
        ...

    def limits(self) -> Limits:
        """On the engine's thread, between two steps. May take some tens of milliseconds."""
        ...

    def step(self) -> AbstractContextManager[None]:
        """On the engine's thread, around `Executor.collect`."""
        ...

    def record(self, begun: Callable[[], None], stop: threading.Event) -> KernelRecord:
        """Blocks a thread of its own until `stop` is set, then gives what ran since it called `begun`."""
        ...
