"""Python bindings of the native CPU kernels: how the library is loaded, its C ABI, and its operators one at a time.

The shared library is built by setup.py where a C++ compiler exists and picks its instruction set at run time
(portable, AVX2, AVX-512 VNNI, AVX-512 BF16, AMX). ctypes releases the GIL during a call. `model.py` runs whole
models with it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from penstock.core.errors import StartupError

Scheme = Literal["none", "int8", "int4"]
EncoderScheme = Literal["none", "int8", "float32"]
KVFormat = Literal["bf16", "int8"]
Isa = Literal["portable", "avx2", "avxvnni", "avx512vnni", "avx512bf16", "amx"]
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

LIBRARY = Path(__file__).with_name("_native.so")
SCHEMES: dict[Scheme | EncoderScheme, int] = {"none": 0, "int8": 1, "int4": 2, "float32": 3}
KV_FORMATS: dict[KVFormat, int] = {"bf16": 0, "int8": 1}


class CSpec(ctypes.Structure):
    """struct ModelSpec of model.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        *((name, ctypes.c_int32) for name in ("vocab", "qk_norm", "attention_bias", "output_bias", "mlp_bias", "tied")),
        *((name, ctypes.c_int32) for name in ("scheme", "block_size", "num_blocks", "threads", "kv_format")),
        *((name, ctypes.c_int32) for name in ("hidden_transform", "mlp_transform")),
        ("norm_eps", ctypes.c_float),
        ("rope_magnitude", ctypes.c_float),
    ]


class CStep(ctypes.Structure):
    """struct Step of model.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_sequences", "num_rows", "table_width")),
        *((name, ctypes.c_int32) for name in ("num_logits", "num_runs", "layers", "keeps_logits")),
        *((name, ctypes.c_void_p) for name in ("tokens", "rows", "starts", "counts", "logit_rows", "runs", "targets")),
        *((name, ctypes.c_void_p) for name in ("masks", "tables", "last_tokens", "sampling", "adapters", "logits")),
        *((name, ctypes.c_void_p) for name in ("sampled", "scores")),
    ]


class CRowParams(ctypes.Structure):
    """struct RowParams of sampling_rows.h."""

    _fields_ = [
        ("seed", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "min_p")),
        *((name, ctypes.c_float) for name in ("repetition", "presence", "frequency")),
        *((name, ctypes.c_int32) for name in ("top_k", "logprobs", "prompt_logprobs", "min_tokens", "prompt_len")),
        *((name, ctypes.c_int32) for name in ("num_biases", "num_stop_ids", "num_tokens")),
        *((name, ctypes.c_void_p) for name in ("bias_tokens", "biases", "stop_ids", "tokens")),
    ]


class CSampleCall(ctypes.Structure):
    """struct SampleCall of model.h."""

    _fields_ = [
        ("count", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("logits", "rows", "positions", "targets", "masks", "tokens", "scores")),
    ]


@cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    if not LIBRARY.exists():
        return f"{LIBRARY.name} was not built; reinstall with a C++20 compiler (g++ 11 or newer) present"
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return f"cannot load {LIBRARY.name}: {error}"
    pointer, message = ctypes.c_void_p, ctypes.c_char_p
    i32, i64 = ctypes.c_int32, ctypes.c_int64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "penstock_hadamard": (None, [pointer, i64, i32, i32]),
        "penstock_matmul": (ctypes.c_double, [pointer, pointer, pointer, *[i32] * 5, pointer]),
        "penstock_attention": (None, [pointer, pointer, pointer, *[i32] * 8, pointer]),
        "penstock_isa": (message, []),
        "penstock_set_isa": (ctypes.c_bool, [message]),
        "penstock_model_new": (pointer, [pointer, pointer, pointer, ctypes.POINTER(message)]),
        "penstock_model_free": (None, [pointer]),
        "penstock_model_set": (message, [pointer, i32, i32, pointer, i64, i64]),
        "penstock_model_floats": (pointer, [pointer, i32, i32]),
        "penstock_adapter_new": (pointer, [pointer, i32]),
        "penstock_adapter_free": (None, [pointer]),
        "penstock_adapter_set": (message, [pointer, pointer, i32, i32, pointer, pointer, i32]),
        "penstock_adapter_use": (message, [pointer, i32, pointer]),
        "penstock_model_forward": (message, [pointer, pointer]),
        "penstock_model_resample": (message, [pointer, i32, pointer, pointer, pointer]),
        "penstock_model_hidden_states": (None, [pointer, pointer, i32, pointer]),
        "penstock_model_sample": (None, [pointer, pointer, pointer]),
        "penstock_model_set_timed": (None, [pointer, ctypes.c_bool]),
        "penstock_model_read_seconds": (ctypes.c_double, [pointer, ctypes.c_uint64]),
        "penstock_model_times": (pointer, [pointer, ctypes.POINTER(ctypes.c_uint64)]),
        "penstock_sampling_new": (pointer, [i32, i32]),
        "penstock_sampling_free": (None, [pointer]),
        "penstock_sampling_set": (None, [pointer, i32, pointer]),
        "penstock_sampling_count": (None, [pointer, i32, pointer, i32]),
        "penstock_model_pin_caller": (None, [pointer]),
        "penstock_model_weights": (pointer, [pointer]),
        "penstock_model_weight_bytes": (ctypes.c_uint64, [pointer]),
        "penstock_model_cache": (pointer, [pointer]),
        "penstock_model_block_bytes": (ctypes.c_uint64, [pointer]),
        "penstock_encoder_new": (pointer, [pointer, ctypes.POINTER(message)]),
        "penstock_encoder_free": (None, [pointer]),
        "penstock_encoder_set": (message, [pointer, i32, i32, pointer, i64, i64]),
        "penstock_encoder_encode": (message, [pointer, pointer]),
        "penstock_encoder_pin_caller": (None, [pointer]),
        "penstock_encoder_weight_bytes": (ctypes.c_uint64, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name, None)
        if function is None:
            return f"{LIBRARY.name} was built from other sources; reinstall (make install, or pip install -e .)"
        function.restype, function.argtypes = result, arguments
    return library


def library() -> ctypes.CDLL:
    loaded = _load()
    if isinstance(loaded, str):
        raise StartupError(loaded)
    return loaded


def available() -> bool:
    return not isinstance(_load(), str)


def unavailable_reason() -> str | None:
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def isa() -> Isa:
    """The instruction set in use: the best this CPU has, unless `set_isa` chose another."""
    return cast("Isa", bytes(library().penstock_isa()).decode())


def device_name(threads: int, scheme: Scheme | EncoderScheme) -> str:
    """What computes a model with weights in this scheme, for people."""
    return f"CPU, {threads} threads, {isa()}, {'bf16' if scheme == 'none' else scheme} weights"


def set_isa(name: Isa) -> None:
    """Use these kernels for models made from now on."""
    if not library().penstock_set_isa(name.encode()):
        raise StartupError(f"this CPU or build has no {name} kernels", param="isa")


def transform_blocks(rows: Floats, block: int) -> Floats:
    """Apply the Hadamard transform to each run of `block` values, a power of two from 16, in each row.

    In place where the rows are contiguous float32.
    """
    out = np.ascontiguousarray(rows, dtype=np.float32)
    library().penstock_hadamard(out.ctypes.data, len(out), out.shape[1], block)
    return out


def matmul(x: Floats, w: Floats, scheme: Scheme, bias: Floats | None = None) -> Floats:
    """x wᵀ as a step computes it: w packed by the scheme, x quantised to match."""
    return timed_matmul(x, w, scheme, bias)[0]


def timed_matmul(
    x: Floats, w: Floats, scheme: Scheme, bias: Floats | None = None, times: int = 1
) -> tuple[Floats, float]:
    """`matmul`, and the seconds that one thread needed for the GEMM alone at its fastest."""
    x, w = np.ascontiguousarray(x, dtype=np.float32), np.ascontiguousarray(w, dtype=np.float32)
    y = np.empty((len(x), len(w)), dtype=np.float32)
    bias_at = None if bias is None else np.ascontiguousarray(bias, dtype=np.float32).ctypes.data
    sizes = (len(x), len(w), x.shape[1], times)
    seconds = library().penstock_matmul(x.ctypes.data, w.ctypes.data, bias_at, SCHEMES[scheme], *sizes, y.ctypes.data)
    return y, float(seconds)


def attention(q: Floats, k: Floats, v: Floats, kv: KVFormat, block_size: int = 16, window: int = 0) -> Floats:
    """Attention as in a step: q [T, H, D], times log2(e) / sqrt(D), of the last T of the tokens in k, v [C, K, D]."""
    q, k, v = (np.ascontiguousarray(x, dtype=np.float32) for x in (q, k, v))
    out = np.empty_like(q)
    sizes = (len(q), len(k), q.shape[1], k.shape[1], k.shape[2], block_size, window)
    library().penstock_attention(q.ctypes.data, k.ctypes.data, v.ctypes.data, KV_FORMATS[kv], *sizes, out.ctypes.data)
    return out
