"""Samples tokens from logits in torch. Sampling is a pure function of (seed, position, logits).

Random choice is the Gumbel-max trick: token = argmax(logits / temperature + g), with g drawn by Philox4x32-10, a
counter-based generator, for each (seed, position, token). No state is carried from step to step, so the same request
gives the same tokens whatever it is batched with and wherever it is resumed. N sequences, V vocabulary, C candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.executor import NOT_A_NUMBER, TokenMask
from penstock.runner.row_state import TorchRows
from penstock.runner.rows import Needs
from penstock.runner.transfer import to_device

_MASK = 0xFFFFFFFF
# Sorting a vocabulary is slow; the nucleus nearly always lies within this many of the top tokens.
_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class Draws:
    """How the rows of one call are drawn, on the device of their logits."""

    temperature_N: torch.Tensor
    seeds_N: torch.Tensor
    positions_N: torch.Tensor
    top_k_N: torch.Tensor  # 0: off
    top_p_N: torch.Tensor  # 1: off
    min_p_N: torch.Tensor  # 0: off
    filtered: bool  # whether any of the last three is on


def sample(
    logits_NV: torch.Tensor,
    greedy_N: torch.Tensor,
    state: TorchRows,
    rows: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    masks: Mapping[int, TokenMask] | None = None,
) -> torch.Tensor:
    """Choose one token per row and remember it there. `greedy_N` is the argmax, which greedy rows take as it is.
    NOT_A_NUMBER where a logit is NaN."""
    device = logits_NV.device
    needs = state.needs[rows]
    rows_N = to_device(rows, device)
    tokens_N = greedy_N
    if needs.any():
        tokens_N = _sample_unusual(logits_NV, greedy_N, state, rows, positions, needs, masks or {})
        penalised = _only(needs, Needs.PENALTIES)
        if len(penalised):
            index = to_device(penalised, device)
            state.counts_RV[rows_N[index], tokens_N[index]] += 1
    largest_N = logits_NV.gather(-1, greedy_N[:, None])[:, 0]  # NaN if any logit is
    tokens_N = torch.where(largest_N.isnan(), NOT_A_NUMBER, tokens_N)
    state.last_token_R[rows_N] = tokens_N.clamp(min=0)
    return tokens_N


def _sample_unusual(
    logits_NV: torch.Tensor,
    tokens_N: torch.Tensor,
    state: TorchRows,
    rows: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    needs: npt.NDArray[np.uint8],
    masks: Mapping[int, TokenMask],
) -> torch.Tensor:
    if (needs & (Needs.BIAS | Needs.PENALTIES | Needs.MIN_TOKENS | Needs.GRAMMAR)).any():
        logits_NV = _adjust(logits_NV.clone(), state, rows, needs, positions)
        for i, mask in masks.items():
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: logits_NV.shape[1]]
            logits_NV[i, to_device(allowed, logits_NV.device) == 0] = float("-inf")
        tokens_N = logits_NV.argmax(-1)
    for which, filtered in ((_only(needs, Needs.RANDOM, Needs.FILTER), False), (_only(needs, Needs.FILTER), True)):
        if len(which):
            index = to_device(which, logits_NV.device)
            draws = _draws(state, rows[which], positions[which], filtered, logits_NV.device)
            tokens_N = tokens_N.index_copy(0, index, _choose(logits_NV[index], draws))
    return tokens_N


def _only(needs: npt.NDArray[np.uint8], has: Needs, lacks: Needs = Needs.NOTHING) -> npt.NDArray[np.int64]:
    """Indices of the rows that have one need and lack another."""
    return np.flatnonzero(((needs & has) != 0) & ((needs & lacks) == 0))


def _adjust(
    logits_NV: torch.Tensor,
    state: TorchRows,
    rows: npt.NDArray[np.int32],
    needs: npt.NDArray[np.uint8],
    positions: npt.NDArray[np.int32],
) -> torch.Tensor:
    for i in np.flatnonzero(needs & (Needs.BIAS | Needs.PENALTIES)):
        row, logits = int(rows[i]), logits_NV[i]
        if needs[i] & Needs.BIAS:
            logits += state.bias_RV[row]
        if needs[i] & Needs.PENALTIES:
            counts = state.counts_RV[row]
            seen = (counts > 0) | state.prompt_RV[row]
            params = state.params(row)
            repetition = params.repetition_penalty
            logits.copy_(
                torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
                - params.frequency_penalty * counts
                - params.presence_penalty * (counts > 0)
            )
    for i in _only(needs, Needs.MIN_TOKENS):
        forbidden = state.forbidden(int(rows[i]), int(positions[i]))
        if forbidden:
            logits_NV[i, list(forbidden)] = float("-inf")
    return logits_NV


def _draws(
    state: TorchRows,
    rows: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    filtered: bool,
    device: torch.device,
) -> Draws:
    def put(values: npt.NDArray[Any]) -> torch.Tensor:
        return to_device(values, device)

    return Draws(
        temperature_N=put(state.temperature[rows]),
        seeds_N=put(state.seed[rows]),
        positions_N=put(positions),
        top_k_N=put(state.top_k[rows]),
        top_p_N=put(state.top_p[rows]),
        min_p_N=put(state.min_p[rows]),
        filtered=filtered,
    )


def _choose(logits_NV: torch.Tensor, draws: Draws) -> torch.Tensor:
    scaled_NV = logits_NV / draws.temperature_N[:, None]
    if not draws.filtered:
        return (scaled_NV + gumbel(draws.seeds_N, draws.positions_N, scaled_NV.shape[-1])).argmax(-1)
    values_NC, tokens_NC = _candidates(scaled_NV, draws.top_k_N, draws.top_p_N, draws.min_p_N)
    noise_NC = gumbel_of(draws.seeds_N, draws.positions_N, tokens_NC)
    best_N = (values_NC + noise_NC).argmax(-1, keepdim=True)
    return tokens_NC.gather(-1, best_N)[:, 0]


def _candidates(
    scaled_NV: torch.Tensor, top_k_N: torch.Tensor, top_p_N: torch.Tensor, min_p_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top tokens in descending order, with -inf for those that top-k, top-p or min-p exclude."""
    vocab = scaled_NV.shape[-1]
    width = min(_CANDIDATES, vocab)
    total_N1 = scaled_NV.logsumexp(-1, keepdim=True)
    while True:
        values_NC, tokens_NC = scaled_NV.topk(width, -1)
        mass_NC = (values_NC - total_N1).exp().cumsum(-1)
        unlikely_N = values_NC[:, -1] < values_NC[:, 0] + min_p_N.log()
        enough_N = (mass_NC[:, -1] >= top_p_N) | ((top_k_N > 0) & (top_k_N <= width)) | unlikely_N
        if width == vocab or bool(enough_N.all()):
            break
        width = vocab
    rank_C = torch.arange(width, device=scaled_NV.device)
    limit_N = torch.where(top_k_N > 0, top_k_N.clamp(max=vocab), vocab)
    # With both, top-p is taken of what top-k leaves, renormalised.
    within_NC = rank_C < limit_N[:, None]
    kept_N1 = mass_NC.gather(-1, limit_N.clamp(max=width)[:, None].long() - 1)
    kept_N1 = torch.where(limit_N[:, None] >= vocab, torch.ones_like(kept_N1), kept_N1)
    before_NC = mass_NC - (values_NC - total_N1).exp()  # mass of those before it; the first is always kept
    keep_NC = within_NC & ((before_NC < top_p_N[:, None] * kept_N1) | (rank_C == 0))
    keep_NC &= values_NC >= values_NC[:, :1] + min_p_N[:, None].log()
    return values_NC.masked_fill(~keep_NC, float("-inf")), tokens_NC


def gumbel(seeds_N: torch.Tensor, positions_N: torch.Tensor, vocab: int) -> torch.Tensor:
    """Noise for the whole vocabulary: each counter gives four tokens theirs."""
    groups = torch.arange(-(-vocab // 4), device=seeds_N.device).expand(len(seeds_N), -1)
    words = torch.stack(philox(seeds_N, positions_N, groups), -1).flatten(1)[:, :vocab]
    return _to_gumbel(words)


def gumbel_of(seeds_N: torch.Tensor, positions_N: torch.Tensor, tokens_NC: torch.Tensor) -> torch.Tensor:
    """Noise for some tokens only; the same numbers as `gumbel` gives them."""
    words = torch.stack(philox(seeds_N, positions_N, tokens_NC // 4), -1)
    return _to_gumbel(words.gather(-1, (tokens_NC % 4)[..., None])[..., 0])


def _to_gumbel(words: torch.Tensor) -> torch.Tensor:
    # 23 bits and a half, so that float32 holds the number exactly and neither 0 nor 1 occurs.
    uniform = ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def philox(seeds_N: torch.Tensor, positions_N: torch.Tensor, groups_NC: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10 with key = seed and counter = (group, position, 0, 0): four 32-bit words per group, in int64.

    32-bit products overflow int64's sign but not its 64 bits, so masking recovers both halves.
    """
    key0, key1 = (seeds_N & _MASK)[:, None], ((seeds_N >> 32) & _MASK)[:, None]
    c0, c1 = groups_NC & _MASK, (positions_N & _MASK)[:, None].expand_as(groups_NC)
    c2 = c3 = torch.zeros_like(groups_NC)
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ key0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ key1,
            product0 & _MASK,
        )
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3
