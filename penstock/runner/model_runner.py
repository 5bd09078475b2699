"""The executor: one forward pass and one sampled token per caught-up sequence, launched ahead of being read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.request import TokenLogprob
from penstock.engine.executor import Step, StepResult
from penstock.runner.batch import Batch, build_batch
from penstock.runner.forward import Forward
from penstock.runner.row_state import Needs, RowState
from penstock.runner.sampler import sample


class ModelRunner:
    """Runs a step when its result is asked for.

    On the CPU the threads that compute a step already use every core: a step launched ahead would only compete with
    the scheduling, sending and detokenising of the one before it, and each time a computing thread loses its core all
    others wait for it at the next barrier. On two cores one sequence went from 90 to 127 tok/s without it.
    """

    runs_ahead = False

    def __init__(self, forward: Forward, state: RowState, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.idle_seconds: float | None = None
        self._forward = forward
        self._state = state
        self._block_size = block_size

    def launch(self, step: Step) -> Step:
        return step

    @torch.inference_mode()
    def collect(self, step: Step) -> StepResult:
        self._state.apply(step)
        batch = build_batch(step, self._state, self._block_size)
        scored = scored_prompts(self._state, step, batch)
        logit_rows = np.concatenate([batch.last_N, *(rows for _, rows, _ in scored)])
        logits_RV, likeliest_R = self._forward(batch, self._state, logit_rows)
        result = StepResult([-1] * len(step.rows))
        sampling = len(batch.rows_N)
        if sampling:
            logits_NV = logits_RV[:sampling]
            tokens_N = sample(logits_NV, likeliest_R[:sampling], self._state, batch.rows_N, batch.next_positions_N)
            for index, token in zip(batch.sampled_N.tolist(), tokens_N.tolist(), strict=True):
                result.tokens[index] = token
            asked, widths = scored_rows(self._state, batch.rows_N)
            if asked:
                scores = score(logits_NV[asked], tokens_N[asked], widths)
                result.logprobs = dict(zip(batch.sampled_N[asked].tolist(), scores, strict=True))
        first = sampling
        for index, rows, tokens in scored:
            width = self._state.params(step.rows[index]).prompt_logprobs or 0
            result.prompt_logprobs[index] = score(logits_RV[first : first + len(rows)], tokens, [width] * len(rows))
            first += len(rows)
        return result


def scored_prompts(state: RowState, step: Step, batch: Batch) -> list[tuple[int, npt.NDArray[np.int32], torch.Tensor]]:
    """For those that ask for prompt logprobs: the sequence, its tokens in the batch, the prompt tokens that follow."""
    found = []
    for index in np.flatnonzero(state.needs[step.rows] & Needs.PROMPT_LOGPROBS).tolist():
        start, count = step.starts[index], step.counts[index]
        following = state.prompt(step.rows[index])[start + 1 : start + 1 + count]
        if following:
            rows = batch.query_starts[index] + np.arange(len(following), dtype=np.int32)
            found.append((index, rows, torch.tensor(following)))
    return found


def scored_rows(state: RowState, rows: npt.NDArray[np.int32]) -> tuple[list[int], list[int]]:
    """Which of these rows ask for logprobs of what they sample, and how many alternatives each."""
    asked = np.flatnonzero(state.needs[rows] & Needs.LOGPROBS).tolist()
    return asked, [state.params(int(rows[i])).logprobs or 0 for i in asked]


def score(logits: torch.Tensor, tokens: torch.Tensor, widths: list[int]) -> list[TokenLogprob]:
    """Log-probabilities of these tokens under the unmodified model, and as many alternatives as each asks for."""
    values = logits.log_softmax(-1)
    own = values.gather(-1, tokens.to(values.device)[:, None])[:, 0].tolist()
    top, top_tokens = (part.tolist() for part in values.topk(max(widths), -1))
    return [
        TokenLogprob(token, own[i], tuple(zip(top_tokens[i][:width], top[i][:width], strict=True)))
        for i, (token, width) in enumerate(zip(tokens.tolist(), widths, strict=True))
    ]
