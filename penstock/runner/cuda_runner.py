"""The executor on a GPU: steps replay CUDA graphs, and each is launched before the one before it has been collected.

The graph of a decode step reads rows and contexts from fixed buffers, gathers everything else on the device, and writes
the sampled tokens back into the rows, so step N+1 can be queued before step N has run. A step is padded to the next
graph bucket with a spare row of context 0. Steps with prompts in them replay the graphs of `mixed_steps.py`, where
their size has one; those that score prompts launch their kernels without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.request import SamplingParams
from penstock.engine.executor import SAMPLED, RowSetup, Step, StepResult, TokenMask, at_most_one_each
from penstock.kernels.triton.decode_inputs import gather_decode_inputs
from penstock.kernels.triton.prefix import SharedPrefix, prefix_splits
from penstock.kernels.triton.sampling import SamplingRows, argmax, sampling_scratch
from penstock.kernels.triton.sampling import sample as sample_triton
from penstock.runner.batch import build_batch
from penstock.runner.device_scores import DeviceScores
from penstock.runner.fused_forward import FusedForward
from penstock.runner.mixed_steps import MixedSteps
from penstock.runner.parallel_tasks import run_in_parallel
from penstock.runner.row_state import RowState
from penstock.runner.sampler import Draws, sample
from penstock.runner.scoring import scored_prompts, scored_rows
from penstock.runner.shared_prefix import MIN_SHARING, shared_prefix
from penstock.runner.transfer import to_device, to_host

# Graph buckets: the batch sizes of the graphs of decode steps, and of those with shared-prefix attention.
BUCKETS = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 513, 64)]
SHARED_PREFIX_BUCKETS = [8, 16, 32, *range(64, 256, 32), *range(256, 513, 64)]


# The most that a request can ask of a step's sampling: every table, every pass, the most alternatives.
_DEMANDING = SamplingParams(
    temperature=1.0, top_k=40, top_p=0.9, repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=20, max_tokens=1
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of decode step that has a CUDA graph of its own."""

    size: int
    shared: bool = False  # with shared-prefix attention
    stacked: bool = False  # all layers in one persistent kernel


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    tokens: torch.Tensor


@dataclass(slots=True)
class _InFlight:
    samples: list[int]  # as in the step
    began: torch.cuda.Event
    done: torch.cuda.Event
    after: torch.cuda.Event | None  # the end of the step before, if this one was launched before that had ended
    sampled: list[int] = field(default_factory=list)
    tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    scores: list[Callable[[StepResult], None]] = field(default_factory=list)


class CudaRunner:
    runs_ahead = True
    host_memory = None

    def __init__(
        self,
        forward: FusedForward,
        state: RowState,
        *,
        block_size: int,
        vocab_size: int,
        max_step_tokens: int,
    ) -> None:
        """The last row of `state` is spare: it pads steps to their graph bucket."""
        rows, table_blocks = state.tables_RM.shape
        device = forward.device
        self.num_blocks = forward.attention.num_blocks
        self.idle_seconds: float | None = 0.0
        self._forward = forward
        self._state = state
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._max_seqs = rows - 1
        self._max_step_tokens = max_step_tokens
        self._sizes, self._sharing_sizes = (
            [size for size in buckets if size < self._max_seqs] + [self._max_seqs]
            for buckets in (BUCKETS, SHARED_PREFIX_BUCKETS)
        )
        self._tables = torch.zeros((rows, table_blocks), dtype=torch.int32, device=device)
        # Inputs of the graphs: rows, contexts, shared tokens of each sequence, and the length of the shared prefix.
        self._inputs = torch.zeros(3 * self._max_seqs + 1, dtype=torch.int32, device=device)
        self._prefix_table = torch.zeros(table_blocks, dtype=torch.int32, device=device)
        # Steps run one after the other and what outlives one is copied, so all of them write their logits here.
        self._logits = torch.empty((self._max_seqs, vocab_size), dtype=torch.float32, device=device)
        self._scratch = sampling_scratch(self._max_seqs, vocab_size, device)
        self._mixed_steps = MixedSteps(forward, self._tables, self._logits, self._scratch, max_tokens=max_step_tokens)
        self._graphs: dict[_Kind, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._under_way: torch.cuda.Event | None = None  # end of the last step launched, until it is collected

    # -- executor ----------------------------------------------------------------------------------------------------

    def enter_thread(self) -> None:
        """Nothing to prepare."""

    def padded_tokens(self, tokens: int) -> int:
        return self._mixed_steps.padded(tokens)

    @torch.inference_mode()
    def launch(self, step: Step) -> _InFlight:
        began, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        self._state.apply(step)
        self._update_tables(step)
        flight = _InFlight(step.samples, began, done, self._under_way)
        self._under_way = done
        # The graph of a decode step takes every token from its row, and fills no block that another sequence may share.
        run = self._decode if max(step.tokens) == SAMPLED else self._mixed
        flight.tokens = to_host(run(step, flight))
        done.record()
        return flight

    def constrain(self, handle: _InFlight, masks: Mapping[int, TokenMask]) -> None:
        raise NotImplementedError

    def collect(self, handle: _InFlight) -> StepResult:
        handle.done.synchronize()
        if handle.after is not None:
            self.idle_seconds = (self.idle_seconds or 0.0) + max(0.0, handle.after.elapsed_time(handle.began)) / 1e3
        if self._under_way is handle.done:
            self._under_way = None
        result = StepResult(at_most_one_each(handle.samples, handle.tokens.tolist()))
        for add in handle.scores:
            add(result)
        return result

    # -- steps -------------------------------------------------------------------------------------------------------

    def _decode(self, step: Step, flight: _InFlight) -> torch.Tensor:
        rows = np.array(step.rows, dtype=np.int32)
        contexts = np.array(step.starts, dtype=np.int32) + 1
        flight.sampled = list(range(len(rows)))
        shared, length = None, 0
        if not self._forward.deterministic:
            shared, length = shared_prefix(self._state.tables_RM, rows, contexts, self._block_size)
        sizes = self._sharing_sizes if length else self._sizes
        size = next(size for size in sizes if size >= len(rows))
        kind = _Kind(size, length > 0, self._forward.stacks(size, int(contexts.max())))
        decode = self._graphs[kind]
        self._send_inputs(rows, contexts, shared, length)
        decode.graph.replay()
        return self._sample(self._logits[: len(rows)], decode.tokens[: len(rows)], rows, contexts, flight)

    def _mixed(self, step: Step, flight: _InFlight) -> torch.Tensor:
        batch = build_batch(step, self._state, self._block_size)
        flight.sampled = batch.sampled_N.tolist()
        scored = scored_prompts(self._state, step)
        if not scored:
            logits_NV, greedy_N = self._mixed_steps.run(batch, self._state)
            return self._sample(logits_NV, greedy_N, batch.rows_N, batch.next_positions_N, flight)
        hidden_TC = self._forward.step_hidden(batch, self._state)
        for index, rows, tokens in scored:
            width = self._state.params(step.rows[index]).prompt_logprobs or 0
            flight.scores.append(self._prompt_scores(index, hidden_TC, rows, tokens, width))
        if not flight.sampled:  # chunks of prompts only
            return torch.empty(0, dtype=torch.int64)
        device = hidden_TC.device
        logits_NV = self._forward.logits(hidden_TC[to_device(batch.last_N, device)], self._logits[: len(batch.rows_N)])
        greedy_N = argmax(logits_NV, torch.empty(len(logits_NV), dtype=torch.int64, device=device), self._scratch)
        self._state.last_token_R[to_device(batch.rows_N, device)] = greedy_N
        return self._sample(logits_NV, greedy_N, batch.rows_N, batch.next_positions_N, flight)

    def _sample(
        self,
        logits: torch.Tensor,
        greedy: torch.Tensor,
        rows: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        flight: _InFlight,
    ) -> torch.Tensor:
        """The greedy tokens are in their rows already; rows that are not greedy are sampled and overwritten."""
        if not self._state.needs[rows].any():
            return greedy
        tokens = sample(logits, greedy, self._state, rows, positions, self._choose)
        asked, widths = scored_rows(self._state, rows)
        if asked:
            scores = DeviceScores(logits[asked], tokens[asked], max(widths))
            indices = [flight.sampled[i] for i in asked]

            def add(result: StepResult) -> None:
                result.logprobs = {index: [one] for index, one in zip(indices, scores.read(widths), strict=True)}

            flight.scores.append(add)
        return tokens

    def _prompt_scores(
        self,
        index: int,
        hidden_TC: torch.Tensor,
        rows: npt.NDArray[np.int32],
        tokens: npt.NDArray[np.int32],
        width: int,
    ) -> Callable[[StepResult], None]:
        """A few rows at a time: the logits of a whole prompt could outgrow the memory."""
        pieces, most, device = [], self._max_seqs, hidden_TC.device
        for first in range(0, len(rows), most):
            hidden = hidden_TC[to_device(rows[first : first + most], device)]
            following = to_device(tokens[first : first + most], device)
            pieces.append(DeviceScores(self._forward.logits(hidden, self._logits[: len(hidden)]), following, width))

        def add(result: StepResult) -> None:
            result.prompt_logprobs[index] = [
                token for piece in pieces for token in piece.read([width] * len(piece.tokens))
            ]

        return add

    def _choose(self, logits_NV: torch.Tensor, draws: Draws) -> torch.Tensor:
        out = torch.empty(len(logits_NV), dtype=torch.int64, device=logits_NV.device)
        rows = SamplingRows(
            temperature=draws.temperature_N,
            seed=draws.seeds_N,
            position=draws.positions_N,
            top_k=draws.top_k_N,
            top_p=draws.top_p_N,
            min_p=draws.min_p_N,
        )
        on = draws.filtered
        return sample_triton(logits_NV, out, rows, self._scratch, any_top_k=on, any_top_p=on, any_min_p=on)

    # -- what a step reads -------------------------------------------------------------------------------------------

    def _update_tables(self, step: Step) -> None:
        """New blocks, as (row, index, block) triples, into the device's copy of the tables."""
        if not step.blocks:
            return
        lengths = [len(blocks) for _, _, blocks in step.blocks]
        triples = np.empty((3, sum(lengths)), dtype=np.int64)
        triples[0] = np.repeat([row for row, _, _ in step.blocks], lengths)
        triples[1] = np.concatenate([np.arange(i, i + len(blocks)) for _, i, blocks in step.blocks])
        triples[2] = np.concatenate([blocks for _, _, blocks in step.blocks])
        rows, indices, blocks = to_device(triples, self._tables.device)
        self._tables[rows, indices] = blocks.int()

    def _send_inputs(
        self,
        rows: npt.NDArray[np.int32],
        contexts: npt.NDArray[np.int32],
        shared: npt.NDArray[np.int32] | None,
        length: int,
    ) -> None:
        size, used = self._max_seqs, len(rows)
        values = np.zeros(len(self._inputs), dtype=np.int32)
        values[:used], values[used:size] = rows, size  # the spare row
        values[size : size + used] = contexts
        if shared is not None:
            values[2 * size : 2 * size + used] = shared
            values[3 * size] = length
            self._prefix_table.copy_(self._tables[int(rows[np.argmax(shared)])])
        self._inputs.copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)

    # -- capture -----------------------------------------------------------------------------------------------------

    def compile_all(self) -> None:
        """Compile all kernels that no cache on disk has yet, in parallel: each thread runs one bucket on padding.

        They share scratch memory, so what they compute is worthless and arrival counters must be cleared afterwards.
        What does not fit beside the others runs again alone. Raises torch.OutOfMemoryError.
        """
        layers, decode, mixed = self._forward.distinct_layers, self._decode_body, self._mixed_steps
        tasks: list[Callable[[], object]] = [*self._forward.compile_tasks, self._warm_up_sampling]
        tasks += [partial(decode, kind, layers) for kind in self._kinds]
        tasks += [partial(mixed.compile, layout, self._state) for layout in mixed.layouts]
        self._send_inputs(np.zeros(0, np.int32), np.zeros(0, np.int32), None, 0)
        mixed.pad()
        run_in_parallel(tasks)
        self._forward.clear_scratch()
        self._scratch.arrivals.zero_()

    def _warm_up_sampling(self) -> None:
        one, zero = torch.ones(1, device=self._logits.device), torch.zeros(1, device=self._logits.device)
        for filtered in (False, True):
            self._choose(self._logits[:1], Draws(one, zero.long(), zero.int(), one.int(), one, zero, filtered))

    def probe(self, max_step_tokens: int | None = None) -> int:
        """Run the largest step there can be, with everything that sampling may need; bytes that it took at its peak.

        It writes block 0 of the cache. Raises torch.OutOfMemoryError.
        """
        state = self._state
        rows, table_blocks = state.tables_RM.shape
        self._state = RowState(rows, table_blocks, self._vocab_size, self._logits.device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            self.collect(self.launch(self._largest_step(max_step_tokens or self._max_step_tokens)))
            return torch.cuda.max_memory_allocated() - before
        finally:
            self._state, self.idle_seconds, self._under_way = state, 0.0, None
            torch.cuda.empty_cache()

    def _largest_step(self, max_tokens: int) -> Step:
        longest = self._state.tables_RM.shape[1] * self._block_size
        rows = min(self._max_seqs, max_tokens)
        counts = [min(len(part), longest) for part in np.array_split(np.arange(max_tokens), rows)]
        return Step(
            rows=list(range(rows)),
            starts=[0] * rows,
            counts=counts,
            samples=[1] * rows,
            tokens=[0] * sum(counts),
            setups=[RowSetup(row, _DEMANDING, 0, [0] * count, count, ()) for row, count in enumerate(counts)],
        )

    def allocate_cache(self, num_blocks: int) -> None:
        """Call it before capturing: graphs hold addresses in the cache."""
        self._forward.attention.allocate(num_blocks)
        self.num_blocks = num_blocks

    def capture_all(self) -> int:
        """Capture all CUDA graphs over the KV cache that stays. Returns how many there are."""
        with torch.inference_mode():
            mixed = self._mixed_steps.capture_all(self._state, self._pool)
            for kind in self._kinds:
                self._capture(kind)
        return mixed + len(self._kinds)

    @property
    def _kinds(self) -> list[_Kind]:
        """The largest first, so that smaller ones share its memory."""
        alone = [_Kind(1, stacked=True)] if self._forward.stacks(1, 1) else []
        sharing = [_Kind(size, shared=True) for size in reversed(self._sharing_sizes) if size >= MIN_SHARING]
        if self._forward.deterministic:
            sharing = []
        return [_Kind(size) for size in reversed(self._sizes)] + sharing + alone

    def _capture(self, kind: _Kind) -> None:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            tokens = self._decode_body(kind)
        self._graphs[kind] = _Graph(graph, tokens)

    def _decode_body(self, kind: _Kind, layers: int | None = None) -> torch.Tensor:
        """What a graph captures: returns the greedy tokens; their logits are in `_logits`."""
        size, seqs, forward, state = kind.size, self._max_seqs, self._forward, self._state
        rows, contexts = self._inputs[:size], self._inputs[seqs : seqs + size]
        if kind.stacked:
            logits = self._logits[:size]
            return forward.decode_stacked(rows, contexts, state.last_token_R, self._tables, logits, layers)
        inputs = gather_decode_inputs(
            rows, contexts, state.last_token_R, self._tables, forward.embedding, self._block_size
        )
        prefix = self._prefix_of(size) if kind.shared else None
        hidden = forward.hidden(inputs.x_SC, forward.attention.attend_decode(inputs, contexts, prefix), layers)
        logits = forward.logits(hidden, self._logits[:size])
        chosen = torch.empty(size, dtype=torch.int64, device=logits.device)
        return argmax(logits, chosen, self._scratch, feed=(state.last_token_R, rows))

    def _prefix_of(self, size: int) -> SharedPrefix:
        seqs = self._max_seqs
        return SharedPrefix(
            table_M=self._prefix_table,
            length=self._inputs[3 * seqs :],
            lengths_S=self._inputs[2 * seqs : 2 * seqs + size],
            splits=prefix_splits(size, self._forward.num_heads, self._forward.max_model_len),
        )
