"""Starting on the CPU: which kernels are used, what is said, and what precision costs on a real text."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.source import resolve
from penstock.core.errors import StartupError
from penstock.engine.settings import EngineConfig
from penstock.kernels.native import bindings
from penstock.models.config import read_config
from penstock.models.host_weights import host_weights
from penstock.runner import startup
from penstock.runner.forward import TorchForward
from penstock.runner.model_runner import ModelRunner
from penstock.runner.native_runner import NativeRunner
from penstock.runner.packed import fill, native_model
from penstock.runner.quality import ExactText, Quality
from penstock.runner.startup import Progress, start
from penstock.text.tokenizer import load_tokenizer
from tests.bench.conftest import TINY

TEXT = Path(__file__).parents[1] / "data" / "moby-dick.txt"
SMALL: dict[str, Any] = {"device": "cpu", "kv_memory_gib": 0.01, "max_model_len": 128, "max_seqs": 2}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def executor_of(config: EngineConfig, progress: Progress | None = None) -> object:
    return start("smollm2-135m", config, progress)[1]


def runs_on_torch(executor: object) -> bool:
    return isinstance(executor, ModelRunner) and isinstance(executor._forward, TorchForward)


def test_int8_kernels_by_default_and_packed_weights_at_the_second_start(
    own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reports: list[tuple[int, int]] = []
    for said in ("loaded and packed", "read packed"):
        caplog.clear()
        config = EngineConfig(**SMALL)
        assert isinstance(executor_of(config, lambda done, total: reports.append((done, total))), NativeRunner)
        assert said in caplog.text
        assert "in int8" in caplog.text
    assert len(reports) > 200  # one per tensor, of the first start only
    assert reports[-1][0] == reports[-1][1]
    assert len(list((own_cache / "penstock" / "packed").iterdir())) == 1


def test_damaged_packed_weights_are_reported_and_packed_again(
    own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor_of(EngineConfig(**SMALL))
    (path,) = (own_cache / "penstock" / "packed").iterdir()
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes(byte ^ 0x55 for byte in whole[middle : middle + 200_000]))
    with path.open("ab") as file:
        file.write(whole[middle + 200_000 :])
    caplog.clear()
    executor_of(EngineConfig(**SMALL))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning == (f"the packed weights in {path} are damaged: the checksums do not match; they are packed again")
    assert path.read_bytes() == whole


def test_float32_is_plain_torch() -> None:
    assert runs_on_torch(executor_of(EngineConfig(dtype="float32", **SMALL)))


def test_without_the_library_it_runs_on_torch_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bindings, "LIBRARY", Path("/nowhere/_native.so"))
    bindings._load.cache_clear()
    try:
        assert runs_on_torch(executor_of(EngineConfig(**SMALL)))
        assert "reinstall with a C++20 compiler" in caplog.text
        with pytest.raises(StartupError, match=r"quantization int4: .*was not built"):
            start("smollm2-135m", EngineConfig(quantization="int4", **SMALL))
    finally:
        bindings._load.cache_clear()


def test_fp8_needs_a_gpu() -> None:
    with pytest.raises(StartupError, match="fp8 needs a CUDA device"):
        start("smollm2-135m", EngineConfig(quantization="fp8", **SMALL))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_dtype": "fp8"}, "kv_dtype fp8 needs a CUDA device; use int8"),
        ({"kv_dtype": "int8", "dtype": "float32"}, "kv_dtype int8 needs the native kernels.* leave kv_dtype out"),
        ({"kv_dtype": "bf16", "dtype": "float32"}, "kv_dtype bf16 needs the native kernels"),
    ],
)
def test_caches_that_do_not_exist_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(StartupError, match=message) as refused:
        start("smollm2-135m", EngineConfig(**{**SMALL, **settings}))
    assert refused.value.param == "engine.kv_dtype"


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"quantization": "none"}], ids=["torch", "bf16 with AMX"])
def test_deterministic_is_refused_where_logits_depend_on_the_batch(
    settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "isa", lambda: "amx")
    with pytest.raises(StartupError, match=r"deterministic") as refused:
        start("smollm2-135m", EngineConfig(deterministic=True, **{**SMALL, **settings}))
    assert refused.value.param == "engine.deterministic"


def test_deterministic_is_what_int8_is_anyway() -> None:
    assert isinstance(executor_of(EngineConfig(deterministic=True, **SMALL)), NativeRunner)


def test_int8_keeps_nearly_twice_the_tokens_in_the_same_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sizes = {**SMALL, "max_model_len": 2048}
    blocks = []
    for kind in ("bf16", "int8"):
        executor = executor_of(EngineConfig(kv_dtype=kind, **sizes))
        assert isinstance(executor, NativeRunner)
        blocks.append(executor.num_blocks)
        assert executor.model.cache_bytes <= 0.01 * 2**30
        assert f"{blocks[-1]} blocks" in caplog.text
    assert blocks[1] / blocks[0] == pytest.approx(128 / 66, rel=0.02)  # bytes of a head's 64 values, with their scale


def test_what_quantised_weights_cost() -> None:
    """Against float32 on the same text. Bounds leave room for other instruction sets, whose roundings differ."""
    checkpoint = resolve("smollm2-135m")
    config = read_config(checkpoint)
    tokens = load_tokenizer(checkpoint).encode(TEXT.read_text())[: 4 * 512]
    exact = ExactText(host_weights(checkpoint, config), config, tokens)

    def measured(scheme: bindings.Scheme, kv: bindings.KVFormat) -> Quality:
        model = native_model(config, scheme, block_size=16, num_blocks=32, threads=2, kv=kv)
        fill(model, checkpoint, config, None)
        return exact.compare(model)

    nearly_exact, int8, int4 = measured("none", "bf16"), measured("int8", "int8"), measured("int4", "int8")
    assert 20 < nearly_exact.exact_perplexity < 200
    assert nearly_exact.perplexity == pytest.approx(nearly_exact.exact_perplexity, rel=0.005)
    assert nearly_exact.top1 > 0.97
    assert nearly_exact.kl < 0.002
    assert int8.perplexity == pytest.approx(int8.exact_perplexity, rel=0.01)
    assert int8.top1 > 0.955
    assert int8.kl < 0.004
    assert int4.perplexity == pytest.approx(int4.exact_perplexity, rel=0.04)


def test_end_tokens_for_which_there_are_no_logits_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "eos_token_id": [2, TINY["vocab_size"]]}))
    scheduler, _, _ = start(f"dummy:{tmp_path}", EngineConfig(**SMALL))
    assert scheduler.limits.eos_ids == {2}
