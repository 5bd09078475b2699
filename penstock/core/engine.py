"""The seam everything composes by: an in-process engine and a client of a worker process are both `Engine`s."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from penstock.core.ledger import Ledger
from penstock.core.request import Chunk, GenerateRequest, SamplingParams

Task = Literal["generate", "embed", "score"]  # score: two texts against each other, by a cross-encoder


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a caller must know to build requests that an engine can hold."""

    model: str
    max_model_len: int  # prompt plus output tokens of one request
    vocab_size: int
    revision: str = ""  # changes with the weights and with the precision they are computed in
    sampling_defaults: SamplingParams = field(default_factory=SamplingParams)  # of requests that do not say
    continues: bool = True  # whether it goes on from the output of another engine
    block_size: int = 16  # tokens of a KV block
    task: Task = "generate"
    width: int = 0  # numbers of an embedding, or scores of two texts
    normalized: bool = True  # whether embeddings have length 1


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A reading of the engine, sent along with chunks at most a few times a second. Counters only ever grow."""

    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    kv_slots: int = 0  # of tokens, in the blocks that sequences hold
    kv_slots_empty: int = 0  # those of them without a token
    prefill_tokens: int = 0  # of prompts taken in, that have not been computed yet
    steps: int = 0
    requests: int = 0  # taken in
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    batch_tokens: int = 0  # tokens computed over all steps
    batch_sequences: int = 0  # sequences advanced over all steps
    step_seconds: float = 0.0  # that all steps took
    read_bytes_estimate: int = 0  # of weights and KV, over all steps; 0: not known, as on a GPU
    seconds_since_step: float = 0.0  # while there is work; 0 when idle
    refused: int = 0  # requests whose objective could not be met
    expired: int = 0  # requests whose deadline passed
    drafted_tokens: int = 0  # guessed ahead of sampling
    accepted_tokens: int = 0  # those of them that were sampled
    # From the step-time model; 0 until it has seen enough steps.
    prefill_tokens_per_second: float = 0.0
    decode_step_seconds: float = 0.0  # of a step that advances the sequences now running by one token each
    fixed_step_seconds: float = 0.0  # of a step, whatever is in it
    stream_step_seconds: float = 0.0  # that each decoding sequence adds to a step
    context_token_seconds: float = 0.0  # and each token of its context
    step_time_error: float = 0.0  # median of |predicted - measured| / measured over the latest steps
    # Measured at the first start on this machine, and the same ever since; 0 where that was not possible yet.
    usual_prompt_seconds: float = 0.0  # to the first token of a prompt of 1,024 tokens, alone
    loaded_step_seconds: float = 0.0  # of a step that decodes a usual batch of 32 sequences


@dataclass(frozen=True, slots=True)
class GpuStats:
    """A reading of a GPU. Energy is a counter."""

    name: str
    utilisation: float  # share of the time that a kernel ran
    memory_bytes: int
    memory_used_bytes: int  # by all processes
    temperature_celsius: float
    power_watts: float
    power_limit_watts: float
    clock_hertz: float  # of the SMs
    clock_limit_hertz: float
    energy_joules: float


@dataclass(frozen=True, slots=True)
class HostStats:
    """What an engine's process uses of its machine."""

    cpu_seconds: float = 0.0  # of all its threads
    resident_bytes: int = 0
    gpu: GpuStats | None = None


class ChunkStream(Protocol):
    """An async generator of chunks, or what can be used like one."""

    def __aiter__(self) -> AsyncIterator[Chunk]: ...

    def __anext__(self) -> Awaitable[Chunk]: ...

    def aclose(self) -> Awaitable[None]: ...


class Engine(Protocol):
    def submit(self, request: GenerateRequest) -> ChunkStream:
        """Yield chunks until one has a finish reason. That one has the ledger, also if the request failed: then it has
        an error as well. Closing the iterator aborts the request and frees its memory.

        Raises what an engine refuses, and Unavailable where it is lost and has no ledger to give."""
        ...


@dataclass(frozen=True, slots=True)
class Health:
    """Healthy means: idle, or a step finished lately. `detail` is a short phrase for people."""

    ok: bool
    detail: str


class ServedEngine(Engine, Protocol):
    """An engine that a gateway can stand in front of."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def stats(self) -> EngineStats: ...

    def health(self) -> Health: ...

    async def aborted(self, request_id: str) -> Ledger | None:
        """The ledger of a request whose iterator has just been closed early. None if there is none, or if it does not
        come within a second, as when the computation goes on for others."""
        ...
