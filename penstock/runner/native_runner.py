"""The executor on the CPU, without torch: one native call computes a step, one more samples if rows ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, chain, compress

import numpy as np

from penstock.engine.executor import HostMemory, Step, StepResult, TokenMask, at_most_one_each
from penstock.kernels.native.model import NativeModel, NativeRows, NativeStep
from penstock.runner.host_sampler import Floats, sample
from penstock.runner.rows import HostRows
from penstock.runner.scoring import score, scored_prompts, scored_rows


class NativeRunner:
    """Runs a step when its result is asked for.

    The threads that compute a step already use every core: a step launched ahead would only compete with the
    scheduling, sending and detokenising of the one before it. On two cores one sequence went from 90 to 127 tok/s
    without it.
    """

    runs_ahead = False

    def __init__(self, model: NativeModel, state: HostRows) -> None:
        self.model = model
        self.num_blocks = model.num_blocks
        self.idle_seconds: float | None = 0.0  # between native calls: what scheduling and Python cost
        self._state = state
        self._masks: Mapping[int, TokenMask] = {}  # of the step that is collected next
        self._rows = NativeRows(state.tables_RM, state.last_token_R)

    @property
    def host_memory(self) -> HostMemory:
        return HostMemory(self.model.weight_bytes, self.model.cache_bytes)

    def enter_thread(self) -> None:
        self.model.pin_caller()

    def padded_tokens(self, tokens: int) -> int:
        return tokens

    def launch(self, step: Step) -> Step:
        return step

    def constrain(self, step: Step, masks: Mapping[int, TokenMask]) -> None:
        self._masks = masks

    def collect(self, step: Step) -> StepResult:
        state, ended = self._state, self.model.call_ended
        state.apply(step)
        if state.demanding.isdisjoint(step.rows):
            _, tokens_N = self._forward(step, _last_tokens(step), logits=False)
            result = StepResult(at_most_one_each(step.samples, tokens_N))
        else:
            result = self._demanding(step)
        if not step.setups:  # all that it computes was at hand when the last step ended
            self.idle_seconds = (self.idle_seconds or 0.0) + self.model.call_began - ended
        return result

    def _demanding(self, step: Step) -> StepResult:
        """A step with rows that want more than the greedy token: sampling, penalties or log-probabilities."""
        state, last_N = self._state, _last_tokens(step)
        scored, sampling = scored_prompts(state, step), len(last_N)
        prompt_rows = chain.from_iterable(rows.tolist() for _, rows, _ in scored)
        logits_RV, greedy_R = self._forward(step, [*last_N, *prompt_rows], logits=True)
        sampled_N = np.flatnonzero(step.samples)
        rows_N = np.array(step.rows, dtype=np.int32)[sampled_N]
        positions_N = np.add(step.starts, step.counts, dtype=np.int32)[sampled_N]  # where the sampled token will stand
        asked, widths = scored_rows(state, rows_N)
        logits_AV = logits_RV[asked]  # copies: sampling may overwrite the originals
        greedy_N = np.array(greedy_R[:sampling], dtype=np.int32)
        masks, self._masks = {i: self._masks[s] for i, s in enumerate(sampled_N.tolist()) if s in self._masks}, {}
        tokens_N = sample(self.model.sample, logits_RV[:sampling], greedy_N, state, rows_N, positions_N, masks)
        state.last_token_R[rows_N] = tokens_N
        result = StepResult(at_most_one_each(step.samples, tokens_N.tolist()))
        scores = score(logits_AV, tokens_N[asked], widths)
        result.logprobs = {index: [one] for index, one in zip(sampled_N[asked].tolist(), scores, strict=True)}
        first = sampling
        for index, rows, tokens in scored:
            width = state.params(step.rows[index]).prompt_logprobs or 0
            result.prompt_logprobs[index] = score(logits_RV[first : first + len(rows)], tokens, [width] * len(rows))
            first += len(rows)
        return result

    def _forward(self, step: Step, logit_rows: list[int], *, logits: bool) -> tuple[Floats, list[int]]:
        native = NativeStep(step.tokens, step.rows, step.starts, step.counts, logit_rows)
        return self.model.forward(native, self._rows, logits=logits)


def _last_tokens(step: Step) -> list[int]:
    """Where in the step's tokens the last one of each sequence stands that samples."""
    return [end - 1 for end in compress(accumulate(step.counts), step.samples)]
