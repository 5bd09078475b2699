"""The executor in plain torch, on any device: one forward pass per step, and one sampled token per sequence."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from penstock.core.request import TokenLogprob
from penstock.engine.executor import Step, StepResult, TokenMask, at_most_one_each
from penstock.runner import scoring
from penstock.runner.batch import Ints, build_batch
from penstock.runner.forward import Forward
from penstock.runner.row_state import TorchRows
from penstock.runner.sampler import sample
from penstock.runner.scoring import scored_rows as scored_rows
from penstock.runner.torch_adapters import TorchAdapters


class ModelRunner:
    """Runs a step when its result is collected: on a CPU, a step launched ahead would compete with the scheduling."""

    runs_ahead = False
    host_memory = None

    def __init__(
        self,
        forward: Forward,
        state: TorchRows,
        adapters: TorchAdapters | None = None,
        *,
        num_blocks: int,
        block_size: int,
    ) -> None:
        self.num_blocks = num_blocks
        self.idle_seconds: float | None = None
        self._forward = forward
        self._state = state
        self._adapters = adapters
        self.adapter_modules: Mapping[str, tuple[int, int]] = adapters.modules if adapters is not None else {}
        self._block_size = block_size
        self._masks: Mapping[int, TokenMask] = {}  # of the step that is collected next

    def enter_thread(self) -> None:
        """Nothing to prepare."""

    def padded_tokens(self, tokens: int) -> int:
        return tokens

    def launch(self, step: Step) -> Step:
        return step

    def constrain(self, step: Step, masks: Mapping[int, TokenMask]) -> None:
        self._masks = masks

    @torch.inference_mode()
    def collect(self, step: Step) -> StepResult:
        self._state.apply(step)
        batch = build_batch(step, self._state, self._block_size)
        if self._adapters is not None:
            self._adapters.apply(step, self._state.adapter[batch.rows_T])
        scored = scored_prompts(self._state, step)
        logit_rows = np.concatenate([batch.last_N, *(rows for _, rows, _ in scored)])
        logits_RV, greedy_R = self._forward(batch, self._state, logit_rows)
        result = StepResult([[] for _ in step.rows])
        sampling = len(batch.rows_N)
        if sampling:
            logits_NV = logits_RV[:sampling]
            masks, self._masks = self._masks, {}
            tokens_N = sample(
                logits_NV,
                greedy_R[:sampling],
                self._state,
                batch.rows_N,
                batch.next_positions_N,
                masks={i: masks[s] for i, s in enumerate(batch.sampled_N.tolist()) if s in masks},
            )
            result.tokens = at_most_one_each(step.samples, tokens_N.tolist())
            asked, widths = scored_rows(self._state, batch.rows_N)
            if asked:
                scores = score(logits_NV[asked], tokens_N[asked], widths)
                result.logprobs = {
                    index: [one] for index, one in zip(batch.sampled_N[asked].tolist(), scores, strict=True)
                }
        first = sampling
        for index, rows, tokens in scored:
            width = self._state.params(step.rows[index]).prompt_logprobs or 0
            result.prompt_logprobs[index] = score(logits_RV[first : first + len(rows)], tokens, [width] * len(rows))
            first += len(rows)
        return result


def scored_prompts(state: TorchRows, step: Step) -> list[tuple[int, Ints, torch.Tensor]]:
    found = scoring.scored_prompts(state, step)
    return [(index, rows, torch.from_numpy(tokens).long()) for index, rows, tokens in found]


def score(logits: torch.Tensor, tokens: torch.Tensor, widths: list[int]) -> list[TokenLogprob]:
    """Log-probabilities of these tokens under the unmodified model, and as many alternatives as each asks for."""
    values = logits.log_softmax(-1)
    own = values.gather(-1, tokens.to(values.device)[:, None])[:, 0].tolist()
    top, top_tokens = (part.tolist() for part in values.topk(max(widths), -1))
    return [
        TokenLogprob(token, own[i], tuple(zip(top_tokens[i][:width], top[i][:width], strict=True)))
        for i, (token, width) in enumerate(zip(tokens.tolist(), widths, strict=True))
    ]
