"""Requests with LoRA adapters, mixed in one batch, give token for token what a model gives into whose weights the
adapter was merged: in float32, greedy and sampled, with the real model and fresh random adapters."""

from __future__ import annotations

import copy
import secrets
from pathlib import Path

import torch

from penstock.checkpoint.source import resolve
from penstock.core.request import Adapter, Chunk, GenerateRequest, SamplingParams
from penstock.engine.limits import SchedulerLimits
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.kernels.attention_reference import ReferenceAttention
from penstock.lora.checkpoint import adapter_digest, read_adapter
from penstock.lora.fit import projections
from penstock.lora.host_memory import HostAdapters
from penstock.models.base import CausalLM
from penstock.models.config import read_config
from penstock.models.loader import load_model
from penstock.runner.forward import TorchForward
from penstock.runner.model_runner import ModelRunner
from penstock.runner.row_state import TorchRows
from penstock.runner.torch_adapters import adapters_of
from penstock.text.tokenizer import load_tokenizer
from tests.lora.peft_folder import write_adapter

CHECKPOINT = resolve("smollm2-135m")
CONFIG = read_config(CHECKPOINT)
CPU = torch.device("cpu")
ROWS, BLOCKS, BLOCK = 8, 64, 16
PROMPT = "The harbour master wrote down every ship that came in before the storm. The first one was"
OUTPUT = 16
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, max_tokens=OUTPUT, ignore_eos=True),
}
# Modules, rank and weights' standard deviation of three adapters.
DRAWN = (
    (("q_proj", "v_proj"), 8, 0.09),
    (("gate_proj", "up_proj", "down_proj"), 4, 0.09),
    (("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 16, 0.03),
)


def generate(model: CausalLM, requests: list[GenerateRequest]) -> dict[str, list[int]]:
    """Tokens by request, all of them in one batch. Adapters are hooks on the model's layers, so it is copied."""
    model = copy.deepcopy(model)
    attention = ReferenceAttention(model.attention_spec, BLOCKS, BLOCK, torch.float32, CPU)
    state = TorchRows(ROWS, BLOCKS, CONFIG.vocab_size, CPU)
    changed = adapters_of(model, CPU)
    assert changed is not None
    runner = ModelRunner(TorchForward(model, attention, CPU), state, changed, num_blocks=BLOCKS, block_size=BLOCK)
    limits = SchedulerLimits(BLOCKS, BLOCK, ROWS, 512, 512, CONFIG.vocab_size, max_adapters=2)
    found: dict[str, list[int]] = {request.id: [] for request in requests}

    def take(chunks: list[Chunk]) -> None:
        for chunk in chunks:
            found[chunk.request_id] += chunk.token_ids

    host = HostAdapters(changed.modules, 64, 2**30)
    loop = EngineLoop(Scheduler(limits), runner, take, adapters=host)
    for request in requests:
        loop.submit(request)
    while loop.step():
        pass
    return found


def merged(model: CausalLM, folder: Path) -> CausalLM:
    model = copy.deepcopy(model)
    weights = dict(model.checkpoint_tensors())
    with torch.no_grad():
        for name, (a, b) in read_adapter(folder).modules.items():
            weights[f"{name}.weight"] += torch.from_numpy(b) @ torch.from_numpy(a)
    return model


def test_adapters_give_what_merged_weights_give(tmp_path: Path) -> None:
    seed = secrets.randbelow(2**31)
    base = projections(CONFIG)
    folders = [
        write_adapter(tmp_path / str(number), base, seed + number, rank, size, kinds)
        for number, (kinds, rank, size) in enumerate(DRAWN)
    ]
    model = load_model(CHECKPOINT, CONFIG, dtype=torch.float32, device=CPU)
    prompt = load_tokenizer(CHECKPOINT).encode(PROMPT)

    def ask(kind: str, folder: Path | None, adapter: Adapter | None = None) -> GenerateRequest:
        name = f"{kind} {folder.name if folder else 'plain'}"
        return GenerateRequest(name, prompt, SAMPLING[kind], seed=seed, adapter=adapter)

    adapters = [Adapter(adapter_digest(folder), str(folder)) for folder in folders]
    asked = [ask(kind, *each) for kind in SAMPLING for each in [*zip(folders, adapters, strict=True), (None, None)]]
    found = generate(model, asked)
    expected = generate(model, [ask(kind, None) for kind in SAMPLING])
    for folder in folders:
        expected |= generate(merged(model, folder), [ask(kind, folder) for kind in SAMPLING])
    assert found == expected, f"seed {seed}"
    answers = {tuple(tuple(found[f"{kind} {name}"]) for kind in SAMPLING) for name in ("0", "1", "2", "plain")}
    assert len(answers) == 4, "an adapter changes nothing"
