"""The shape of a model, read from config.json or from GGUF metadata. No torch: planners and gateways may ask too."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import log
from pathlib import Path
from typing import Any

from penstock.checkpoint.end_tokens import gguf_end_ids, tokenizer_end_id
from penstock.checkpoint.gguf import GGUFFile
from penstock.checkpoint.source import BUILT_IN, Checkpoint
from penstock.core.errors import InvalidRequest, StartupError
from penstock.core.request import RECOMMENDED, SamplingParams

SUPPORTED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
)
# By GGUF's name; llama.cpp also calls Mistral, SmolLM2 and Mixtral (which has experts) "llama".
GGUF_SUPPORTED = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
# By the field of SamplingParams; generation_config.json uses the same names.
GGUF_SAMPLING = {"temperature": "temp", "repetition_penalty": "penalty_repeat"} | {
    name: name for name in ("top_p", "top_k", "min_p")
}
BUILT_IN_SAMPLING = {"temperature": 0.2, "top_p": 0.9}  # the model card's; its file names none


@dataclass(frozen=True, slots=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by the factor, high ones kept, those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """A divisor per frequency; GGUF stores llama3 scaling this way."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors


@dataclass(frozen=True, slots=True)
class MoEConfig:
    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool  # the weights of the chosen experts sum to 1
    layers: frozenset[int]  # those with experts; the others have a dense MLP


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position: int
    tie_embeddings: bool
    attention_bias: bool  # of the query, key and value projections
    output_bias: bool  # of attention's output projection
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]  # per layer: tokens visible to a query, 0 for all
    moe: MoEConfig | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    dtype: str  # as the checkpoint names it: bfloat16, Q4_1
    sampling: Mapping[str, float] = field(default_factory=dict)  # what its authors recommend, of `RECOMMENDED`
    exit_layers: int | None = None  # first layers that it was trained to draft with, if it says so

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise StartupError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads")
        if self.head_dim % 2:
            raise StartupError(f"rotary embedding needs an even head size, not {self.head_dim}")
        if self.moe and self.moe.experts_per_token > self.moe.num_experts:
            raise StartupError(f"{self.moe.experts_per_token} of {self.moe.num_experts} experts cannot be chosen")


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    if checkpoint.kind == "gguf":
        config = _from_gguf(GGUFFile(checkpoint.path))
        return replace(config, sampling=BUILT_IN_SAMPLING) if checkpoint.name == BUILT_IN else config
    if checkpoint.kind == "packed":
        from penstock.models.packed_config import read_packed_config  # which is made of this module's parts

        return read_packed_config(checkpoint.folder)
    path = checkpoint.path / "config.json" if checkpoint.kind == "folder" else checkpoint.path
    return _from_json(_Fields(path, _read_json(path)), path.parent / "generation_config.json")


@dataclass(frozen=True, slots=True)
class _Fields:
    """Named values of one file; what is absent or of the wrong kind becomes an error that names it."""

    path: Path
    values: dict[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """null counts as absent"""
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise StartupError(f"{self.path}: {key} must be a positive whole number, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise StartupError(f"{self.path}: {key} must be a positive number, not {value!r}")
        return float(value)

    def refuse(self, key: str, accepted: tuple[Any, ...]) -> None:
        """What changes the computation in a way the models here do not implement."""
        value = self.get(key, accepted[0])
        if value not in accepted:
            raise StartupError(f"{self.path}: {key} {value!r} is not supported; supported: {accepted}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise StartupError(f"{path} must hold a JSON object")
    return values


def _from_json(raw: _Fields, generation_config: Path) -> ModelConfig:
    named = str((raw.get("architectures") or ["none"])[0])
    headless = named.endswith("Model")  # without an output projection: for embeddings
    architecture = f"{named.removesuffix('Model')}ForCausalLM" if headless else named
    if architecture not in SUPPORTED:
        raise StartupError(f"{raw.path}: architecture {named} is not supported; supported: {SUPPORTED}")
    raw.refuse("hidden_act", ("silu", "swish"))
    raw.refuse("is_causal", (True,))
    if raw.get("quantization_config"):
        method = raw.values["quantization_config"].get("quant_method", "some method")
        raise StartupError(f"{raw.path}: weights quantised by {method} are not supported; use the original checkpoint")
    heads = raw.count("num_attention_heads")
    bias = bool(raw.get("attention_bias", False))
    rope = _json_rope(raw)
    scaling, max_position = _json_scaling(rope, raw.count("max_position_embeddings"))
    generation = _read_json(generation_config) if generation_config.is_file() else {}
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw.count("vocab_size"),
        hidden_size=raw.count("hidden_size"),
        intermediate_size=raw.count("intermediate_size"),
        num_layers=raw.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=raw.count("num_key_value_heads", heads),
        head_dim=raw.count("head_dim", raw.count("hidden_size") // heads),
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", raw.number("rope_theta", 10000.0)),
        rope_scaling=scaling,
        max_position=max_position,
        tie_embeddings=headless or bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bias or architecture == "Qwen2ForCausalLM",
        output_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture.startswith("Qwen3"),
        windows=_json_windows(raw, architecture),
        moe=_json_moe(raw, architecture),
        eos_ids=_ids(raw.get("eos_token_id"), generation.get("eos_token_id"), tokenizer_end_id(raw.path.parent)),
        bos_id=next(iter(_ids(raw.get("bos_token_id"), generation.get("bos_token_id"))), None),
        dtype=str(raw.get("dtype", raw.get("torch_dtype", "float32"))),
        sampling=_sampling({name: generation.get(name) for name in RECOMMENDED}),
        exit_layers=generation.get("assistant_early_exit"),
    )


def _sampling(recommended: Mapping[str, Any]) -> dict[str, float]:
    """As vLLM reads it: `do_sample` is ignored, for temperature 0 says the same. GGUF's float32 are rounded back."""
    given = {name: value for name, value in recommended.items() if type(value) in (int, float)}
    return {name: int(value) if name == "top_k" else round(value, 6) for name, value in given.items()}


def sampling_defaults(name: str, model: ModelConfig, given: Mapping[str, Any]) -> SamplingParams:
    """Of requests that do not say: what the settings give, else what the model's authors recommend, else OpenAI's."""
    values = {**model.sampling, **given}
    if not 0 <= values.get("top_k", 0) < model.vocab_size:  # -1 is a common spelling of "all tokens"
        values["top_k"] = 0
    try:
        return SamplingParams(**values)
    except InvalidRequest as error:
        raise StartupError(
            f"{name} recommends a {error.message}; say another in engine.sampling_defaults",
            param="engine.sampling_defaults",
        ) from None


def _ids(*values: int | list[int] | None) -> tuple[int, ...]:
    """Each may be one id, several or none; repeats are dropped and the order kept."""
    lists = [value if isinstance(value, list) else [value] for value in values if value is not None]
    return tuple(dict.fromkeys(id for ids in lists for id in ids))


def _json_rope(raw: _Fields) -> _Fields:
    """`rope_scaling` that was added to a file with the newer `rope_parameters` replaces all of these but theta."""
    parameters, scaling = raw.get("rope_parameters", {}), raw.get("rope_scaling", {})
    rope = _Fields(raw.path, {"rope_theta": parameters.get("rope_theta"), **scaling} if scaling else parameters)
    raw.refuse("partial_rotary_factor", (1.0,))
    rope.refuse("partial_rotary_factor", (1.0,))
    if layers := [kind for kind, own in rope.values.items() if isinstance(own, dict)]:
        raise StartupError(f"{raw.path}: rope parameters for {layers[0]} alone are not supported")
    return rope


def _json_scaling(rope: _Fields, max_position: int) -> tuple[RopeScaling | None, int]:
    """The scaling, and the context that it makes usable."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None, max_position
    if kind == "linear":
        return LinearScaling(rope.number("factor")), max_position
    if kind == "llama3":
        return Llama3Scaling(
            rope.number("factor"),
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
            rope.count("original_max_position_embeddings"),
        ), max_position
    if kind == "yarn":
        original = rope.count("original_max_position_embeddings", max_position)
        scaling = _yarn(rope, rope.number("factor"), original)
        return scaling, max(max_position, int(original * scaling.factor))
    raise StartupError(f"{rope.path}: rope scaling {kind!r} is not supported; supported: linear, llama3, yarn")


def _yarn(rope: _Fields, factor: float, original: int) -> YarnScaling:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * log(factor) + 1 if factor > 1 else 1.0

    attention_factor = magnitude(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        attention_factor = magnitude(rope.number("mscale")) / magnitude(rope.number("mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", attention_factor),
        truncate=bool(rope.get("truncate", True)),
    )


def _json_windows(raw: _Fields, architecture: str) -> tuple[int, ...]:
    layers = raw.count("num_hidden_layers")
    qwen = architecture.startswith("Qwen")
    windowed = raw.get("use_sliding_window", not qwen) and architecture != "LlamaForCausalLM"
    window = raw.count("sliding_window") if windowed and raw.get("sliding_window") else 0
    if not window:
        return (0,) * layers
    kinds = raw.get("layer_types")
    if kinds:
        if len(kinds) != layers:
            raise StartupError(f"{raw.path}: layer_types has {len(kinds)} entries for {layers} layers")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    first = raw.get("max_window_layers", 28) if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM") else 0
    return tuple(window if layer >= first else 0 for layer in range(layers))


def _json_moe(raw: _Fields, architecture: str) -> MoEConfig | None:
    layers = raw.count("num_hidden_layers")
    if architecture == "MixtralForCausalLM":
        return MoEConfig(
            num_experts=raw.count("num_local_experts"),
            experts_per_token=raw.count("num_experts_per_tok"),
            intermediate_size=raw.count("intermediate_size"),
            norm_topk_prob=True,
            layers=frozenset(range(layers)),
        )
    if architecture == "Qwen3MoeForCausalLM":
        step, dense = raw.count("decoder_sparse_step", 1), raw.get("mlp_only_layers", [])
        return MoEConfig(
            num_experts=raw.count("num_experts", raw.get("num_local_experts")),
            experts_per_token=raw.count("num_experts_per_tok"),
            intermediate_size=raw.count("moe_intermediate_size"),
            norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
            layers=frozenset(n for n in range(layers) if n not in dense and (n + 1) % step == 0),
        )
    return None


def _from_gguf(file: GGUFFile) -> ModelConfig:
    kind = str(file.metadata.get("general.architecture"))
    if kind not in GGUF_SUPPORTED:
        raise StartupError(f"{file.path}: architecture {kind} is not supported; supported: {tuple(GGUF_SUPPORTED)}")
    own = {key.removeprefix(f"{kind}."): value for key, value in file.metadata.items() if key.startswith(f"{kind}.")}
    raw, tokenizer = _Fields(file.path, own), _Fields(file.path, file.metadata)
    heads, layers = raw.count("attention.head_count"), raw.count("block_count")
    head_dim = raw.count("attention.key_length", raw.count("embedding_length") // heads)
    raw.refuse("rope.dimension_count", (head_dim,))
    raw.refuse("attention.value_length", (head_dim,))
    raw.refuse("attention.causal", (True,))
    moe = _gguf_moe(raw, layers) if raw.get("expert_count") else None
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.format.name] += tensor.nbytes
    if "token_embd.weight" not in file.tensors:
        raise StartupError(f"{file.path} has no token_embd.weight; is it a language model?")
    return ModelConfig(
        architecture="MixtralForCausalLM" if moe and kind == "llama" else GGUF_SUPPORTED[kind],
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=raw.count("embedding_length"),
        intermediate_size=raw.count("feed_forward_length", moe.intermediate_size if moe else None),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=raw.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=raw.number("attention.layer_norm_rms_epsilon"),
        rope_theta=raw.number("rope.freq_base", 10000.0),
        rope_scaling=_gguf_scaling(raw, file),
        max_position=raw.count("context_length"),
        tie_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        windows=(int(raw.get("attention.sliding_window", 0)),) * layers,
        moe=moe,
        eos_ids=gguf_end_ids(file.metadata),
        bos_id=tokenizer.get("tokenizer.ggml.bos_token_id"),
        dtype=sizes.most_common(1)[0][0],
        sampling=_sampling({k: file.metadata.get(f"general.sampling.{name}") for k, name in GGUF_SAMPLING.items()}),
    )


def _gguf_moe(raw: _Fields, layers: int) -> MoEConfig:
    return MoEConfig(
        num_experts=raw.count("expert_count"),
        experts_per_token=raw.count("expert_used_count"),
        intermediate_size=raw.count("expert_feed_forward_length", raw.get("feed_forward_length")),
        norm_topk_prob=True,  # not stored; so for all that are published
        layers=frozenset(range(layers)),
    )


def _gguf_scaling(raw: _Fields, file: GGUFFile) -> RopeScaling | None:
    if "rope_freqs.weight" in file.tensors:
        return FrequencyFactors(tuple(file.read("rope_freqs.weight").tolist()))
    factor = raw.get("rope.scaling.factor", raw.get("rope.scale_linear"))  # what the first files called it
    kind = raw.get("rope.scaling.type", "none" if factor is None else "linear")
    if kind == "none":
        return None
    if kind == "linear":
        return LinearScaling(raw.number("rope.scaling.factor", factor))
    if kind == "yarn":
        original = raw.count("rope.scaling.original_context_length")
        betas = {name: raw.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        yarn = _yarn(_Fields(raw.path, betas), raw.number("rope.scaling.factor"), original)
        # llama.cpp multiplies where transformers replaces.
        return replace(yarn, attention_factor=yarn.attention_factor * raw.number("rope.scaling.attn_factor", 1.0))
    raise StartupError(f"{raw.path}: rope scaling {kind!r} is not supported; supported: linear, yarn")
