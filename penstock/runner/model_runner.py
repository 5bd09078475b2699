"""The executor: one forward pass and one sampled token per caught-up sequence, launched ahead of being read."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

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
    """Steps run one after the other on a thread of their own, so that `launch` returns at once."""

    def __init__(self, forward: Forward, state: RowState, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self._forward = forward
        self._state = state
        self._block_size = block_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="runner")

    def launch(self, step: Step) -> Future[StepResult]:
        return self._thread.submit(self._run, step)

    def collect(self, handle: Future[StepResult]) -> StepResult:
        return handle.result()

    @torch.inference_mode()
    def _run(self, step: Step) -> StepResult:
        self._state.apply(step)
        batch = build_batch(step, self._state, self._block_size)
        scored = self._scored_prompts(step, batch)
        logit_rows = np.concatenate([batch.last_N, *(rows for _, rows, _ in scored)])
        logits_RV, likeliest_R = self._forward(batch, self._state, logit_rows)
        result = StepResult([-1] * len(step.rows))
        sampling = len(batch.rows_N)
        if sampling:
            logits_NV = logits_RV[:sampling]
            tokens_N = sample(logits_NV, likeliest_R[:sampling], self._state, batch.rows_N, batch.next_positions_N)
            for index, token in zip(batch.sampled_N.tolist(), tokens_N.tolist(), strict=True):
                result.tokens[index] = token
            self._score_output(batch, logits_NV, tokens_N, result)
        first = sampling
        for index, rows, tokens in scored:
            width = self._state.params(step.rows[index]).prompt_logprobs or 0
            result.prompt_logprobs[index] = score(logits_RV[first : first + len(rows)], tokens, [width] * len(rows))
            first += len(rows)
        return result

    def _scored_prompts(self, step: Step, batch: Batch) -> list[tuple[int, npt.NDArray[np.int32], torch.Tensor]]:
        """(sequence, its tokens in the batch, the prompt tokens that follow them) for those that ask for prompt
        logprobs."""
        found = []
        for index in np.flatnonzero(self._state.needs[step.rows] & Needs.PROMPT_LOGPROBS).tolist():
            start, count = step.starts[index], step.counts[index]
            following = self._state.prompt(step.rows[index])[start + 1 : start + 1 + count]
            if following:
                rows = batch.query_starts[index] + np.arange(len(following), dtype=np.int32)
                found.append((index, rows, torch.tensor(following)))
        return found

    def _score_output(self, batch: Batch, logits_NV: torch.Tensor, tokens_N: torch.Tensor, result: StepResult) -> None:
        asked = np.flatnonzero(self._state.needs[batch.rows_N] & Needs.LOGPROBS).tolist()
        if asked:
            widths = [self._state.params(int(batch.rows_N[i])).logprobs or 0 for i in asked]
            scores = score(logits_NV[asked], tokens_N[asked], widths)
            result.logprobs = dict(zip(batch.sampled_N[asked].tolist(), scores, strict=True))


def score(logits: torch.Tensor, tokens: torch.Tensor, widths: list[int]) -> list[TokenLogprob]:
    """Log-probabilities of these tokens under the unmodified model, and as many alternatives as each asks for."""
    values = logits.log_softmax(-1)
    own = values.gather(-1, tokens.to(values.device)[:, None])[:, 0].tolist()
    top, top_tokens = (part.tolist() for part in values.topk(max(widths), -1))
    return [
        TokenLogprob(token, own[i], tuple(zip(top_tokens[i][:width], top[i][:width], strict=True)))
        for i, (token, width) in enumerate(zip(tokens.tolist(), widths, strict=True))
    ]
