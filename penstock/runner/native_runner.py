"""The executor on the CPU, without torch: one native call computes a step and samples."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, chain, count, repeat
from threading import Lock
from typing import TypeAlias
from weakref import WeakKeyDictionary

from penstock.engine.executor import (
    SAMPLED,
    UNDECIDED,
    AdapterWeights,
    HostMemory,
    Step,
    StepResult,
    TokenMask,
    by_sequence,
)
from penstock.kernels.native.adapters import NativeAdapter
from penstock.kernels.native.bindings import device_name
from penstock.kernels.native.model import NativeModel, NativeRows, NativeStep
from penstock.kernels.native.shape import adapter_modules
from penstock.kernels.native.timers import thread_count
from penstock.runner.host_rows import HostRows
from penstock.runner.native_probe import NativeProbe
from penstock.runner.scoring import scored_prompts

Prompt: TypeAlias = tuple[int, list[int], list[int]]  # sequence, its tokens in the step, the prompt tokens that follow


class NativeRunner:
    """Runs a step when its result is asked for.

    The threads that compute a step already use every core: a step launched ahead would only compete with the
    scheduling, sending and detokenising of the one before it. On two cores one sequence went from 90 to 127 tok/s
    without it.
    """

    runs_ahead = False
    verifies_drafts = True

    def __init__(self, model: NativeModel, state: HostRows, *, spare_blocks: int = 0, layers: int = 0) -> None:
        """`spare_blocks`: the last ones of the KV cache, which are left to the drafts of a second runner. `layers`: so
        many of the model's layers are computed, from the first on, then its final norm and head; 0: all."""
        self.model = model
        self.kernel_probe = NativeProbe(model)
        self.device = device_name(thread_count(model), model.scheme)
        self.num_blocks = model.num_blocks - spare_blocks
        self._layers = layers
        self.adapter_modules = adapter_modules(model.config)
        self.mask_memory: TokenMask | None = None
        self.idle_seconds: float | None = 0.0  # between native calls: what scheduling and Python cost
        self._state = state
        self._masks: TokenMask | None = None  # of the step that is collected next
        self._packed = WeakKeyDictionary[AdapterWeights, NativeAdapter]()
        self._packing = Lock()
        self._rows = NativeRows(state.tables_RM, state.last_token_R, state.sampling, state.adapter)

    @property
    def host_memory(self) -> HostMemory:
        return HostMemory(self.model.weight_bytes, self.model.cache_bytes)

    def enter_thread(self) -> None:
        self.model.pin_caller()

    def prepare_adapter(self, adapter: AdapterWeights) -> None:
        self._packed_adapter(adapter)

    def _packed_adapter(self, adapter: AdapterWeights) -> NativeAdapter:
        """It is kept for as long as the weights are in host memory."""
        if (packed := self._packed.get(adapter)) is not None:
            return packed
        with self._packing:
            if (packed := self._packed.get(adapter)) is None:  # else another thread has packed it meanwhile
                packed = self._packed[adapter] = NativeAdapter(self.model, adapter.rank, adapter.modules)
            return packed

    def padded_tokens(self, tokens: int) -> int:
        return tokens

    def launch(self, step: Step) -> Step:
        return step

    def constrain(self, step: Step, masks: TokenMask) -> None:
        self._masks = masks

    def collect(self, step: Step) -> StepResult:
        state, ended = self._state, self.model.call_ended
        state.apply(step)
        for slot, adapter in step.adapters:
            self._packed_adapter(adapter).use(slot)
        ends = zip(accumulate(step.counts), step.samples, strict=True)
        wanted = [at for end, samples in ends for at in range(end - samples, end)]
        sampling, targets, scores = len(wanted), list[int](), not state.scored.isdisjoint(step.rows)
        runs = [samples for samples in step.samples if samples]
        prompts = [(i, rows.tolist(), ids.tolist()) for i, rows, ids in scored_prompts(state, step)] if scores else []
        if prompts or step.checked:
            targets, firsts = [SAMPLED] * sampling, list(accumulate(step.samples, initial=0))
            for index in step.checked:
                targets[firsts[index]] = UNDECIDED
        if prompts:
            targets += chain.from_iterable(ids for _, _, ids in prompts)
            wanted += chain.from_iterable(rows for _, rows, _ in prompts)
            runs += repeat(1, len(wanted) - sampling)
        masks, self._masks = {} if self._masks is None else _by_sample(step, self._masks), None
        sequences = (step.tokens, step.rows, step.starts, step.counts)
        native = NativeStep(*sequences, wanted, runs, targets, masks, self._layers, bool(step.checked))
        _, tokens = self.model.forward(native, self._rows, logits=False)
        result = StepResult(by_sequence(step.samples, tokens[:sampling]))
        if scores:
            self._score(step, prompts, result)
        if not step.setups:  # all that it computes was at hand when the last step ended
            self.idle_seconds = (self.idle_seconds or 0.0) + self.model.call_began - ended
        return result

    def resample(self, step: Step, masks: Mapping[int, TokenMask]) -> list[int]:
        firsts = list(accumulate(step.samples, initial=0))
        return self.model.resample({firsts[index]: mask for index, mask in masks.items()})

    def _score(self, step: Step, prompts: list[Prompt], result: StepResult) -> None:
        state, scores, first = self._state, self.model.scores, 0
        for index, (row, samples) in enumerate(zip(step.rows, step.samples, strict=True)):
            if samples and row in state.scored and (width := state.params(row).logprobs) is not None:
                found = enumerate(result.tokens[index], first)
                result.logprobs[index] = [scores.read(i, token, width) for i, token in found]
            first += samples
        at = count(first)
        for index, _, ids in prompts:
            width = state.params(step.rows[index]).prompt_logprobs or 0
            result.prompt_logprobs[index] = [scores.read(next(at), token, width) for token in ids]


def _by_sample(step: Step, masks: TokenMask) -> dict[int, TokenMask]:
    """Masks by the number of the position among those that are sampled."""
    firsts = list(accumulate(step.samples, initial=0))
    places = chain.from_iterable(range(firsts[index], firsts[index + 1]) for index in step.constrained)
    return dict(zip(places, masks, strict=True))
