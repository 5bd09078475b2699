"""The executor on a GPU: steps replay CUDA graphs, and each is launched before the one before it has been collected.

The graph of a decode step reads rows and contexts from fixed buffers, gathers everything else on the device, and writes
the sampled tokens back into the rows, so step N+1 can be queued before step N has run. A step is padded to the next
graph bucket with a spare row of context 0. Steps with prompts in them replay the graphs of `mixed_steps.py`, where
their size has one; those that score prompts launch their kernels without a graph. Where sequences verify drafts, an
entry of a decode step is a token, and a sequence has several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from penstock.core.errors import EngineFailure
from penstock.engine.executor import NO_ADAPTER, SAMPLED, AdapterWeights, Step, StepResult, TokenMask, by_sequence
from penstock.kernels.triton.argmax import argmax, argmax_scratch
from penstock.kernels.triton.decode_inputs import gather_decode_inputs
from penstock.kernels.triton.drafts import accept
from penstock.kernels.triton.prefix import prefix_splits
from penstock.runner.batch import Batch, Ints, build_batch
from penstock.runner.cuda_probe import CudaProbe
from penstock.runner.decode_batch import DecodeBatch, decode_batch
from penstock.runner.device_adapters import DeviceAdapters
from penstock.runner.device_rows import DeviceRows
from penstock.runner.device_sampler import DeviceSampler
from penstock.runner.device_scores import DeviceScores
from penstock.runner.device_stream import Graph, captured
from penstock.runner.fused_forward import FusedForward
from penstock.runner.largest_step import largest_step, most_sampled
from penstock.runner.mixed_steps import GreedyTokens, MixedSteps
from penstock.runner.paged_attention import MOST_DRAFTED
from penstock.runner.parallel_tasks import run_in_parallel
from penstock.runner.scoring import asked_by, scored_prompts
from penstock.runner.shared_prefix import MIN_SHARING, shared_prefix
from penstock.runner.step_inputs import StepInputs
from penstock.runner.steps_in_flight import Slots, StepInFlight
from penstock.runner.transfer import to_device
from penstock.runner.verification import accepted_entries, entries_of, kept_masks, without_excess

# Graph buckets: the batch sizes of the graphs of decode steps, of those with shared-prefix attention, and the numbers
# of tokens of those with drafts.
BUCKETS = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 513, 64)]
SHARED_PREFIX_BUCKETS = [8, 16, 32, *range(64, 256, 32), *range(256, 513, 64)]
ADAPTED_BUCKETS = [2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]  # with LoRA adapters
DRAFT_BUCKETS = [4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of decode step that has a CUDA graph of its own."""

    size: int
    shared: bool = False  # with shared-prefix attention
    stacked: bool = False  # all layers in one persistent kernel
    adapted: bool = False  # with LoRA adapters
    drafts: bool = False  # its entries are tokens, of which a sequence may have several


class CudaRunner:
    runs_ahead = True
    verifies_drafts = True
    host_memory = None

    def __init__(
        self,
        forward: FusedForward,
        state: DeviceRows,
        adapters: DeviceAdapters,
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
        self.kernel_probe = CudaProbe(forward)
        self.device = self.kernel_probe.device
        self._state = state
        self._adapters = adapters
        self.adapter_modules = adapters.modules
        self._block_size = block_size
        self._max_seqs = rows - 1
        self._most = most = most_sampled(self._max_seqs)
        self._max_step_tokens = max_step_tokens
        self._sizes, self._sharing_sizes, self._adapted_sizes = (
            [size for size in buckets if size < self._max_seqs] + [self._max_seqs]
            for buckets in (BUCKETS, SHARED_PREFIX_BUCKETS, ADAPTED_BUCKETS)
        )
        self._draft_sizes = [size for size in DRAFT_BUCKETS if size <= most]
        self._tables = torch.zeros((rows, table_blocks), dtype=torch.int32, device=device)
        self._stream = stream = state.stream
        self._inputs = inputs = StepInputs(most, self._tables, stream)
        # Steps run one after the other and what outlives one is copied, so all of them write their logits here.
        self._logits = torch.empty((most, vocab_size), dtype=torch.float32, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._scratch = argmax_scratch(most, vocab_size, device)
        self._greedy = GreedyTokens(forward, self._logits, self._tokens, self._scratch)
        sizes = {"most_sampled": most, "max_tokens": max_step_tokens}
        self._mixed_steps = mixed = MixedSteps(forward, self._tables, self._greedy, adapters, stream, **sizes)
        self._sampler = DeviceSampler(state, self._logits, self._tokens, inputs.of_sampling, inputs.drafts, stream)
        self.mask_memory: TokenMask | None = self._sampler.mask_memory
        self._slots = Slots(stream, inputs=inputs.size, mixed=mixed.size, params=state.size, tokens=most)
        self._decoding: DecodeBatch | None = None  # of the last decode step, while its rows stay as they are
        self._graphs: dict[_Kind, Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._under_way: torch.cuda.Event | None = None  # end of the last step launched, until it is collected

    # -- executor ----------------------------------------------------------------------------------------------------

    def enter_thread(self) -> None:
        """Nothing to prepare."""

    def prepare_adapter(self, adapter: AdapterWeights) -> None:
        self._adapters.prepare(adapter)

    def padded_tokens(self, tokens: int) -> int:
        return self._mixed_steps.padded(tokens)

    def launch(self, step: Step) -> StepInFlight:
        self._stream.enter()
        slot = self._slots.take()
        self._stream.record(slot.began)
        self._state.apply(step)
        self._state.send(step, slot.params)
        if step.setups:
            self._decoding = None
        self._inputs.send_blocks(step, slot.blocks)
        for number, adapter in step.adapters:
            self._adapters.fill(number, adapter)
        planned = step
        if len(step.tokens) > self._most:
            step = without_excess(step, self._most)
        flight = StepInFlight(planned, step, slot, self._under_way)
        self._under_way = slot.done
        self._run_of(step)(step, flight)
        if not step.constrained:
            self._sample(flight)
        return flight

    def constrain(self, handle: StepInFlight, masks: TokenMask) -> None:
        if handle.step is not handle.planned:
            masks = self._sampler.stage_masks(masks[kept_masks(handle.planned, handle.step)])
        self._sampler.send_masks(len(masks))
        self._sample(handle)

    def collect(self, handle: StepInFlight) -> StepResult:
        slot = handle.slot
        slot.collect()
        if handle.after is not None:
            self.idle_seconds = (self.idle_seconds or 0.0) + max(0.0, handle.after.elapsed_time(slot.began)) / 1e3
        if self._under_way is slot.done:
            self._under_way = None
        tokens = handle.tokens
        if handle.drafts is None:
            result = StepResult(by_sequence(handle.step.samples, tokens))
        else:
            result = StepResult([[] for _ in handle.step.rows])
            for entry in accepted_entries(handle.sampled, handle.drafts, tokens):
                result.tokens[handle.sampled[entry]].append(tokens[entry])
        for add in handle.scores:
            add(result)
        return result

    def resample(self, handle: StepInFlight, masks: Mapping[int, TokenMask]) -> list[int]:
        raise EngineFailure("a device that runs ahead cannot sample again: the next step has read the token")

    # -- steps -------------------------------------------------------------------------------------------------------

    def _run_of(self, step: Step) -> Callable[[Step, StepInFlight], None]:
        if max(step.tokens) == SAMPLED or len(step.tokens) == sum(step.samples) == 1:
            return self._decode
        if sum(step.samples) != len(step.tokens):
            return self._mixed
        # Sequences of a decode step attend before others have written their keys. So none may fill a block of known
        # tokens, which another one could share within the step.
        known = zip(step.tokens, step.starts, strict=False)
        if len(step.tokens) == len(step.rows) and all(t == SAMPLED or (at + 1) % self._block_size for t, at in known):
            return self._decode
        verifies = len(step.tokens) <= self._draft_sizes[-1] and max(step.counts) <= MOST_DRAFTED
        return self._verify if verifies else self._mixed

    def _decode(self, step: Step, flight: StepInFlight) -> None:
        batch = self._decoding
        if batch is None or batch.listed != step.rows:
            batch = self._decoding = decode_batch(step.rows, self._state)
        rows, contexts = batch.rows, np.array(step.starts, dtype=np.int32) + 1
        flight.sampled, flight.rows, flight.asked = batch.entries, rows, batch.asked
        shared, length, adapted = None, 0, self._adapters.used(batch.slots)
        if batch.may_share and not self._forward.deterministic and not adapted:
            shared, length = shared_prefix(self._state.tables_RM, rows, contexts, self._block_size)
        sizes = self._sharing_sizes if length else self._adapted_sizes if adapted else self._sizes
        size = next(size for size in sizes if size >= len(rows))
        stacked = size == 1 and not adapted and self._forward.stacks(size, int(contexts.max()))
        kind = _Kind(size, length > 0, stacked, adapted)
        if adapted:
            self._adapters.send(batch.slots, size)
        tokens = np.array(step.tokens, dtype=np.int32) if max(step.tokens) != SAMPLED else None
        if stacked and tokens is not None:  # the persistent kernel reads it there
            self._state.last_token_R[step.rows[0]] = step.tokens[0]
        staged, masked = flight.slot.inputs, (step.constrained, step.checked)
        self._inputs.send(staged, rows, contexts, tokens=tokens, masked=masked, shared=shared, length=length)
        self._graphs[kind].replay()

    @torch.inference_mode()
    def _mixed(self, step: Step, flight: StepInFlight) -> None:
        batch, drafted = self._batch(step, flight), max(step.samples) > 1
        if drafted or flight.asked.anything:
            self._send_entries(step, flight, batch, drafted)
        scored = scored_prompts(self._state, step)
        if scored:
            self._run_scored(step, flight, batch, scored)
        else:
            self._mixed_steps.run(batch, self._state, flight.slot.mixed)
        if drafted:
            self._accept(len(batch.rows_N))

    def _run_scored(self, step: Step, flight: StepInFlight, batch: Batch, scored: list[tuple[int, Ints, Ints]]) -> None:
        slots_T, size = self._state.adapter[batch.rows_T], len(batch.rows_T)
        if adapted := self._adapters.used(slots_T):
            self._adapters.send(slots_T, size)
        adapters = self._adapters.of_step(size) if adapted else None
        hidden_TC = self._forward.step_hidden(batch, self._state, adapters)
        for index, rows, tokens in scored:
            width = self._state.params(step.rows[index]).prompt_logprobs or 0
            flight.scores.append(self._prompt_scores(index, hidden_TC, rows, tokens, width))
        if flight.sampled:  # not only chunks of prompts
            last_N, rows_N = (to_device(array, hidden_TC.device) for array in (batch.last_N, batch.rows_N))
            self._greedy(hidden_TC, last_N, rows_N, self._state)

    def _verify(self, step: Step, flight: StepInFlight) -> None:
        """Every token of the step is sampled after; there are drafts among them, or tokens that the host knows."""
        batch = self._batch(step, flight)
        self._send_entries(step, flight, batch, drafted=True)
        size = next(size for size in self._draft_sizes if size >= len(batch.rows_N))
        slots = self._state.adapter[batch.rows_N]
        if adapted := self._adapters.used(slots):
            self._adapters.send(slots, size)
        self._graphs[_Kind(size, adapted=adapted, drafts=True)].replay()

    def _batch(self, step: Step, flight: StepInFlight) -> Batch:
        batch = build_batch(step, self._state, self._block_size)
        flight.sampled, flight.rows = batch.sampled_N.tolist(), batch.rows_N
        flight.asked = asked_by(self._state, batch.rows_N)
        return batch

    def _accept(self, size: int) -> None:
        inputs = self._inputs
        accept(self._tokens, inputs.drafts[:size], inputs.rows_S[:size], self._state.last_token_R)

    def _sample(self, flight: StepInFlight) -> None:
        """The greedy tokens are in their rows already; rows that ask for more are sampled and overwritten."""
        count, drafted = len(flight.rows), flight.drafts is not None
        if flight.asked.anything:
            sizes = self._draft_sizes if drafted else self._sizes
            self._sampler.run(next((size for size in sizes if size >= count), count), drafted)
            if asked := flight.asked.scored:
                scores = self._sampler.scores(count)

                def add(result: StepResult) -> None:
                    left = [len(tokens) for tokens in result.tokens]
                    for i, one in zip(asked, scores.read(flight.tokens, asked, flight.asked.widths), strict=True):
                        sequence = flight.sampled[i]
                        if left[sequence]:
                            left[sequence] -= 1
                            result.logprobs.setdefault(sequence, []).append(one)

                flight.scores.append(add)
        self._stream.receive(flight.slot.tokens.address, self._tokens.data_ptr(), self._tokens.itemsize * count)
        self._stream.record(flight.slot.done)

    def _prompt_scores(
        self,
        index: int,
        hidden_TC: torch.Tensor,
        rows: Ints,
        tokens: Ints,
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

    # -- what a step reads -------------------------------------------------------------------------------------------

    def _send_entries(self, step: Step, flight: StepInFlight, batch: Batch, drafted: bool) -> None:
        masked = entries_of(flight.sampled, step.constrained), entries_of(flight.sampled, step.checked)
        tokens = sequences = None
        if drafted:
            tokens, sequences = batch.tokens_T[batch.last_N], batch.sampled_N.astype(np.int32)
            flight.drafts = tokens.tolist()
        entries = batch.rows_N, batch.next_positions_N
        self._inputs.send(flight.slot.inputs, *entries, tokens=tokens, sequences=sequences, masked=masked)

    # -- capture -----------------------------------------------------------------------------------------------------

    def compile_all(self) -> None:
        """Compile all kernels that no cache on disk has yet, in parallel: each thread runs one bucket on padding.

        They share scratch memory, so what they compute is worthless and arrival counters must be cleared afterwards.
        What does not fit beside the others runs again alone. Raises torch.OutOfMemoryError.
        """
        layers, decode, mixed = self._forward.distinct_layers, self._decode_body, self._mixed_steps
        tasks: list[Callable[[], object]] = [*self._forward.compile_tasks]
        tasks += [partial(self._sampler.run, 1, drafts) for drafts in (False, True)]
        tasks += [partial(decode, kind, layers) for kind in self._kinds]
        tasks += [partial(mixed.compile, layout, adapted, self._state) for layout, adapted in mixed.layouts]
        self._inputs.clear()
        mixed.pad()
        run_in_parallel(tasks)
        self._forward.clear_scratch()
        self._scratch.arrivals.zero_()

    def probe(self, max_step_tokens: int | None = None) -> int:
        """Run the largest step there can be, with everything that sampling may need; bytes that it took at its peak.

        It writes block 0 of the cache. Raises torch.OutOfMemoryError.
        """
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            tokens = max_step_tokens or self._max_step_tokens
            slot = 0 if self._adapters.slots else NO_ADAPTER
            self.collect(self.launch(largest_step(self._state, tokens, self._block_size, slot)))
            return torch.cuda.max_memory_allocated() - before
        finally:
            self.idle_seconds, self._under_way = 0.0, None
            torch.cuda.empty_cache()

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
            self._sampler.capture(self._sizes[::-1], self._pool, drafts=False)
            self._sampler.capture(self._draft_sizes[::-1], self._pool, drafts=True)
        return mixed + len(self._kinds) + len(self._sizes) + len(self._draft_sizes)

    @property
    def _kinds(self) -> list[_Kind]:
        """The largest first, so that smaller ones share its memory."""
        alone = [_Kind(1, stacked=True)] if self._forward.stacks(1, 1) else []
        sharing = [_Kind(size, shared=True) for size in reversed(self._sharing_sizes) if size >= MIN_SHARING]
        if self._forward.deterministic:
            sharing = []
        either = (True, False) if self._adapters.slots else (False,)
        drafts = [_Kind(size, adapted=which, drafts=True) for which in either for size in reversed(self._draft_sizes)]
        adapted = [_Kind(size, adapted=True) for size in reversed(self._adapted_sizes) if True in either]
        return adapted + [_Kind(size) for size in reversed(self._sizes)] + sharing + drafts + alone

    def _capture(self, kind: _Kind) -> None:
        self._graphs[kind] = captured(partial(self._decode_body, kind), self._pool, self._stream)

    def _decode_body(self, kind: _Kind, layers: int | None = None) -> None:
        """What a graph captures: logits, and greedy tokens, which go to their rows as well."""
        size, forward, state = kind.size, self._forward, self._state
        rows, contexts = self._inputs.rows_S[:size], self._inputs.contexts_S[:size]
        if kind.stacked:
            forward.decode_stacked(
                rows, contexts, state.last_token_R, self._tables, self._logits[:size], self._tokens, layers
            )
            return
        tokens = self._inputs.drafts.tokens[:size]
        inputs = gather_decode_inputs(
            rows, contexts, state.last_token_R, tokens, self._tables, forward.embedding, self._block_size
        )
        splits = prefix_splits(size, forward.num_heads, forward.max_model_len)
        prefix = self._inputs.prefix(size, splits) if kind.shared else None
        attend = forward.attention.attend_decode(inputs, contexts, prefix, drafts=kind.drafts)
        adapters = self._adapters.of_step(size) if kind.adapted else None
        logits = forward.logits(forward.hidden(inputs.x_SC, attend, layers, adapters), self._logits[:size])
        argmax(logits, self._tokens, self._scratch, feed=None if kind.drafts else (state.last_token_R, rows))
        if kind.drafts:
            self._accept(size)
