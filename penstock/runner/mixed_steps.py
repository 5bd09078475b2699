"""Steps with prompts in them on a GPU, padded to graph buckets so that most of them replay a CUDA graph.

Launching the kernels of such a step one by one takes the host 10 to 20 ms, longer than the device needs for a few
hundred tokens, or for thousands by a small model; streams would stall for it and first tokens wait. What a step reads
lies in one fixed buffer, sent in one copy. Padding has context 0, writes to no slot and samples into a spare row. Only
the number of tokens costs time, so its buckets are close together; for the number of decoding sequences there are few:
decode attention writes zeros beyond them, and attention of the prompts, which comes after, overwrites those.
T tokens, S sequences, N tokens after which one is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from penstock.kernels.triton.argmax import ArgmaxScratch, argmax
from penstock.runner.batch import Batch, Ints
from penstock.runner.device_adapters import DeviceAdapters
from penstock.runner.device_stream import DeviceStream, Graph, Pinned, captured
from penstock.runner.fused_forward import FusedForward
from penstock.runner.paged_attention import MixedStep
from penstock.runner.row_state import RowState

_DECODES = (32, 256)
_TOKENS = (128, 160, 192, 224, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
# Larger steps of a small model take the device less time than launching them takes the host, even if padded so far.
_SMALL, _TOKENS_OF_SMALL = 2_000_000_000, tuple(range(2560, 8193, 512))
_ADAPTED_TOKENS = (128, 256, 512, 1024, 2048)  # of steps with LoRA adapters
_MOST_PADDING = 512  # tokens, beyond the padding of sequences that decode
_PROMPTS = (32, 256)  # buckets; beyond, a multiple of the latter


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything is in the buffer."""

    decodes: int
    prompts: int
    tokens: int
    most_sampled: int

    @property
    def sizes(self) -> tuple[int, ...]:
        T, S, N = self.tokens, self.decodes + self.prompts, self.most_sampled
        return (T, T, T, T, S, S, S + 1, N, N)

    def split(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.split(buffer[: sum(self.sizes)], list(self.sizes)))

    def pack(self, batch: Batch, spare: int, into: Ints) -> None:
        T, N, decodes, prompts, real = self.tokens, self.most_sampled, self.decodes, self.prompts, batch.num_decodes
        starts, contexts_S = batch.query_starts, batch.contexts_S
        rows_S = batch.rows_T[starts[1:] - 1]
        at = 0
        for values, size, padding in (
            (batch.tokens_T, T, 0),
            (batch.rows_T, T, spare),
            (batch.positions_T, T, 0),
            (batch.slots_T, T, -1),
            (rows_S[:real], decodes, spare),
            (rows_S[real:], prompts, spare),
            (contexts_S[:real], decodes, 0),
            (contexts_S[real:], prompts, 0),
            (starts[:real], decodes, real),
            (starts[real:], prompts + 1, starts[-1]),
            (batch.last_N, N, 0),
            (batch.rows_N, N, spare),
        ):
            end = at + len(values)
            into[at:end] = values
            at += size
            into[end:at] = padding


class Finish(Protocol):
    """What becomes of the residual stream of all tokens of a step. Part of the graph, so it writes to fixed memory."""

    def __call__(
        self, hidden_TC: torch.Tensor, last_N: torch.Tensor, rows_N: torch.Tensor, state: RowState
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class GreedyTokens:
    """Logits where something is sampled, [N, V], and greedy tokens, [N]; these go to their rows as well, of a sequence
    that samples several of them any one."""

    forward: FusedForward
    logits: torch.Tensor
    tokens: torch.Tensor
    scratch: ArgmaxScratch

    def __call__(self, hidden_TC: torch.Tensor, last_N: torch.Tensor, rows_N: torch.Tensor, state: RowState) -> None:
        logits_NV = self.forward.logits(hidden_TC[last_N.long()], self.logits[: len(rows_N)])
        argmax(logits_NV, self.tokens, self.scratch, feed=(state.last_token_R, rows_N))


class MixedSteps:
    def __init__(
        self,
        forward: FusedForward,
        tables: torch.Tensor,
        finish: Finish,
        adapters: DeviceAdapters,
        stream: DeviceStream,
        *,
        most_sampled: int,
        max_tokens: int,
    ) -> None:
        """`tables` are the block tables of all rows, the last of which is spare."""
        self._forward = forward
        self._stream = stream
        self._tables = tables
        self._finish = finish
        self._adapters = adapters
        self._most_sampled = most_sampled
        self._max_seqs = len(tables) - 1
        self._decodes = [size for size in _DECODES if size < self._max_seqs] + [self._max_seqs]
        self._prompts = _PROMPTS if self._max_seqs > _PROMPTS[0] else _PROMPTS[:1]
        buckets = _TOKENS + _TOKENS_OF_SMALL if forward.parameters < _SMALL else _TOKENS
        self._tokens = [size for size in buckets if size <= max_tokens]
        self._adapted_tokens = [size for size in self._tokens if size in _ADAPTED_TOKENS and adapters.slots]
        self._max_tokens = max_tokens
        largest = self._layout(self._max_seqs, most_sampled, max_tokens)
        self.size = sum(largest.sizes)
        self._inputs = torch.zeros(self.size, dtype=torch.int32, device=tables.device)
        self._graphs: dict[tuple[Layout, bool], Graph] = {}

    def run(self, batch: Batch, state: RowState, staged: Pinned) -> None:
        """Inputs go through `staged`, `size` values that nobody writes until the step is done."""
        decodes = batch.num_decodes
        prompts = max(len(batch.contexts_S), len(batch.last_N)) - decodes
        tokens = max(len(batch.tokens_T), self._padded_decodes(decodes))
        slots_T = state.adapter[batch.rows_T]
        if adapted := self._adapters.used(slots_T):
            tokens = next((size for size in self._adapted_tokens if size >= tokens), tokens)
        layout = self._layout(decodes, prompts, tokens)
        if adapted:
            self._adapters.send(slots_T, layout.tokens)
        layout.pack(batch, self._max_seqs, staged.values)
        self._stream.send(self._inputs.data_ptr(), staged.address, 4 * sum(layout.sizes))
        if (layout, adapted) in self._graphs:
            self._graphs[layout, adapted].replay()
        else:
            self._body(layout, state, adapted)

    def padded(self, tokens: int) -> int:
        return next((size for size in self._tokens if size >= tokens), -(-tokens // 256) * 256)

    def _padded_decodes(self, decodes: int) -> int:
        return next(size for size in self._decodes if size >= decodes)

    def _layout(self, decodes: int, prompts: int, tokens: int) -> Layout:
        """The smallest bucket that holds this; beyond the largest, one of not too many layouts without a graph."""
        decodes = self._padded_decodes(decodes)
        most = self._prompts[-1]
        prompts = next((size for size in self._prompts if size >= prompts), -(-prompts // most) * most)
        tokens = self.padded(max(tokens, decodes))
        return Layout(decodes, prompts, tokens, min(self._most_sampled, decodes + prompts))

    def _body(self, layout: Layout, state: RowState, adapted: bool, layers: int | None = None) -> None:
        forward = self._forward
        tokens_T, rows_T, positions_T, slots_T, rows_S, contexts_S, starts, last_N, rows_N = layout.split(self._inputs)
        tokens_T = torch.where(tokens_T < 0, state.last_token_R[rows_T.long()].int(), tokens_T)
        tables_SM = self._tables[rows_S.long()]
        padding = min(layout.tokens, _MOST_PADDING)
        step = MixedStep(positions_T, slots_T, tables_SM, starts, contexts_S, layout.decodes, layout.tokens, padding)
        adapters = self._adapters.of_step(layout.tokens) if adapted else None
        hidden_TC = forward.hidden(
            F.embedding(tokens_T, forward.embedding), forward.attention.attend_mixed(step), layers, adapters
        )
        self._finish(hidden_TC, last_N, rows_N, state)

    @property
    def layouts(self) -> list[tuple[Layout, bool]]:
        """Those that have a graph, with LoRA adapters or without; they use every kernel. The largest come first:
        smaller ones share their memory.

        Among them are full steps, which a long queue makes one after the other, of few prompts or many.
        """
        largest_first = self._decodes[::-1]
        sizes = [(decodes, prompts, self._max_tokens) for prompts in self._prompts for decodes in largest_first]
        for tokens in reversed(self._tokens):
            most = _DECODES[-1] if tokens in _TOKENS else _DECODES[0]
            sizes += [(decodes, self._prompts[0], tokens) for decodes in largest_first if decodes <= most]
        plain = list(dict.fromkeys(self._layout(*size) for size in sizes))
        adapted = [layout for layout in plain if layout.tokens in self._adapted_tokens]
        return [(layout, True) for layout in adapted] + [(layout, False) for layout in plain]

    def compile(self, layout: Layout, adapted: bool, state: RowState) -> None:
        """Run the kernels of a layout once, on padding. Inputs must be all padding."""
        self._body(layout, state, adapted, self._forward.distinct_layers)

    def pad(self) -> None:
        """Make everything in the buffer padding, as compiling and capturing need it: block 0 may be written."""
        self._inputs.zero_()

    def capture_all(self, state: RowState, pool: Any) -> int:
        self.pad()
        for layout, adapted in self.layouts:
            self._graphs[layout, adapted] = captured(partial(self._body, layout, state, adapted), pool, self._stream)
        return len(self._graphs)
