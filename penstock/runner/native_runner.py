"""The executor on the CPU: one native call computes a step, one more draws tokens where rows ask for it. No torch."""

from __future__ import annotations

import numpy as np

from penstock.engine.executor import Step, StepResult
from penstock.kernels.native_model import NativeModel, StepArrays
from penstock.runner.batch import Batch, Ints, build_batch
from penstock.runner.host_sampler import Floats, sample
from penstock.runner.rows import HostRows, Needs
from penstock.runner.scoring import score, scored_prompts, scored_rows


class NativeRunner:
    """Runs a step when its result is asked for.

    The threads that compute a step already use every core: a step launched ahead would only compete with the
    scheduling, sending and detokenising of the one before it, and each time a computing thread loses its core all
    others wait for it at the next barrier. On two cores one sequence went from 90 to 127 tok/s without it.
    """

    runs_ahead = False

    def __init__(self, model: NativeModel, state: HostRows) -> None:
        self.model = model
        self.num_blocks = model.num_blocks
        self.idle_seconds: float | None = 0.0  # between native calls: what scheduling and Python cost
        self._state = state

    def padded_tokens(self, tokens: int) -> int:
        return tokens

    def launch(self, step: Step) -> Step:
        return step

    def collect(self, step: Step) -> StepResult:
        state, ended = self._state, self.model.call_ended
        state.apply(step)
        batch = build_batch(step, state, self.model.block_size)
        needs_T = state.needs[batch.rows_T]
        if needs_T.any():
            result = self._unusual(step, batch, bool((needs_T & Needs.PROMPT_LOGPROBS).any()))
        else:
            _, likeliest_N = self._forward(batch, batch.last_N, logits=False)
            result = self._finished(batch, likeliest_N)
        if not step.setups:  # all that it computes was at hand when the last step ended
            self.idle_seconds = (self.idle_seconds or 0.0) + self.model.call_began - ended
        return result

    def _unusual(self, step: Step, batch: Batch, prompts: bool) -> StepResult:
        """A step with rows that want more than the likeliest token."""
        state, sampling = self._state, len(batch.rows_N)
        scored = scored_prompts(state, step, batch) if prompts else []
        logit_rows = np.concatenate([batch.last_N, *(rows for _, rows, _ in scored)])
        logits_RV, likeliest_R = self._forward(batch, logit_rows, logits=True)
        asked, widths = scored_rows(state, batch.rows_N)
        logits_AV = logits_RV[asked]  # copies: sampling may overwrite the originals
        tokens_N = sample(
            self.model.sample,
            logits_RV[:sampling],
            likeliest_R[:sampling],
            state,
            batch.rows_N,
            batch.next_positions_N,
        )
        result = self._finished(batch, tokens_N)
        scores = score(logits_AV, tokens_N[asked], widths)
        result.logprobs = dict(zip(batch.sampled_N[asked].tolist(), scores, strict=True))
        first = sampling
        for index, rows, tokens in scored:
            width = state.params(step.rows[index]).prompt_logprobs or 0
            result.prompt_logprobs[index] = score(logits_RV[first : first + len(rows)], tokens, [width] * len(rows))
            first += len(rows)
        return result

    def _forward(self, batch: Batch, logit_rows: Ints, *, logits: bool) -> tuple[Floats, Ints]:
        tokens_T = np.where(batch.tokens_T < 0, self._state.last_token_R[batch.rows_T], batch.tokens_T)
        arrays = StepArrays(
            tokens_T=tokens_T,
            positions_T=batch.positions_T,
            slots_T=batch.slots_T,
            tables_SM=batch.tables_SM,
            query_starts=batch.query_starts,
            contexts_S=batch.contexts_S,
            logit_rows_R=logit_rows,
        )
        return self.model.forward(arrays, logits=logits)

    def _finished(self, batch: Batch, tokens_N: Ints) -> StepResult:
        self._state.last_token_R[batch.rows_N] = tokens_N
        tokens_S = np.full(len(batch.contexts_S), -1, dtype=np.int32)
        tokens_S[batch.sampled_N] = tokens_N
        return StepResult(tokens_S.tolist())
