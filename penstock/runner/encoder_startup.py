"""Starts engines whose results are vectors: encoders, natively or in torch, and what decoders for embeddings need."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from penstock.checkpoint.revision import revision
from penstock.checkpoint.source import Checkpoint
from penstock.core.engine import EngineInfo
from penstock.core.errors import StartupError
from penstock.core.machine import usable_cpus, with_niceness
from penstock.core.start_times import StartTimes
from penstock.engine.executor import LoadedExecutor
from penstock.engine.limits import SchedulerLimits
from penstock.engine.scheduler import Scheduler
from penstock.engine.settings import EngineConfig
from penstock.engine.step_time import kept_step_times
from penstock.kernels.native.bindings import EncoderScheme, isa
from penstock.kernels.native.encoder import NativeEncoder, unsupported_encoder
from penstock.models.context_length import max_model_len
from penstock.models.encoder_config import EncoderConfig, encoder_weights, read_encoder_config
from penstock.models.pooling import Pooling, read_pooling
from penstock.runner.device import DeviceKind, need
from penstock.runner.encoder_runner import EncoderRunner, TextEncoder
from penstock.runner.pooled_runner import POOLED_NICENESS

log = logging.getLogger(__name__)

_STEP_TOKENS = {"cpu": 1024, "cuda": 16384}  # of a step, unless one text has more


def decoder_pooling(checkpoint: Checkpoint, config: EngineConfig) -> Pooling | None:
    """How a decoder makes embeddings; None: it generates text."""
    if config.pooling == "none":
        return None
    if config.pooling == "cls":
        raise StartupError("the first token of a decoder sees no other; use mean or last", param="engine.pooling")
    found = read_pooling(checkpoint.path) if checkpoint.kind == "folder" else None
    if config.pooling != "auto":
        found = replace(found, kind=config.pooling) if found else Pooling(config.pooling, normalize=True)
    if found is not None and config.normalize is not None:
        found = replace(found, normalize=config.normalize)
    return found


def start_encoder(
    checkpoint: Checkpoint, config: EngineConfig, device: DeviceKind, times: StartTimes
) -> tuple[Scheduler, LoadedExecutor, EngineInfo]:
    """Who decides and who computes. Blocks are only counted: a sequence holds one while its step runs."""
    if config.pooling == "none":
        raise StartupError(f"{checkpoint.name} is an encoder and generates no text", param="engine.pooling")
    model = read_encoder_config(checkpoint.path, None if config.pooling == "auto" else config.pooling)
    window = max_model_len(config.max_model_len, model.max_position)
    normalize = not model.labels and (model.normalize if config.normalize is None else config.normalize)
    executor, precision = _executor(checkpoint, config, model, device, normalize, times)
    limits = SchedulerLimits(
        num_blocks=config.max_seqs,
        block_size=window,
        max_seqs=config.max_seqs,
        max_step_tokens=max(config.max_step_tokens or _STEP_TOKENS[device], window),
        max_model_len=window,
        vocab_size=model.vocab_size,
        prefix_caching=False,
        max_waiting=config.max_waiting,
        fcfs=config.scheduling == "fcfs",
        pools=True,
        whole_prompts=True,
        weight_bytes=executor.host_memory.weights if executor.host_memory is not None else 0,
    )
    info = EngineInfo(
        checkpoint.name,
        window,
        model.vocab_size,
        f"{revision(checkpoint)}-{precision}-{model.pooling}-{normalize}",
        block_size=window,
        task="score" if model.labels else "embed",
        width=model.labels or model.hidden_size,
        normalized=normalize,
    )
    machine = f"cpu-{usable_cpus()}" if device == "cpu" else "cuda"
    return Scheduler(limits, kept_step_times(machine, checkpoint.name, precision)), executor, info


def _executor(
    checkpoint: Checkpoint,
    config: EngineConfig,
    model: EncoderConfig,
    device: DeviceKind,
    normalize: bool,
    times: StartTimes,
) -> tuple[LoadedExecutor, str]:
    """And a name for the precision that it computes in."""
    problem = unsupported_encoder(model) if device == "cpu" else "the device is a GPU"
    encoder: TextEncoder
    began = time.monotonic()
    if problem is None:
        scheme = _scheme(config)
        encoder = with_niceness(POOLED_NICENESS, lambda: _native(checkpoint, model, scheme, times))
        kind, niceness = f"{scheme} with {isa()} kernels", POOLED_NICENESS
        runner = EncoderRunner(encoder, config.max_seqs, normalize=normalize, sigmoid=model.sigmoid, niceness=niceness)
        precision = f"native-{scheme}"
    else:
        if config.quantization not in ("auto", "none"):
            raise StartupError(f"quantization {config.quantization}: {problem}", param="engine.quantization")
        need("torch", problem, extra="cuda" if device == "cuda" else "torch")
        from penstock.models.encoder import load_encoder

        times.ended("import")
        usual = "float16" if device == "cuda" else "float32"
        kind = usual if config.dtype == "auto" else config.dtype
        encoder = load_encoder(checkpoint.path, model, kind, device)
        runner = EncoderRunner(encoder, config.max_seqs, normalize=normalize, sigmoid=model.sigmoid)
        precision = f"torch-{kind}"
    times.ended("load")
    seconds = time.monotonic() - began
    log.info("loaded %s: %s in %s on %s, %.1f s", checkpoint.name, model.architecture, kind, device, seconds)
    return runner, precision


def _scheme(config: EngineConfig) -> EncoderScheme:
    if config.quantization in ("int4", "fp8"):
        raise StartupError(
            f"quantization {config.quantization} is not there for encoders; use int8 or none",
            param="engine.quantization",
        )
    if config.quantization == "int8" or (config.quantization == "auto" and config.dtype == "auto"):
        return "int8"
    return "none" if config.dtype == "bfloat16" else "float32"


def _native(checkpoint: Checkpoint, model: EncoderConfig, scheme: EncoderScheme, times: StartTimes) -> NativeEncoder:
    times.ended("import")
    encoder = NativeEncoder(model, scheme)
    times.ended("kernels")
    encoder.load(encoder_weights(checkpoint.path, model))
    return encoder
