"""Whether an adapter fits a model: the linear layers that it changes, their sizes, and the largest rank served."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.model_sizes import DecoderSizes
from penstock.engine.executor import AdapterWeights
from penstock.lora.checkpoint import AdapterModule
from penstock.lora.config import invalid_adapter

Projections = Mapping[str, tuple[int, int]]  # (inputs, outputs) of each linear layer that adapters may change, by name


def projections(model: DecoderSizes) -> dict[str, tuple[int, int]]:
    """Of attention, and of the MLP where the model has no experts; neither embedding nor output projection."""
    hidden, intermediate = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layer = {
        "self_attn.q_proj": (hidden, q),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (q, hidden),
    }
    if model.moe is None:
        layer |= {
            "mlp.gate_proj": (hidden, intermediate),
            "mlp.up_proj": (hidden, intermediate),
            "mlp.down_proj": (intermediate, hidden),
        }
    return {f"model.layers.{n}.{name}": sizes for n in range(model.num_layers) for name, sizes in layer.items()}


def modules_of(weights: AdapterWeights) -> dict[str, AdapterModule]:
    return {name: AdapterModule(a.shape[0], a.shape[1], b.shape[0]) for name, (a, b) in weights.modules.items()}


def check_fit(modules: Mapping[str, AdapterModule], base: Projections, max_rank: int) -> None:
    """Raises what does not fit, and what would."""
    for name, module in modules.items():
        if name not in base:
            kinds = sorted({known.rpartition(".")[2] for known in base})
            layers = 1 + max(int(known.split(".")[2]) for known in base)
            raise invalid_adapter(
                f"the adapter changes {name}, which is no linear layer of this model that adapters may change; "
                f"supported: {', '.join(kinds)} of layers 0 to {layers - 1}"
            )
        if (module.inputs, module.outputs) != base[name]:
            inputs, outputs = base[name]
            raise invalid_adapter(
                f"the adapter is for another model: its {name} has {module.inputs} inputs and {module.outputs} "
                f"outputs, the model's has {inputs} and {outputs}"
            )
        if module.rank > max_rank:
            raise invalid_adapter(
                f"the adapter's rank is {module.rank} at {name}; supported: up to {max_rank} (engine.max_adapter_rank)"
            )
