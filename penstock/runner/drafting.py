"""Builds the drafter that the settings ask for."""

from __future__ import annotations

from penstock.checkpoint.source import Checkpoint, resolve
from penstock.core.errors import StartupError
from penstock.core.machine import usable_cpus
from penstock.engine.executor import LoadedExecutor
from penstock.engine.settings import EngineConfig
from penstock.engine.speculation import Drafter, Speculation
from penstock.engine.step_time import StepTimes
from penstock.kernels.native.bindings import Scheme
from penstock.kernels.native.shape import unsupported_reason
from penstock.models.config import ModelConfig, read_config
from penstock.speculative.draft_model import DraftLimits, ModelDrafter
from penstock.speculative.early_exit import EarlyExitDrafter
from penstock.speculative.suffix import SuffixDrafter

_ROWS = 8  # sequences that a model drafts for at once; with more in a batch, drafts seldom pay
_STEP_TOKENS = 256


def drafter_of(
    checkpoint: Checkpoint, model: ModelConfig, config: EngineConfig, max_model_len: int, *, native: bool
) -> Drafter | None:
    """None: nothing is drafted, or by first layers of the model itself, which is not loaded yet. `native`: whether the
    native CPU kernels are going to run it."""
    wanted = config.speculation
    if exit_layers(model, config):
        if not native:
            raise StartupError(
                "speculation by early_exit runs on the native CPU kernels only: in int8, int4 or bfloat16, without "
                "experts",
                param="engine.speculation.method",
            )
        return None
    if wanted.method == "off":
        return None
    if wanted.method == "suffix":
        return SuffixDrafter()
    drafting = resolve(wanted.model)
    draft = read_config(drafting)
    _check_tokenizers(checkpoint, model, drafting, draft)
    if problem := unsupported_reason(draft, config.block_size):
        raise StartupError(f"{drafting.name} cannot draft: {problem}", param="engine.speculation.model")
    if draft.max_position < max_model_len:
        max_model_len = draft.max_position
    return _model_drafter(drafting, draft, wanted.quantization, config.block_size, max_model_len)


def exit_layers(model: ModelConfig, config: EngineConfig) -> int:
    """How many first layers of the model draft for it; 0: the settings ask for another drafter, or none."""
    wanted = config.speculation
    if wanted.method != "early_exit":
        return 0
    layers, setting = model.exit_layers if wanted.layers is None else wanted.layers, "engine.speculation.layers"
    if layers is None:
        raise StartupError(
            "the checkpoint does not say after which layer to exit (assistant_early_exit in generation_config.json); "
            f"set {setting}: how many of its {model.num_layers} layers draft",
            param=setting,
        )
    if not isinstance(layers, int) or not 1 <= layers < model.num_layers:
        raise StartupError(
            f"early exit takes from 1 to {model.num_layers - 1} of the {model.num_layers} layers, not {layers!r}",
            param=setting,
        )
    return layers


def spare_blocks(model: ModelConfig, config: EngineConfig) -> int:
    """KV blocks beside those of the model's sequences, for drafts of its first layers."""
    return _ROWS * _spare_blocks_of_row(config) if exit_layers(model, config) else 0


def _spare_blocks_of_row(config: EngineConfig) -> int:
    return -(-config.speculation.max_tokens // config.block_size)


def speculation_by(
    drafter: Drafter | None,
    executor: LoadedExecutor,
    times: StepTimes,
    model: ModelConfig,
    config: EngineConfig,
    max_model_len: int,
) -> Speculation | None:
    if not executor.verifies_drafts:
        return None
    if layers := exit_layers(model, config):
        drafter = _early_exit_drafter(executor, layers, config, max_model_len)
    return Speculation(drafter, times, config.speculation.max_tokens) if drafter is not None else None


def _early_exit_drafter(
    executor: LoadedExecutor, layers: int, config: EngineConfig, max_model_len: int
) -> EarlyExitDrafter:
    from penstock.runner.host_rows import HostRows
    from penstock.runner.native_runner import NativeRunner

    assert isinstance(executor, NativeRunner)
    network, each = executor.model, _spare_blocks_of_row(config)
    table_blocks = -(-max_model_len // config.block_size) + each
    first = executor.num_blocks
    spare = [list(range(first + row * each, first + (row + 1) * each)) for row in range(_ROWS)]
    runner = NativeRunner(network, HostRows(_ROWS, table_blocks, network.config.vocab_size), layers=layers)
    return EarlyExitDrafter(runner, DraftLimits(_ROWS, table_blocks, config.block_size, _STEP_TOKENS), spare)


def _model_drafter(
    checkpoint: Checkpoint, model: ModelConfig, quantization: str, block_size: int, max_model_len: int
) -> ModelDrafter:
    from penstock.runner.host_rows import HostRows
    from penstock.runner.native_runner import NativeRunner
    from penstock.runner.packed import fill, native_model

    scheme: Scheme = "int4" if quantization == "int4" else "none" if quantization == "none" else "int8"
    table_blocks = -(-max_model_len // block_size)
    network = native_model(model, scheme, block_size=block_size, num_blocks=_ROWS * table_blocks, threads=usable_cpus())
    fill(network, checkpoint, model, None)
    runner = NativeRunner(network, HostRows(_ROWS, table_blocks, model.vocab_size))
    tables = [(row, 0, list(range(row * table_blocks, (row + 1) * table_blocks))) for row in range(_ROWS)]
    return ModelDrafter(runner, DraftLimits(_ROWS, table_blocks, block_size, _STEP_TOKENS), tables)


def _check_tokenizers(
    target: Checkpoint, target_model: ModelConfig, draft: Checkpoint, draft_model: ModelConfig
) -> None:
    """A token must mean the same to both."""
    from penstock.text.tokenizer import load_tokenizer

    if target.path == draft.path or "dummy" in (target.kind, draft.kind):
        same = target_model.vocab_size == draft_model.vocab_size
    else:
        same = load_tokenizer(target).vocabulary == load_tokenizer(draft).vocabulary
    if not same:
        raise StartupError(
            f"{draft.name} cannot draft for {target.name}: their tokenizers differ, and a draft needs the same tokens "
            f"({draft_model.vocab_size} and {target_model.vocab_size} ids); name a model of the same family",
            param="engine.speculation.model",
        )
