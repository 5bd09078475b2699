"""LoRA adapters on a GPU: the slots, filled by one copy each, and which tokens of a step use which.

Everything that CUDA graphs read lies in fixed buffers. How many tokens each adapter has is decided on the host, which
knows the rows of a step: tokens are sorted by slot and cut into tiles of one slot each. T tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch

from penstock.engine.executor import NO_ADAPTER, AdapterWeights
from penstock.kernels.triton.lora import RANK_STEP, TILE_FIELDS, AdapterTiles, LowRank
from penstock.runner.batch import Ints

_FEW = 256  # tokens; steps of more have larger tiles
_ROWS_OF_FEW, _ROWS_OF_MANY = 16, 32  # tokens of a tile


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Of a decoder layer: its inputs and the outputs of its linear modules."""

    hidden: int
    qkv: tuple[int, int, int]
    inner: int | None  # of a dense MLP; None: it has experts, whose modules have no adapters


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    qkv: LowRank
    out: LowRank
    gate_up: LowRank | None
    down: LowRank | None

    @property
    def projections(self) -> list[LowRank]:
        """In the order of the slots, without a gap, and of the forward pass."""
        return [one for one in (self.qkv, self.out, self.gate_up, self.down) if one is not None]

    @property
    def names(self) -> Iterator[tuple[str, LowRank, int]]:
        """Modules within the layer by their names in checkpoints: whose they are, and as which one."""
        yield from ((f"self_attn.{name}_proj", self.qkv, i) for i, name in enumerate("qkv"))
        yield "self_attn.o_proj", self.out, 0
        if self.gate_up and self.down:
            yield from ((f"mlp.{name}_proj", self.gate_up, i) for i, name in enumerate(("gate", "up")))
            yield "mlp.down_proj", self.down, 0


@dataclass(frozen=True, slots=True)
class Adapted:
    """The LoRA adapters of a step."""

    layers: Sequence[LayerAdapters]
    tiles: AdapterTiles


class DeviceAdapters:
    def __init__(
        self,
        shapes: Sequence[AdapterShape],
        *,
        slots: int,
        max_rank: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._device = device
        self.slots = slots
        self._ranks = np.zeros(slots, dtype=np.int32)
        padded = _padded_rank(max_rank)
        elements = sum(_elements(shape) for shape in shapes)
        self._weights = torch.zeros((slots, padded * elements), dtype=dtype, device=device)
        self.layers: list[LayerAdapters] = []
        offset = 0
        for shape in shapes:
            self.layers.append(_layer(shape, self._weights, offset, padded))
            offset += _elements(shape)
        self._places = {
            f"model.layers.{number}.{name}": (low, module)
            for number, layer in enumerate(self.layers)
            for name, low, module in layer.names
        }
        self.modules: Mapping[str, tuple[int, int]] = {
            name: (low.inputs, low.outputs[module]) for name, (low, module) in self._places.items()
        }
        self._order = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        most = max(_most_tiles(tokens, slots) for tokens in (min(max_tokens, _FEW), max_tokens))
        # Nobody has an adapter yet: GEMMs that are compiled side by side must not wait for their own CTAs.
        self._tiles = torch.full((most, TILE_FIELDS), NO_ADAPTER, dtype=torch.int32, device=device)
        self._sent: tuple[int, bytes, bytes] | None = None  # what the buffers hold
        self._packed: OrderedDict[str, torch.Tensor] = OrderedDict()  # by digest, least recently used first
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        return self._weights.nbytes

    def used(self, slots: Ints) -> bool:
        """Whether a step with tokens of these slots has any with an adapter."""
        return self.slots > 0 and bool(slots.max(initial=NO_ADAPTER) != NO_ADAPTER)

    def prepare(self, adapter: AdapterWeights) -> torch.Tensor:
        """An adapter as it lies in a slot, in pinned memory. Any thread may do this before the adapter is used; those
        used last are kept."""
        with self._lock:
            if (found := self._packed.get(adapter.digest)) is not None:
                self._packed.move_to_end(adapter.digest)
                return found
        packed = self._pack(adapter)
        with self._lock:
            self._packed[adapter.digest] = packed
            while len(self._packed) > 2 * self.slots:
                self._packed.popitem(last=False)
        return packed

    def fill(self, slot: int, adapter: AdapterWeights) -> None:
        """From the next step on. No step under way uses the slot."""
        packed = self.prepare(adapter)
        self._weights[slot, : len(packed)].copy_(packed, non_blocking=True)
        self._ranks[slot] = _padded_rank(adapter.rank)

    def send(self, slots: Ints, tokens: int) -> None:
        """Which slot each token of a step uses (`NO_ADAPTER`: none); it is padded to `tokens`."""
        asked = (tokens, slots.tobytes(), self._ranks.tobytes())
        if asked == self._sent:  # as it usually is while the same sequences decode
            return
        self._sent = asked
        padded = np.full(tokens, NO_ADAPTER, dtype=np.int32)
        padded[: len(slots)] = slots
        found = grouped(padded, self._ranks, self.slots)
        self._copy(self._order[:tokens], found.order)
        self._copy(self._tiles[: len(found.tiles)], found.tiles)

    def of_step(self, tokens: int) -> Adapted:
        """What `send` has filled for a step that is padded to so many tokens."""
        most = _most_tiles(tokens, self.slots)
        return Adapted(self.layers, AdapterTiles(self._order[:tokens], self._tiles[:most], _tile_rows(tokens)))

    def _pack(self, adapter: AdapterWeights) -> torch.Tensor:
        rank, last = _padded_rank(adapter.rank), self.layers[-1]
        size = rank * (last.down or last.out).end
        packed = torch.zeros((1, size), dtype=self._weights.dtype, pin_memory=self._device.type == "cuda")
        for name, (a, b) in adapter.modules.items():
            low, module = self._places[name]
            a_all, b_all = low.within(packed).matrices(0, rank)
            begin = sum(low.outputs[:module])
            a_all[module, : len(a)] = torch.from_numpy(a)
            b_all[begin : begin + low.outputs[module], : b.shape[1]] = torch.from_numpy(b)
        return packed[0]

    def _copy(self, buffer: torch.Tensor, values: Ints) -> None:
        source = torch.from_numpy(values)
        buffer.copy_(source.pin_memory() if buffer.is_cuda else source, non_blocking=True)


def no_adapters(device: torch.device) -> DeviceAdapters:
    return DeviceAdapters([], slots=0, max_rank=1, max_tokens=0, dtype=torch.float32, device=device)


class _Grouped(NamedTuple):
    order: Ints  # [T]
    tiles: Ints  # [tiles, TILE_FIELDS]


def grouped(slots_T: Ints, ranks: Ints, num_slots: int) -> _Grouped:
    """The tokens of a step in tiles of one slot each. `ranks` are those of the slots, padded."""
    rows = _tile_rows(len(slots_T))
    order = np.argsort(slots_T, kind="stable").astype(np.int32)
    used, begins, counts = np.unique(slots_T[order], return_index=True, return_counts=True)
    tiles = np.zeros((_most_tiles(len(slots_T), num_slots), TILE_FIELDS), dtype=np.int32)
    tiles[:, 0] = NO_ADAPTER
    number = 0
    for slot, begin, count in zip(used.tolist(), begins.tolist(), counts.tolist(), strict=True):
        starts = np.arange(begin, begin + count, rows)
        of_slot = tiles[number : number + len(starts)]
        of_slot[:, 0], of_slot[:, 1] = slot, ranks[slot] if slot != NO_ADAPTER else 0
        of_slot[:, 2], of_slot[:, 3] = starts, np.minimum(begin + count - starts, rows)
        number += len(starts)
    return _Grouped(order, tiles)


def _padded_rank(rank: int) -> int:
    return -(-rank // RANK_STEP) * RANK_STEP


def _tile_rows(tokens: int) -> int:
    return _ROWS_OF_FEW if tokens <= _FEW else _ROWS_OF_MANY


def _most_tiles(tokens: int, slots: int) -> int:
    """Each slot, and the tokens without one, may have a tile that is not full."""
    return min(tokens, tokens // _tile_rows(tokens) + slots + 1)


def _elements(shape: AdapterShape) -> int:
    """Of A and B of all modules of a layer, per rank."""
    attention = 3 * shape.hidden + sum(shape.qkv) + shape.qkv[0] + shape.hidden
    return attention if shape.inner is None else attention + 3 * (shape.hidden + shape.inner)


def _layer(shape: AdapterShape, weights: torch.Tensor, offset: int, most_rank: int) -> LayerAdapters:
    qkv = LowRank(weights, offset, shape.hidden, shape.qkv, most_rank)
    out = LowRank(weights, qkv.end, shape.qkv[0], (shape.hidden,), most_rank)
    if shape.inner is None:
        return LayerAdapters(qkv, out, None, None)
    gate_up = LowRank(weights, out.end, shape.hidden, (shape.inner, shape.inner), most_rank)
    return LayerAdapters(qkv, out, gate_up, LowRank(weights, gate_up.end, shape.inner, (shape.hidden,), most_rank))
