"""The executor on a GPU: decode steps replay captured CUDA graphs, others launch kernel by kernel; nothing waits.

A captured step reads rows and contexts from fixed buffers, gathers everything else on the device, and writes the
sampled tokens back into the rows, so step N+1 can be queued before step N has run. A step is padded to a captured size
with a spare row of context 0.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.machine import usable_cpus
from penstock.core.request import TokenLogprob
from penstock.engine.executor import SAMPLED, Step, StepResult
from penstock.kernels.attention_triton import SharedPrefix, prefix_splits
from penstock.kernels.decode_inputs_triton import gather_decode_inputs
from penstock.kernels.sampling_triton import SamplingRows, argmax, sampling_scratch
from penstock.kernels.sampling_triton import sample as sample_triton
from penstock.models.config import ModelConfig
from penstock.runner.batch import build_batch
from penstock.runner.fused_forward import FusedForward
from penstock.runner.model_runner import score, scored_prompts, scored_rows
from penstock.runner.row_state import RowState
from penstock.runner.sampler import Draws, sample
from penstock.runner.transfer import to_device, to_host

# Sizes that decode steps are captured for; between them a step is padded up.
SIZES = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 513, 64)]
_MIN_SHARED_TOKENS = 256
_MIN_SHARING = 8


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    tokens: torch.Tensor


@dataclass(slots=True)
class _InFlight:
    sequences: int
    began: torch.cuda.Event
    done: torch.cuda.Event
    after: torch.cuda.Event | None  # the end of the step before, if this one was launched while that was under way
    sampled: list[int] = field(default_factory=list)
    tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    scores: list[Callable[[StepResult], None]] = field(default_factory=list)


def working_memory(model: ModelConfig, max_seqs: int, max_step_tokens: int) -> int:
    """Bytes of activations in the largest step, of logits and sampling, and of libraries' workspaces."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    activations = 2 * max_step_tokens * (3 * model.hidden_size + 2 * heads + 3 * model.intermediate_size)
    logits = max_seqs * model.vocab_size * 4 * 4
    attention = 4 * 4 * max_seqs * model.num_heads * model.head_dim
    return activations + logits + attention + 2**30


class CudaRunner:
    runs_ahead = True

    def __init__(
        self,
        forward: FusedForward,
        state: RowState,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
    ) -> None:
        """The last row of `state` is spare: it pads captured steps."""
        rows, table_blocks = state.tables_RM.shape
        device = forward.device
        self.num_blocks = num_blocks
        self.idle_seconds: float | None = 0.0
        self._forward = forward
        self._state = state
        self._block_size = block_size
        self._max_seqs = rows - 1
        self._sizes = [size for size in SIZES if size < self._max_seqs] + [self._max_seqs]
        self._tables = torch.zeros((rows, table_blocks), dtype=torch.int32, device=device)
        # Of captured steps: rows, contexts, shared tokens of each sequence, and the length of the shared prefix.
        self._inputs = torch.zeros(3 * self._max_seqs + 1, dtype=torch.int32, device=device)
        self._prefix_table = torch.zeros(table_blocks, dtype=torch.int32, device=device)
        self._scratch = sampling_scratch(self._max_seqs, vocab_size, device)
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._under_way: torch.cuda.Event | None = None  # end of the last step launched, until it is collected

    # -- executor ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, step: Step) -> _InFlight:
        began, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        self._state.apply(step)
        self._update_tables(step)
        flight = _InFlight(len(step.rows), began, done, self._under_way)
        self._under_way = done
        # A captured step takes every token from its row, and computes none that another sequence of it may share.
        run = self._decode if max(step.tokens) == SAMPLED else self._mixed
        flight.tokens = to_host(run(step, flight))
        done.record()
        return flight

    def collect(self, handle: _InFlight) -> StepResult:
        handle.done.synchronize()
        if handle.after is not None:
            self.idle_seconds = (self.idle_seconds or 0.0) + max(0.0, handle.after.elapsed_time(handle.began)) / 1e3
        if self._under_way is handle.done:
            self._under_way = None
        result = StepResult([-1] * handle.sequences)
        for index, token in zip(handle.sampled, handle.tokens.tolist(), strict=True):
            result.tokens[index] = token
        for add in handle.scores:
            add(result)
        return result

    # -- steps -------------------------------------------------------------------------------------------------------

    def _decode(self, step: Step, flight: _InFlight) -> torch.Tensor:
        rows = np.array(step.rows, dtype=np.int32)
        contexts = np.array(step.starts, dtype=np.int32) + 1
        flight.sampled = list(range(len(rows)))
        size = next(size for size in self._sizes if size >= len(rows))
        shared, length = self._shared_prefix(rows, contexts)
        captured = self._graphs.get((size, length > 0)) or self._capture(size, length > 0)
        self._send_inputs(rows, contexts, shared, length)
        captured.graph.replay()
        logits, tokens = captured.logits[: len(rows)], captured.tokens[: len(rows)]
        return self._sample(logits, tokens, rows, contexts, flight)

    def _mixed(self, step: Step, flight: _InFlight) -> torch.Tensor:
        batch = build_batch(step, self._state, self._block_size)
        scored = scored_prompts(self._state, step, batch)
        logit_rows = np.concatenate([batch.last_N, *(rows for _, rows, _ in scored)])
        logits_RV, likeliest_R = self._forward(batch, self._state, logit_rows)
        flight.sampled = batch.sampled_N.tolist()
        first = len(batch.rows_N)
        for index, rows, tokens in scored:
            flight.scores.append(
                self._prompt_scores(index, step.rows[index], logits_RV[first : first + len(rows)], tokens)
            )
            first += len(rows)
        sampling = len(batch.rows_N)
        self._state.last_token_R[to_device(batch.rows_N, logits_RV.device)] = likeliest_R[:sampling]
        return self._sample(logits_RV[:sampling], likeliest_R[:sampling], batch.rows_N, batch.next_positions_N, flight)

    def _sample(
        self,
        logits: torch.Tensor,
        likeliest: torch.Tensor,
        rows: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        flight: _InFlight,
    ) -> torch.Tensor:
        """The likeliest tokens are in their rows already; draw again where a row asks for more than that."""
        if not self._state.needs[rows].any():
            return likeliest
        tokens = sample(logits.float(), likeliest, self._state, rows, positions, self._choose)
        asked, widths = scored_rows(self._state, rows)
        if asked:
            # The logits' memory belongs to the next step of this size: keep what is asked for.
            kept, chosen = logits[asked].float(), tokens[asked]
            indices = [flight.sampled[i] for i in asked]

            def add(result: StepResult) -> None:
                result.logprobs = dict(zip(indices, score(kept, chosen, widths), strict=True))

            flight.scores.append(add)
        return tokens

    def _prompt_scores(
        self, index: int, row: int, logits: torch.Tensor, tokens: torch.Tensor
    ) -> Callable[[StepResult], None]:
        width = self._state.params(row).prompt_logprobs or 0

        def add(result: StepResult) -> None:
            scores: list[TokenLogprob] = score(logits.float(), tokens, [width] * len(tokens))
            result.prompt_logprobs[index] = scores

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

    def _shared_prefix(
        self, rows: npt.NDArray[np.int32], contexts: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int32] | None, int]:
        """Tokens at the start that most sequences have in common block by block: of each sequence, and how many."""
        if len(rows) < _MIN_SHARING:
            return None, 0
        tables = self._state.tables_RM
        firsts = tables[rows, 0]
        values, counts = np.unique(firsts, return_counts=True)
        if counts.max() < _MIN_SHARING or 2 * counts.max() < len(rows):
            return None, 0
        members = firsts == values[counts.argmax()]
        width = int(contexts[members].min() - 1) // self._block_size
        theirs = tables[rows[members], :width]
        differs = np.flatnonzero((theirs != theirs[0]).any(0))
        length = (int(differs[0]) if len(differs) else width) * self._block_size
        if length < _MIN_SHARED_TOKENS:
            return None, 0
        return np.where(members, length, 0).astype(np.int32), length

    # -- capture -----------------------------------------------------------------------------------------------------

    def capture_all(self) -> int:
        """Before serving. Returns how many sizes were captured."""
        self._compile_all()
        with torch.inference_mode():
            for size in reversed(self._sizes):  # largest first, so that the smaller ones share its memory
                self._capture(size, False)
        return len(self._sizes)

    def _compile_all(self) -> None:
        """Kernels that no cache on disk has yet are compiled side by side: each thread runs some size on padding.

        They share scratch memory, so what they compute is worthless and arrival counters must be cleared afterwards.
        """
        layers = self._forward.distinct_layers

        def run(size: int, shared: bool) -> None:
            with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
                self._decode_body(size, shared, layers)

        self._send_inputs(np.zeros(0, np.int32), np.zeros(0, np.int32), None, 0)
        torch.cuda.synchronize()
        run(self._sizes[-1], False)  # on this thread, so that its libraries are set up before anything is captured
        with ThreadPoolExecutor(min(16, usable_cpus())) as threads:
            runs = [threads.submit(self._forward.warm_up)]
            runs += [threads.submit(run, size, False) for size in self._sizes]
            runs += [threads.submit(run, size, True) for size in self._sizes if size >= _MIN_SHARING]
            for done in runs:
                done.result()
        torch.cuda.synchronize()
        self._forward.clear_scratch()
        self._scratch.arrivals.zero_()

    def _capture(self, size: int, shared: bool) -> _Graph:
        """Everything was compiled before."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits, tokens = self._decode_body(size, shared)
        self._graphs[size, shared] = captured = _Graph(graph, logits, tokens)
        return captured

    def _decode_body(self, size: int, shared: bool, layers: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        seqs, forward, state = self._max_seqs, self._forward, self._state
        rows, contexts = self._inputs[:size], self._inputs[seqs : seqs + size]
        inputs = gather_decode_inputs(
            rows, contexts, state.last_token_R, self._tables, forward.embedding, self._block_size
        )
        prefix = self._prefix_of(size) if shared else None
        hidden = forward.hidden(inputs.x_SC, forward.attend_decode(inputs, contexts, prefix), layers)
        logits = forward.logits(hidden)
        chosen = argmax(logits, torch.empty(size, dtype=torch.int64, device=logits.device), self._scratch)
        state.last_token_R.index_copy_(0, rows.long(), chosen)
        return logits, chosen

    def _prefix_of(self, size: int) -> SharedPrefix:
        seqs = self._max_seqs
        return SharedPrefix(
            table_M=self._prefix_table,
            length=self._inputs[3 * seqs :],
            lengths_S=self._inputs[2 * seqs : 2 * seqs + size],
            splits=prefix_splits(size, self._forward.num_heads, self._forward.max_model_len),
        )
