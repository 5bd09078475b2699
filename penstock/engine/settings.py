"""The `engine` section of the settings, which are the keyword arguments of `LLM` too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.core.errors import InvalidRequest, StartupError
from penstock.core.request import RECOMMENDED, SamplingParams
from penstock.core.setting_paths import MODEL
from penstock.core.settings import check, check_choice

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["auto", "none", "int8", "int4", "fp8"]
KVDtype = Literal["auto", "bf16", "int8", "fp8"]
Scheduling = Literal["deadline", "fcfs"]
Pooling = Literal["auto", "cls", "mean", "last", "none"]
SpeculationMethod = Literal["suffix", "draft", "early_exit", "off"]


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Speculative decoding: tokens are drafted, and verified several in one step. The output stays the same."""

    # suffix: look up repeated text; draft: ask a smaller model; early_exit: ask the model's own first layers; off
    method: SpeculationMethod = "suffix"
    model: str = field(default="", metadata=MODEL)  # that drafts
    quantization: Literal["auto", "none", "int8", "int4"] = "auto"  # of that model's weights; auto: int8
    layers: int | None = None  # that draft with early_exit; default: what the checkpoint says
    max_tokens: int = 15  # of one draft; how many pay is decided for every step

    def __post_init__(self) -> None:
        check_choice(self.method, SpeculationMethod, "method")
        check_choice(self.quantization, Literal["auto", "none", "int8", "int4"], "quantization")
        check(1 <= self.max_tokens <= 64, "max_tokens", "must be between 1 and 64")
        check(self.method != "draft" or bool(self.model), "model", "must name the model that drafts")
        check(self.method == "draft" or not self.model, "model", f"is for method draft, not {self.method}")
        early = self.method == "early_exit"
        check(early or self.layers is None, "layers", f"is for method early_exit, not {self.method}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Where the model runs and how much it holds at once. None means: derived from the model and the machine."""

    device: Device = "auto"
    dtype: Dtype = "auto"  # of weights that are not quantised; auto: bfloat16. One that is given turns off auto's int8
    quantization: Quantization = "auto"  # of the weights; auto: int8 on CPU where its kernels are there, none on CUDA
    max_model_len: int | None = None  # prompt plus output of one request; default: the model's own limit
    max_seqs: int = 256  # sequences in one step
    max_step_tokens: int | None = None  # tokens in one step; default: 256 on CPU, 8192 on CUDA
    kv_memory_gib: float | None = None  # default: most of the free memory
    gpu_memory_share: float | None = None  # of the GPU, weights included; default: equal shares for its replicas
    kv_dtype: KVDtype = "auto"  # of the KV cache; auto: int8 beside quantised weights on CPU, bf16 on CUDA
    block_size: int = 16
    prefix_caching: bool = True
    deterministic: bool = False  # logits of a request have the same bits in any batch; on CPU they have without it
    scheduling: Scheduling = "deadline"  # fcfs: first come, first served, objectives and tenants ignored
    max_waiting: int = 4096  # requests queued in the engine; more are refused
    max_adapters: int = 8  # LoRA adapters that one step computes with; 0 refuses them all
    max_adapter_rank: int = 64  # an adapter of a higher rank is refused
    adapter_memory_gib: float = 1.0  # of host memory, for adapters that have been read
    # Which tokens of a text its embedding is made of; auto: as the checkpoint says, none: the model generates text.
    pooling: Pooling = "auto"
    normalize: bool | None = None  # whether embeddings have length 1; default: as the checkpoint says
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    # For requests that do not set them: fields of `RECOMMENDED`; the others are as the model's authors recommend.
    sampling_defaults: Mapping[str, Any] = field(
        default_factory=dict, metadata={"expected": "a mapping such as {temperature: 1, top_p: 1}"}
    )

    def __post_init__(self) -> None:
        check_choice(self.device, Device, "device")
        check_choice(self.dtype, Dtype, "dtype")
        check_choice(self.quantization, Quantization, "quantization")
        check(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "must be at least 2")
        check(1 <= self.max_seqs <= 4096, "max_seqs", "must be between 1 and 4096")
        check(self.max_step_tokens is None or self.max_step_tokens >= 1, "max_step_tokens", "must be at least 1")
        check_choice(self.kv_dtype, KVDtype, "kv_dtype")
        check(self.kv_memory_gib is None or self.kv_memory_gib > 0, "kv_memory_gib", "must be above 0")
        share = self.gpu_memory_share
        check(share is None or 0 < share <= 1, "gpu_memory_share", "must be above 0 and at most 1")
        power_of_two = 1 <= self.block_size <= 256 and self.block_size & (self.block_size - 1) == 0
        check(power_of_two, "block_size", "must be a power of two up to 256")
        check_choice(self.scheduling, Scheduling, "scheduling")
        check_choice(self.pooling, Pooling, "pooling")
        check(self.max_waiting >= 1, "max_waiting", "must be at least 1")
        check(0 <= self.max_adapters <= 1024, "max_adapters", "must be between 0 and 1024")
        check(1 <= self.max_adapter_rank <= 1024, "max_adapter_rank", "must be between 1 and 1024")
        check(self.adapter_memory_gib > 0, "adapter_memory_gib", "must be above 0")
        object.__setattr__(self, "sampling_defaults", _sampling_defaults(self.sampling_defaults))


def _sampling_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers as requests have them."""
    for name, value in given.items():
        check(name in RECOMMENDED, "sampling_defaults", f"takes {', '.join(RECOMMENDED)}, not {name}")
        number = isinstance(value, int if name == "top_k" else int | float) and not isinstance(value, bool)
        check(number, "sampling_defaults", f"needs a number for {name}, not {value!r}")
    try:
        params = SamplingParams(**given)
    except InvalidRequest as error:
        raise StartupError(f"sampling_defaults.{error.message}", param="sampling_defaults") from None
    return {name: getattr(params, name) for name in given}
