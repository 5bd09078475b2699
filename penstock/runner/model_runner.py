"""The executor in plain torch, on any device: one forward pass per step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.request import TokenLogprob
from penstock.engine.executor import UNDECIDED, AdapterWeights, Step, StepResult, TokenMask, masks_by_sequence
from penstock.runner import scoring
from penstock.runner.batch import Batch, Ints, build_batch
from penstock.runner.forward import Forward
from penstock.runner.row_state import TorchRows
from penstock.runner.rows import Needs
from penstock.runner.sampler import sample
from penstock.runner.scoring import scored_rows as scored_rows
from penstock.runner.torch_adapters import TorchAdapters


class ModelRunner:
    """Runs a step when its result is collected: on a CPU, a step launched ahead would compete with the scheduling."""

    runs_ahead = False
    verifies_drafts = True
    host_memory = None
    device = "plain torch"
    kernel_probe = None

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
        self.mask_memory: TokenMask | None = None
        self._forward = forward
        self._state = state
        self._adapters = adapters
        self.adapter_modules: Mapping[str, tuple[int, int]] = adapters.modules if adapters is not None else {}
        self._block_size = block_size
        self._masks: TokenMask | None = None  # of the step that is collected next
        # Of the last step, with its logits and their argmax, and after which tokens they are: what `resample` samples.
        self._kept: tuple[Batch, torch.Tensor, torch.Tensor, Ints] | None = None

    def enter_thread(self) -> None:
        """Nothing to prepare."""

    def prepare_adapter(self, adapter: AdapterWeights) -> None:
        """Nothing to prepare."""

    def padded_tokens(self, tokens: int) -> int:
        return tokens

    def launch(self, step: Step) -> Step:
        return step

    def constrain(self, step: Step, masks: TokenMask) -> None:
        self._masks = masks

    @torch.inference_mode()
    def collect(self, step: Step) -> StepResult:
        self._state.apply(step)
        batch = build_batch(step, self._state, self._block_size)
        if self._adapters is not None:
            self._adapters.apply(step, self._state.adapter[batch.rows_T])
        scored = scored_prompts(self._state, step)
        samples_S = np.array(step.samples)
        ends_S = samples_S.cumsum()
        sampled = [
            np.arange(end - n, end) for end, n in zip(batch.query_starts[1:].tolist(), step.samples, strict=True)
        ]
        logit_rows = np.concatenate([*sampled, *(rows for _, rows, _ in scored)]).astype(np.int32)
        logits_RV, greedy_R = self._forward(batch, self._state, logit_rows)
        result = StepResult([[] for _ in step.rows])
        masks, self._masks = {} if self._masks is None else masks_by_sequence(step, self._masks), None
        self._kept = (batch, logits_RV, greedy_R, logit_rows) if step.checked else None
        # Every sequence samples its first position, then those whose draft was right so far their second, and so on.
        going, depth = np.flatnonzero(samples_S), 0
        while len(going):
            at = ends_S[going] - samples_S[going] + depth
            tokens = self._sample(batch, going, logits_RV[at], greedy_R[at], logit_rows[at], masks, depth, result)
            depth += 1
            more = samples_S[going] > depth
            drafted = batch.tokens_T[logit_rows[at[more]] + 1]
            going = going[more][drafted == tokens[more]]
        for index in step.checked:
            if self._state.needs[step.rows[index]] & Needs.FILTER:
                result.tokens[index] = [UNDECIDED]
        first = int(ends_S[-1])
        for index, rows, following in scored:
            width = self._state.params(step.rows[index]).prompt_logprobs or 0
            result.prompt_logprobs[index] = score(logits_RV[first : first + len(rows)], following, [width] * len(rows))
            first += len(rows)
        return result

    @torch.inference_mode()
    def resample(self, step: Step, masks: Mapping[int, TokenMask]) -> list[int]:
        assert self._kept is not None, "no sequence of the step is checked"
        batch, logits_RV, greedy_R, logit_rows = self._kept
        indices = np.array(list(masks))
        at = np.array(step.samples).cumsum()[indices] - 1
        result = StepResult([[] for _ in step.rows])
        tokens = self._sample(batch, indices, logits_RV[at], greedy_R[at], logit_rows[at], masks, 0, result)
        return [int(token) for token in tokens]

    def _sample(
        self,
        batch: Batch,
        sequences: npt.NDArray[np.int64],
        logits_NV: torch.Tensor,
        greedy_N: torch.Tensor,
        after_N: Ints,
        masks: Mapping[int, TokenMask],
        depth: int,
        result: StepResult,
    ) -> npt.NDArray[np.int64]:
        """One token for each of these sequences, after these tokens of the batch; `depth` of each came before it."""
        rows, positions = batch.rows_T[after_N], batch.positions_T[after_N] + np.int32(1)
        chosen = {i: np.atleast_2d(masks[index])[depth] for i, index in enumerate(sequences.tolist()) if index in masks}
        tokens_N = sample(logits_NV, greedy_N, self._state, rows, positions, chosen)
        tokens: npt.NDArray[np.int64] = tokens_N.cpu().numpy()
        for index, token in zip(sequences.tolist(), tokens.tolist(), strict=True):
            result.tokens[index].append(token)
        asked, widths = scored_rows(self._state, rows)
        if asked:
            scores = score(logits_NV[asked], tokens_N[asked], widths)
            for index, one in zip(sequences[asked].tolist(), scores, strict=True):
                result.logprobs.setdefault(index, []).append(one)
        return tokens


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
