"""LoRA adapters for a model in plain torch, from outside: a hook on each linear layer adds what the adapters give.

The reference of the fast implementations. T tokens of a step, C inputs, O outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.executor import NO_ADAPTER, AdapterWeights, Step
from penstock.models.base import CausalLM
from penstock.models.layers import MLP, Linear
from penstock.models.llama import Llama


class TorchAdapters:
    def __init__(self, model: Llama, device: torch.device) -> None:
        self._device = device
        self._places = dict(_places(model))
        self.modules = {
            name: (linear.weight.shape[1], last - first) for name, (linear, first, last) in self._places.items()
        }
        # By slot: which outputs of which layer, and A and B for them.
        self._slots: dict[int, dict[Linear, list[tuple[slice, torch.Tensor, torch.Tensor]]]] = {}
        self._tokens: list[tuple[int, torch.Tensor]] = []  # of the step: slots, and indices of the tokens that use them

    def apply(self, step: Step, slots_T: npt.NDArray[np.int32]) -> None:
        """Fill slots, and remember which slot each token of the step uses."""
        for slot, adapter in step.adapters:
            self._fill(slot, adapter)
        used: list[int] = np.unique(slots_T[slots_T != NO_ADAPTER]).tolist()
        self._tokens = [(slot, torch.from_numpy(np.flatnonzero(slots_T == slot)).to(self._device)) for slot in used]

    def _fill(self, slot: int, adapter: AdapterWeights) -> None:
        if not self._slots:
            for linear in {linear for linear, _, _ in self._places.values()}:
                linear.register_forward_hook(self._add)
        layers: dict[Linear, list[tuple[slice, torch.Tensor, torch.Tensor]]] = {}
        for name, (a, b) in adapter.modules.items():
            linear, first, last = self._places[name]
            halves = [torch.from_numpy(half).to(self._device, linear.weight.dtype) for half in (a, b)]
            layers.setdefault(linear, []).append((slice(first, last), halves[0], halves[1]))
        self._slots[slot] = layers

    def _add(self, linear: torch.nn.Module, inputs: tuple[torch.Tensor], out_TO: torch.Tensor) -> None:
        assert isinstance(linear, Linear)
        for slot, tokens in self._tokens:
            for outputs, a_RC, b_OR in self._slots[slot].get(linear, ()):
                out_TO[tokens, outputs] += inputs[0][tokens] @ a_RC.T @ b_OR.T


def adapters_of(model: CausalLM, device: torch.device) -> TorchAdapters | None:
    return TorchAdapters(model, device) if isinstance(model, Llama) else None


def _places(model: Llama) -> Iterator[tuple[str, tuple[Linear, int, int]]]:
    """Linear modules by their names in a checkpoint: in whose outputs they are, from where to where. Experts and the
    output projection are not among them."""
    for number, layer in enumerate(model.layers):
        stacked = [(layer.attention.qkv, "self_attn", "qkv"), (layer.attention.out, "self_attn", "o")]
        linears = [(linear, [f"{block}.{part}_proj" for part in parts]) for linear, block, parts in stacked]
        if isinstance(layer.mlp, MLP):
            linears += [(layer.mlp.gate_up, ["mlp.gate_proj", "mlp.up_proj"]), (layer.mlp.down, ["mlp.down_proj"])]
        for linear, names in linears:
            first = 0
            for name, size in zip(names, linear.outputs, strict=True):
                yield f"model.layers.{number}.{name}", (linear, first, first + size)
                first += size
