from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.checkpoint.source import Checkpoint, resolve
from penstock.core.errors import StartupError
from penstock.models.base import CausalLM
from penstock.models.config import read_config
from penstock.models.loader import load_model, weights
from tests.models.tiny_models import all_logits, make_model

Save = Callable[..., Path]
CPU = torch.device("cpu")


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(checkpoint, read_config(checkpoint), dtype=dtype, device=CPU)


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Checkpoint:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return resolve(str(folder))


def test_missing_tensors_are_named(save: Save) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    checkpoint = change_weights(save(make_model("qwen3")), lambda tensors: tensors.pop(name))
    with pytest.raises(StartupError, match=f"lacks {name}$"):
        load(checkpoint)


def test_unexpected_tensors_are_named(save: Save) -> None:
    extra = {f"vision.{n}": torch.zeros(2) for n in range(10)}
    checkpoint = change_weights(save(make_model("qwen3")), lambda tensors: tensors.update(extra))
    with pytest.raises(StartupError, match=r"does not know: vision\.0, .* and 2 more$"):
        load(checkpoint)


def test_wrong_shapes_are_named(save: Save) -> None:
    wrong = {"model.norm.weight": torch.zeros(47)}
    checkpoint = change_weights(save(make_model("qwen3")), lambda tensors: tensors.update(wrong))
    with pytest.raises(StartupError, match=r"model\.norm\.weight has shape \(47,\), expected \(48,\)"):
        load(checkpoint)


def test_corrupt_file_is_refused(save: Save) -> None:
    folder = save(make_model("qwen3"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(StartupError, match="cannot read"):
        load(resolve(str(folder)))


def test_redundant_tensors_are_skipped(save: Save, tokens: torch.Tensor) -> None:
    folder = save(make_model("qwen2"))
    expected = all_logits(load(resolve(str(folder))), tokens)
    extra = {"lm_head.weight": torch.zeros(96, 48), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    checkpoint = change_weights(folder, lambda tensors: tensors.update(extra))
    assert torch.equal(all_logits(load(checkpoint), tokens), expected)


def test_tied_embeddings_are_held_once(save: Save) -> None:
    checkpoint = resolve(str(save(make_model("qwen2"))))
    stored = sum(tensor.numel() for _, tensor in weights(checkpoint, read_config(checkpoint)))
    assert sum(parameter.numel() for parameter in load(checkpoint).parameters()) == stored


def test_precision_is_converted(save: Save) -> None:
    model = load(resolve(str(save(make_model("mixtral")))), torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    logits = all_logits(model, torch.tensor([1, 2, 3]))
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


def test_progress_reaches_the_total(save: Save) -> None:
    checkpoint = resolve(str(save(make_model("qwen3"))))
    seen: list[tuple[int, int]] = []
    model = load_model(
        checkpoint,
        read_config(checkpoint),
        dtype=torch.float16,
        device=CPU,
        progress=lambda done, total: seen.append((done, total)),
    )
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert {total for _, total in seen} == {size}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == size


def test_dummy_weights_are_the_same_every_time(save: Save, tokens: torch.Tensor) -> None:
    checkpoint = resolve(f"dummy:{save(make_model('qwen3-moe'))}")
    first, second = (all_logits(load(checkpoint), tokens) for _ in range(2))
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert first.std() > 0.01
