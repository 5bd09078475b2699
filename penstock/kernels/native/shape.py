"""The sizes of a dense decoder that the native CPU kernels need, and what follows from them.

That is: whether the kernels can run it, which tensors its checkpoint holds, and how large a block of its KV cache is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from penstock.core.errors import StartupError
from penstock.core.model_sizes import DecoderSizes
from penstock.kernels.native.bindings import Floats, KVFormat, unavailable_reason


class ModelShape(DecoderSizes, Protocol):
    """The part of a model's configuration that the kernels need."""

    @property
    def tie_embeddings(self) -> bool: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def output_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def windows(self) -> tuple[int, ...]: ...


def unsupported_reason(config: ModelShape, block_size: int) -> str | None:
    """Why this model cannot run on the native kernels, if it cannot."""
    if config.moe is not None:
        return "the native kernels run dense models only; this one has experts"
    if config.head_dim % 16:
        return f"the native kernels need a head size that is a multiple of 16, not {config.head_dim}"
    if config.num_heads // config.num_kv_heads > 64:
        return "the native kernels let at most 64 query heads share a key/value head"
    if block_size % 16:
        return f"the native kernels need blocks of a multiple of 16 tokens, not {block_size}"
    return unavailable_reason()


def native_block_bytes(config: ModelShape, block_size: int, kv: KVFormat) -> int:
    """Bytes of one KV block over all layers: keys and values of `block_size` tokens; int8 has a bfloat16 scale each."""
    vector = config.head_dim * 2 if kv == "bf16" else config.head_dim + 2
    return 2 * config.num_layers * config.num_kv_heads * block_size * vector


def adapter_modules(config: ModelShape) -> dict[str, tuple[int, int]]:
    """Linear modules that LoRA adapters may change, with their inputs and outputs."""
    matrices = {name: size for name, size in tensor_shapes(config).items() if name.endswith("_proj.weight")}
    return {name.removesuffix(".weight"): (size[1], size[0]) for name, size in matrices.items()}


def tensor_shapes(config: ModelShape) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint of this model; the output projection is there also where it is tied."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    if config.attention_bias:
        layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if config.output_bias:
        layer |= {"self_attn.o_proj.bias": (hidden,)}
    if config.mlp_bias:
        layer |= {"mlp.gate_proj.bias": (intermediate,), "mlp.up_proj.bias": (intermediate,)}
        layer |= {"mlp.down_proj.bias": (hidden,)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "lm_head.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for number in range(config.num_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def checked_shapes(
    weights: Iterator[tuple[str, Floats]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Floats]]:
    """The weights as they come, each of which must be one of these tensors and have its shape."""
    for name, tensor in weights:
        if name not in shapes:
            raise StartupError(f"tensor {name} is not part of a model with this configuration")
        if tensor.shape != shapes[name]:
            raise StartupError(f"tensor {name} has shape {list(tensor.shape)}, expected {list(shapes[name])}")
        yield name, tensor
