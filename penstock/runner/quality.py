"""Measures what quantisation costs on a text: perplexity, top-1 agreement and KL divergence against float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.kernels.native.decoder_reference import ReferenceDecoder, Weights, stages, untied
from penstock.kernels.native.model import NativeModel, NativeRows, NativeStep
from penstock.kernels.native.shape import tensor_shapes
from penstock.models.config import ModelConfig
from penstock.models.frequencies import inverse_frequencies, rope_magnitude

Floats = npt.NDArray[np.float32]

WINDOW = 512  # tokens of context; each window is scored on its own, as the first tokens of a prompt are
ROWS = 64  # positions whose logits are compared at a time


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over the positions of a text."""

    perplexity: float
    exact_perplexity: float  # of the same weights in float32
    top1: float  # the share of positions where both find the same token the most probable
    kl: float  # KL(float32 || quantised), natural logarithm


class ExactText:
    """A text as the model predicts it in float32, computed once, to compare others with."""

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        tokens: Sequence[int],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        parts = [tokens[start : start + WINDOW] for start in range(0, len(tokens), WINDOW)]
        self.windows = [np.array(part, dtype=np.int32) for part in parts if len(part) > 1]
        self.states: list[Floats] = []
        decoder = ReferenceDecoder(config, inverse_frequencies(config), rope_magnitude(config))
        shapes = tensor_shapes(config)
        for stage, (prefix, tensors) in enumerate(
            stages(untied(weights) if config.tie_embeddings else weights, shapes)
        ):
            if "model.embed_tokens.weight" in tensors:
                self.states = [tensors["model.embed_tokens.weight"][window] for window in self.windows]
            elif prefix:
                for number, state in enumerate(self.states):
                    self.states[number], _ = decoder.layer(stage - 1, tensors, state)
                    if progress is not None:
                        done = (stage - 1) * len(self.windows) + number + 1
                        progress(done, config.num_layers * len(self.windows))
            else:
                self.states = [decoder.normed(state) * tensors["model.norm.weight"] for state in self.states]
                self.head_VC = tensors["lm_head.weight"]

    def compare(self, model: NativeModel, progress: Callable[[int, int], None] | None = None) -> Quality:
        sums, positions = np.zeros(4), 0
        for number, (window, states) in enumerate(zip(self.windows, self.states, strict=True)):
            logits = _logits(model, window)
            for begin in range(0, len(logits), ROWS):
                exact = states[:-1][begin : begin + ROWS] @ self.head_VC.T
                sums += _differences(exact, logits[begin : begin + ROWS], window[1:][begin : begin + ROWS])
            positions += len(logits)
            if progress is not None:
                progress(number + 1, len(self.windows))
        exact_loss, loss, same, kl = (sums / positions).tolist()
        return Quality(math.exp(loss), math.exp(exact_loss), same, kl)


def _logits(model: NativeModel, tokens: npt.NDArray[np.int32]) -> Floats:
    blocks = -(-len(tokens) // model.block_size)
    rows = NativeRows(np.arange(blocks, dtype=np.int32)[None], np.zeros(1, dtype=np.int32))
    step = NativeStep(tokens.tolist(), rows=[0], starts=[0], counts=[len(tokens)], logit_rows=range(len(tokens) - 1))
    return model.forward(step, rows)[0]


def _differences(exact_TV: Floats, rough_TV: Floats, following_T: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Sums over positions: both negative log-likelihoods of the text, equal argmax, KL divergence."""
    exact, rough = _log_softmax(exact_TV), _log_softmax(rough_TV)
    each = np.arange(len(following_T))
    same = exact_TV.argmax(axis=1) == rough_TV.argmax(axis=1)
    kl = (np.exp(exact) * (exact - rough)).sum(dtype=np.float64)
    return np.array([-exact[each, following_T].sum(), -rough[each, following_T].sum(), same.sum(), kl])


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    totals = np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64))
    normalised: Floats = shifted - totals.astype(np.float32)
    return normalised
