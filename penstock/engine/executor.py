"""The seam between decisions and tensors: the scheduler describes a `Step`, an `Executor` computes it.

`launch` returns at once and `collect` waits. An executor that runs ahead gets step N+1 before the tokens of step N are
read back; the tokens it samples stay in their rows, where the next step finds them.
Steps execute in the order of their launch, and within a step every layer writes its keys and values before any
sequence attends. Hence a block may be shared as soon as the step that fills it is scheduled, even within that step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.core.request import Adapter, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from penstock.engine.step_work import KernelProbe

# Which tokens of the vocabulary may be sampled: bit t % 32 of word t // 32. One row, or several: [samples, words].
TokenMask: TypeAlias = npt.NDArray[np.int32]

SAMPLED = -1  # in Step.tokens: the token this row sampled last, which only the device knows yet
NOT_A_NUMBER = -2  # in StepResult.tokens, in place of a token: no logit is a number, as after an overflow
UNDECIDED = -3  # likewise, of a checked sequence: only its mask tells which token it is


NO_ADAPTER = -1  # in RowSetup.adapter


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AdapterWeights:
    """A LoRA adapter in host memory. A linear module that it has adds (x @ A.T) @ B.T to its output."""

    digest: str
    rank: int
    # By the module's name in the checkpoint without ".weight", such as "model.layers.3.self_attn.q_proj":
    # A [rank, inputs] and B [outputs, rank], float32, the adapter's scale multiplied into B.
    modules: Mapping[str, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.modules.values())


class Adapters(Protocol):
    """LoRA adapters in host memory. May be used from several threads."""

    def get(self, adapter: Adapter, /) -> AdapterWeights:
        """Reads it from its folder if it is not at hand. Raises InvalidRequest if it is not there, or does not fit."""
        ...


@dataclass(frozen=True, slots=True)
class RowSetup:
    """A row of device state taken into use by a sequence (new, or resumed after preemption)."""

    row: int
    params: SamplingParams
    seed: int
    tokens: Sequence[int]  # prompt and output known so far, for penalties
    prompt_len: int
    stop_ids: Sequence[int]  # forbidden until min_tokens
    adapter: int = NO_ADAPTER  # the adapter slot that its tokens are computed with
    second_text: int = 0  # position where the second of two texts begins; 0: there is one


@dataclass(slots=True)
class Step:
    """Which tokens of which rows to compute. Parallel lists, one entry per sequence; those that decode come first."""

    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # position of the first token computed
    counts: list[int] = field(default_factory=list)  # how many tokens
    # Of how many tokens, the last ones, the logits are sampled. Where it is more than one, all but the first of these
    # tokens are a draft: positions are sampled in order, each with the tokens before it counted, up to the first token
    # that is not the one of the draft.
    samples: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # all sequences' tokens, one after the other; may be SAMPLED
    constrained: list[int] = field(default_factory=list)  # sequences that may sample once `constrain` says what
    # That sample one token each without a mask: the one that they would sample with any mask that allows it, or
    # UNDECIDED. They may have to sample again.
    checked: list[int] = field(default_factory=list)
    adapters: list[tuple[int, AdapterWeights]] = field(default_factory=list)  # (slot, what it holds from now on)
    setups: list[RowSetup] = field(default_factory=list)
    forced: list[tuple[int, list[int]]] = field(default_factory=list)  # (row, output tokens that nobody sampled)
    blocks: list[tuple[int, int, list[int]]] = field(default_factory=list)  # (row, index in its table, block ids)


@dataclass(slots=True)
class StepResult:
    """What each sequence of a step sampled, in the order of the step's lists: up to as many tokens as `Step.samples`
    says. The lists are given away: the chunks of the requests take them over."""

    tokens: list[list[int]]
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)  # by index of the sequence in the step
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)  # for positions start+1 … start+count
    vectors: dict[int, bytes] = field(default_factory=dict)  # `Chunk.vector` of complete prompts; empty: not numbers


def masks_by_sequence(step: Step, masks: TokenMask) -> dict[int, TokenMask]:
    """The rows of each constrained sequence, by its index in the step."""
    counts = [step.samples[index] for index in step.constrained]
    ends = accumulate(counts)
    return {index: masks[end - count : end] for index, count, end in zip(step.constrained, counts, ends, strict=True)}


def by_sequence(samples: list[int], tokens: list[int]) -> list[list[int]]:
    """`StepResult.tokens` from those of all sampled positions, one after the other; SAMPLED where there is none."""
    if len(tokens) == len(samples) and all(samples):
        return [[token] for token in tokens]
    sampled = iter(tokens)
    return [[token for token in islice(sampled, count) if token != SAMPLED] for count in samples]


class Executor(Protocol):
    num_blocks: int
    runs_ahead: bool  # whether a step should be launched before the one before it is collected
    idle_seconds: float | None  # how long the device waited for launches while there was work; None: not measured
    mask_memory: TokenMask | None  # where masks are best written: pinned, for a copy to a device; None: anywhere

    def padded_tokens(self, tokens: int, /) -> int:
        """How many tokens are computed in a step that has this many, some of them of prompts."""
        ...

    def launch(self, step: Step, /) -> Any: ...

    def constrain(self, handle: Any, masks: TokenMask, /) -> None:
        """The tokens that the constrained sequences of a launched step may sample: a row for each sample, in order.

        Called once for each step with such sequences, before the next launch: a grammar knows what may follow only when
        the token before it has been collected, by which time the logits are being computed. The rows are the first ones
        of `mask_memory`, if there is one and they fit, and stay as they are until the step is collected.
        """
        ...

    def collect(self, handle: Any, /) -> StepResult: ...

    def resample(self, handle: Any, masks: Mapping[int, TokenMask], /) -> list[int]:
        """Other tokens for checked sequences of the step just collected, in the order of their masks, by index. Only
        asked of executors that do not run ahead."""
        ...


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes that an executor takes of its process's memory."""

    weights: int
    cache: int  # once every block of the KV cache has been used


class LoadedExecutor(Executor, Protocol):
    """An executor over the weights of a model, as the worker process runs it."""

    verifies_drafts: bool  # whether `Step.samples` may be more than one

    @property
    def device(self) -> str:
        """What computes, for people: the device, and the kernels there."""
        ...

    @property
    def kernel_probe(self) -> KernelProbe | None:
        """Times its kernels while a profile is taken. None: it cannot be done."""
        ...

    @property
    def adapter_modules(self) -> Mapping[str, tuple[int, int]]:
        """Linear modules that LoRA adapters may change, by their names in the checkpoint without ".weight": how many
        inputs and outputs they have. Empty: it computes without adapters."""
        ...

    @property
    def host_memory(self) -> HostMemory | None:
        """None where weights and KV cache belong to torch or to a GPU."""
        ...

    def enter_thread(self) -> None:
        """Prepare the calling thread, which is going to launch every step from now on."""
        ...

    def prepare_adapter(self, adapter: AdapterWeights, /) -> None:
        """Have what a slot is filled with at hand. From any thread, before a step needs it; a step would wait."""
        ...
