"""The executor: one forward pass and one sampled token per caught-up sequence, launched ahead of being read."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from penstock.core.request import TokenLogprob
from penstock.engine.executor import Step, StepResult
from penstock.kernels.base import AttentionBackend
from penstock.models.base import CausalLM
from penstock.runner.batch import Batch, build_batch
from penstock.runner.row_state import Needs, RowState
from penstock.runner.sampler import sample

# Logits for prompt positions are made this many at a time, to bound memory by tokens times vocabulary.
_PROMPT_LOGITS = 256


@dataclass(slots=True)
class _Logprobs:
    """Of some tokens under the unmodified model: their own and the best alternatives'."""

    tokens: torch.Tensor
    own: torch.Tensor
    top: torch.Tensor
    top_tokens: torch.Tensor

    def read(self, widths: list[int]) -> list[TokenLogprob]:
        rows = zip(self.tokens.tolist(), self.own.tolist(), self.top_tokens.tolist(), self.top.tolist(), strict=True)
        return [
            TokenLogprob(token, own, tuple(zip(ids[:width], values[:width], strict=True)))
            for (token, own, ids, values), width in zip(rows, widths, strict=True)
        ]


@dataclass(slots=True)
class _Outputs:
    sequences: int
    sampled: list[int]
    tokens_N: torch.Tensor
    logprobs: tuple[list[int], list[int], _Logprobs] | None = None  # (indices in the step, widths, values)
    prompt_logprobs: list[tuple[int, int, _Logprobs]] = field(default_factory=list)  # (index, width, values)

    def read(self) -> StepResult:
        tokens = [-1] * self.sequences
        for index, token in zip(self.sampled, self.tokens_N.tolist(), strict=True):
            tokens[index] = token
        result = StepResult(tokens)
        if self.logprobs is not None:
            indices, widths, values = self.logprobs
            result.logprobs = dict(zip(indices, values.read(widths), strict=True))
        for index, width, values in self.prompt_logprobs:
            result.prompt_logprobs.setdefault(index, []).extend(values.read([width] * len(values.tokens)))
        return result


class ModelRunner:
    """Steps run one after the other on a thread of their own, so that `launch` returns at once."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        state: RowState,
        *,
        num_blocks: int,
        block_size: int,
    ) -> None:
        self.num_blocks = num_blocks
        self._model = model
        self._attention = attention
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
        self._attention.plan(batch.attention)
        hidden_TD = self._model.forward(batch.tokens_T, batch.positions_T, self._attention)
        outputs = _Outputs(len(step.rows), batch.sampled, batch.rows_N)
        if batch.sampled:
            logits_NV = self._model.logits(hidden_TD[batch.last_N])
            outputs.tokens_N = sample(logits_NV, self._state, batch.rows_N, batch.rows, batch.next_positions_N)
            outputs.logprobs = self._output_logprobs(batch, logits_NV, outputs.tokens_N)
        outputs.prompt_logprobs = self._prompt_logprobs(step, hidden_TD)
        return outputs.read()

    def _output_logprobs(
        self, batch: Batch, logits_NV: torch.Tensor, tokens_N: torch.Tensor
    ) -> tuple[list[int], list[int], _Logprobs] | None:
        asked = [i for i, row in enumerate(batch.rows) if self._state.needs[row] & Needs.LOGPROBS]
        if not asked:
            return None
        widths = [self._state.params(int(batch.rows[i])).logprobs or 0 for i in asked]
        values = _logprobs(logits_NV[asked], tokens_N[asked], max(widths))
        return [batch.sampled[i] for i in asked], widths, values

    def _prompt_logprobs(self, step: Step, hidden_TD: torch.Tensor) -> list[tuple[int, int, _Logprobs]]:
        found, offset = [], 0
        for index, (row, start, count) in enumerate(zip(step.rows, step.starts, step.counts, strict=True)):
            if self._state.needs[row] & Needs.PROMPT_LOGPROBS:
                width = self._state.params(row).prompt_logprobs or 0
                following = self._state.prompt(row)[start + 1 : start + 1 + count]
                for first in range(0, len(following), _PROMPT_LOGITS):
                    tokens = torch.tensor(following[first : first + _PROMPT_LOGITS], device=hidden_TD.device)
                    hidden = hidden_TD[offset + first : offset + first + len(tokens)]
                    found.append((index, width, _logprobs(self._model.logits(hidden), tokens, width)))
            offset += count
        return found


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, width: int) -> _Logprobs:
    values = logits.log_softmax(-1)
    top, top_tokens = values.topk(width, -1)
    return _Logprobs(tokens, values.gather(-1, tokens[:, None])[:, 0], top, top_tokens)
