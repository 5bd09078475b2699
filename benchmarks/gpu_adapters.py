"""LoRA adapters and verification of drafts on one GPU: do they compute what plain torch does, and what do they cost?

    python benchmarks/gpu_adapters.py --model llama-3.1-8b [--max-rank 64] [--deterministic] [--skip steps lora drafts]

Random weights and random adapters. `steps`: logits of steps with adapters against plain torch in float32 with merged
weights. `lora`: a layer's kernels against the reference at full size, then decode steps in CUDA graphs, alternately
without adapters and with some mixed in the batch. `drafts`: a step with drafts must sample what decoding token by token
samples (with --deterministic every token, else as far as other kernels allow), and what it takes beside a decode step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from penstock.bench.architectures import ARCHITECTURES, write_architecture
from penstock.checkpoint.source import resolve
from penstock.core.request import SamplingParams
from penstock.engine.executor import NO_ADAPTER, SAMPLED, AdapterWeights, RowSetup, Step
from penstock.engine.settings import EngineConfig
from penstock.kernels.attention_reference import ReferenceAttention
from penstock.kernels.lora_reference import lora_reference
from penstock.kernels.triton.lora import LowRank, add_and_shrink, expand, shrink, swiglu
from penstock.kernels.triton.norm import add_rms_norm_reference
from penstock.models.config import read_config
from penstock.models.loader import load_model
from penstock.runner.batch import build_batch
from penstock.runner.cuda_runner import CudaRunner, _Kind
from penstock.runner.device_stream import Graph
from penstock.runner.forward import TorchForward
from penstock.runner.row_state import TorchRows
from penstock.runner.startup import start

ROUNDS, REPLAYS, EPS = 7, 20, 1e-5
ADAPTERS, RANK, CONTEXT = 8, 16, 512


def some_adapter(runner: CudaRunner, number: int, rank: int) -> AdapterWeights:
    draw, modules = np.random.default_rng(number), {}
    pool = draw.standard_normal(1 << 22, dtype=np.float32)
    for name, (inputs, outputs) in runner.adapter_modules.items():
        first = int(draw.integers(0, len(pool) // 2))
        a = np.resize(pool[first:], (rank, inputs)) / np.float32(inputs**0.5)
        b = np.resize(pool[first // 2 :], (outputs, rank)) * np.float32(0.1)
        modules[name] = (a, b)
    return AdapterWeights(str(number), rank, modules)


class Merged:
    """The model in plain torch and float32, with one adapter at a time merged into its weights."""

    def __init__(self, name: str) -> None:
        checkpoint = resolve(name)
        config = read_config(checkpoint)
        device = torch.device("cuda")
        model = load_model(checkpoint, config, dtype=torch.bfloat16, device=device)
        model.float()
        attention = ReferenceAttention(model.attention_spec, 64, 16, torch.float32, device)
        self._forward = TorchForward(model, attention, device)
        self._rows = TorchRows(1, 64, config.vocab_size, device)
        self._rows.tables_RM[0] = np.arange(64)
        self._weights = dict(model.checkpoint_tensors())

    def logits(self, tokens: list[int], adapter: AdapterWeights | None) -> torch.Tensor:
        """After every token."""
        self._add(adapter, 1.0)
        step = Step(rows=[0], starts=[0], counts=[len(tokens)], samples=[1], tokens=tokens)
        every = np.arange(len(tokens), dtype=np.int32)
        found = self._forward(build_batch(step, self._rows, 16), self._rows, every)[0]
        self._add(adapter, -1.0)
        return found

    def _add(self, adapter: AdapterWeights | None, sign: float) -> None:
        for name, (a, b) in (adapter.modules if adapter else {}).items():
            weight = self._weights[f"{name}.weight"]
            weight.addmm_(torch.from_numpy(b).cuda(), torch.from_numpy(a).cuda(), alpha=sign)


def check_steps(runner: CudaRunner, merged: Merged, vocab: int) -> None:
    """A step with prompts, decode steps and a step with drafts, each with several adapters and rows without one."""
    draw, rows = np.random.default_rng(11), 7
    adapters = [some_adapter(runner, 100 + number, rank) for number, rank in enumerate((16, 8, 3))]
    slots = [0, NO_ADAPTER, 1, 2, 0, 1, NO_ADAPTER]
    texts = [draw.integers(1, min(vocab, 50_000), length).tolist() for length in (3, 40, 150, 17, 64, 33, 90)]
    greedy = SamplingParams(temperature=0, max_tokens=100)
    step = Step(rows=list(range(rows)), adapters=list(enumerate(adapters)))
    for row, (text, slot) in enumerate(zip(texts, slots, strict=True)):
        step.setups.append(RowSetup(row, greedy, 0, text, len(text), (), slot))
        step.blocks.append((row, 0, list(range(1 + row * 32, 33 + row * 32))))
        step.starts.append(0)
        step.counts.append(len(text))
        step.samples.append(1)
        step.tokens += text
    found: list[list[torch.Tensor]] = [[] for _ in texts]  # of each sequence, those after its last tokens
    for number in range(5):
        if number:
            last = number == 4
            more = [[text[-1], *draw.integers(1, 50_000, 3).tolist()] if last else [text[-1]] for text in texts]
            step = Step(
                rows=list(range(rows)), starts=[len(text) - 1 for text in texts], counts=[len(one) for one in more],
                samples=[len(one) for one in more], tokens=[t if last else SAMPLED for one in more for t in one],
            )  # fmt: skip
            for text, one in zip(texts, more, strict=True):
                text += one[1:]
        result, first = runner.collect(runner.launch(step)), 0
        for index, text in enumerate(texts):
            found[index].append(runner._logits[first : first + step.samples[index]].clone())
            first += step.samples[index]
            if number < 4:
                text += result.tokens[index]
    worst: dict[str, list[float]] = {"with": [], "without": [], "effect": []}
    for text, slot, logits in zip(texts, slots, found, strict=True):
        got = torch.cat(logits)
        adapter = None if slot == NO_ADAPTER else adapters[slot]
        true = merged.logits(text, adapter)[-len(got) :]
        worst["without" if adapter is None else "with"].append(relative(got, true))
        if adapter is not None:
            worst["effect"].append(relative(merged.logits(text, None)[-len(got) :], true))
    shown = ", ".join(f"{name} {min(errors):.1e} to {max(errors):.1e}" for name, errors in worst.items())
    right = max(worst["with"]) < 2 * max(worst["without"]) and max(worst["with"]) < 0.2 * min(worst["effect"])
    print(
        f"  steps, relative error of logits against merged float32: {shown}  {'ok' if right else 'WRONG'}", flush=True
    )


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def check_kernels(runner: CudaRunner, tokens: int) -> None:
    """Each kernel of a layer at full size, against the reference in float32."""
    adapters, draw = runner._adapters, np.random.default_rng(tokens)
    slots = draw.integers(NO_ADAPTER, ADAPTERS, tokens).astype(np.int32)
    adapters.send(slots, tokens)
    step, ranks = adapters.of_step(tokens), adapters._ranks.tolist()
    tiles, layer = step.tiles, step.layers[len(step.layers) // 2]
    assert layer.gate_up is not None
    assert layer.down is not None

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def of(x: torch.Tensor, low: LowRank) -> torch.Tensor:
        return lora_reference(x, low, slots.tolist(), ranks)

    C, widths = layer.qkv.inputs, layer.qkv.outputs
    x, mixed, gain, projected = random(tokens, C), random(tokens, widths[0]), random(C), random(tokens, sum(widths))
    found = add_and_shrink(x.clone(), tiles, None, (layer.qkv, gain, EPS))
    assert found is not None
    errors = {"values": relative(found[0].values, x.float() * gain.float())}
    out = torch.zeros_like(projected)
    expand(out, found[1], layer.qkv, tiles)
    errors["qkv"] = relative(out, of(add_rms_norm_reference(x, gain, EPS)[0], layer.qkv))
    summed = x.float() + of(mixed, layer.out)
    residual = x.clone()
    found = add_and_shrink(residual, tiles, (shrink(mixed, layer.out, tiles), layer.out), (layer.gate_up, gain, EPS))
    assert found is not None
    errors["out"] = relative(residual, summed)
    gate_up = random(tokens, sum(layer.gate_up.outputs))
    normed = add_rms_norm_reference(residual, gain, EPS)[0]
    gate, up = (gate_up.float() + of(normed, layer.gate_up)).chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    inner, down = swiglu(gate_up, found[1], layer.gate_up, layer.down, tiles)
    errors["inner"] = relative(inner, expected)
    last = torch.zeros_like(x)
    add_and_shrink(last, tiles, (down, layer.down), None)
    errors["down"] = relative(last, of(inner, layer.down))
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    print(f"  kernels, {tokens} tokens: relative error {shown}  {'ok' if max(errors.values()) < 0.02 else 'WRONG'}")


def place(runner: CudaRunner, rows: int, context: int) -> None:
    """Blocks for so many rows."""
    blocks = -(-context // 16) + 8
    tables = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks) % runner.num_blocks
    runner._state.tables_RM[:rows, :blocks] = tables
    runner._tables[:rows, :blocks] = torch.from_numpy(tables).cuda()


def milliseconds(graphs: dict[str, Graph]) -> dict[str, float]:
    """Of each graph, replayed in turns; the median of the rounds."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / REPLAYS)
    return {name: statistics.median(found) for name, found in times.items()}


def measure_lora(runner: CudaRunner, rank: int) -> None:
    runner._adapters._packed.clear()
    began = time.perf_counter()
    packed = [some_adapter(runner, number, rank) for number in range(ADAPTERS)]
    made, prepared, filled = time.perf_counter() - began, [], []
    for slot, adapter in enumerate(packed):
        began = time.perf_counter()
        runner._adapters.prepare(adapter)
        prepared.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        began = time.perf_counter()
        runner._adapters.fill(slot, adapter)
        torch.cuda.synchronize()
        filled.append(time.perf_counter() - began)
    to_pack, to_fill = (statistics.median(times) * 1e3 for times in (prepared, filled))
    print(
        f"  made {ADAPTERS} adapters in {made:.1f} s; one takes {to_pack:.0f} ms to pack, {to_fill:.1f} to fill a slot"
    )
    for tokens in (1, 5, 32, 200, 600):
        check_kernels(runner, tokens)
    for size in (1, 8, 32, 64, 128):
        place(runner, size, CONTEXT)
        contexts = np.full(size, CONTEXT, dtype=np.int32)
        runner._inputs.send(runner._slots.take().inputs, np.arange(size, dtype=np.int32), contexts)
        padded = max(size, 2)  # one row has no GEMM
        graphs = {"without": runner._graphs[_Kind(size)], "with": runner._graphs[_Kind(padded, adapted=True)]}
        shown = []
        for used in (1, ADAPTERS, 0):
            slots = np.arange(size, dtype=np.int32) % used if used else np.full(size, NO_ADAPTER, np.int32)
            runner._adapters.send(slots, padded)
            torch.cuda.synchronize()
            found = milliseconds(graphs)
            shown.append(f"{used} adapters {found['with']:.3f} ({found['with'] / found['without'] - 1:+.1%})")
        print(f"  {size:3d} sequences: without {found['without']:.3f} ms; {', '.join(shown)}", flush=True)


def sequence_step(row: int, prompt: list[int], params: SamplingParams, blocks: list[int]) -> Step:
    return Step(
        rows=[row], starts=[0], counts=[len(prompt)], samples=[1], tokens=list(prompt),
        setups=[RowSetup(row, params, 7, prompt, len(prompt), ())], blocks=[(row, 0, blocks)],
    )  # fmt: skip


def compare_drafts(runner: CudaRunner, vocab: int, params: SamplingParams, output: int = 60) -> None:
    """One request, token by token, then with drafts that are its own output with every eighth token wrong."""
    draw = np.random.default_rng(3)
    prompt = draw.integers(1, min(vocab, 50_000), 300).tolist()
    truth = runner.collect(runner.launch(sequence_step(0, prompt, params, list(range(64))))).tokens[0]
    for number in range(output):
        step = Step(rows=[0], starts=[len(prompt) + number], counts=[1], samples=[1], tokens=[SAMPLED])
        truth += runner.collect(runner.launch(step)).tokens[0]
    found = runner.collect(runner.launch(sequence_step(0, prompt, params, list(range(64))))).tokens[0]
    steps, same = 0, 0
    while len(found) < output and found == truth[: len(found)]:
        drafts = [t if i % 8 else t + 1 for i, t in enumerate(truth[len(found) : len(found) + 5], start=len(found))]
        start = len(prompt) + len(found) - 1
        tokens = [found[-1], *drafts]
        step = Step(rows=[0], starts=[start], counts=[len(tokens)], samples=[len(tokens)], tokens=tokens)
        found += runner.collect(runner.launch(step)).tokens[0]
        steps += 1
    same = next((i for i, (a, b) in enumerate(zip(found, truth, strict=False)) if a != b), len(found))
    asked = f"temperature {params.temperature}, penalty {params.frequency_penalty}"
    print(f"  {asked}: first {same} of {len(found)} tokens the same, {steps} steps with drafts", flush=True)


def measure_drafts(runner: CudaRunner, vocab: int) -> None:
    for params in (
        SamplingParams(temperature=0, max_tokens=100),
        SamplingParams(temperature=0.8, top_p=0.95, max_tokens=100),
        SamplingParams(temperature=0.8, frequency_penalty=0.5, max_tokens=100),
    ):
        compare_drafts(runner, vocab, params)
    for context in (512, 4096, 16384):
        place(runner, 1, context)
        kinds = {"decode": _Kind(1)}
        if runner._forward.stacks(1, context):
            kinds["persistent"] = _Kind(1, stacked=True)
        entries = {f"{size} tokens": size for size in (4, 8, 16, 32)}
        shown = []
        runner._inputs.send(runner._slots.take().inputs, np.zeros(1, np.int32), np.full(1, context, np.int32))
        torch.cuda.synchronize()
        base = milliseconds({name: runner._graphs[kind] for name, kind in kinds.items()})
        for name, size in entries.items():
            rows, contexts = np.zeros(size, np.int32), np.arange(context - size + 1, context + 1, dtype=np.int32)
            runner._inputs.send(
                runner._slots.take().inputs, rows, contexts, tokens=np.arange(size, dtype=np.int32), sequences=rows
            )
            torch.cuda.synchronize()
            found = milliseconds({name: runner._graphs[_Kind(size, drafts=True)]})[name]
            shown.append(f"{name} {found:.3f} ({found / base['decode'] - 1:+.1%})")
        print(f"  context {context}: {', '.join(f'{k} {v:.3f} ms' for k, v in base.items())}; {', '.join(shown)}")
    wall(runner)


def wall(runner: CudaRunner) -> None:
    """From launching a step to its tokens on the host, for one sequence: what drafting waits for."""
    place(runner, 1, 512)
    shown = []
    for count in (1, 5, 9):
        tokens, times = list(range(5, 5 + count)), []
        for _ in range(30):
            began = time.perf_counter()
            step = Step(rows=[0], starts=[300], counts=[count], samples=[count], tokens=tokens)
            runner.collect(runner.launch(step))
            times.append(time.perf_counter() - began)
        shown.append(f"{count} tokens {statistics.median(times) * 1e3:.3f} ms")
    print(f"  launch to tokens: {', '.join(shown)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(ARCHITECTURES), default="llama-3.1-8b")
    parser.add_argument("--max-rank", type=int, default=RANK, help="of the slots; the adapters have rank 16")
    parser.add_argument("--max-seqs", type=int, default=128)
    parser.add_argument("--deterministic", action="store_true", help="without adapters")
    parser.add_argument("--skip", nargs="*", choices=["steps", "lora", "drafts"], default=[])
    args = parser.parse_args()
    engine = EngineConfig(
        max_seqs=args.max_seqs, max_model_len=20_000, kv_memory_gib=20, max_step_tokens=2048, max_adapters=ADAPTERS,
        max_adapter_rank=args.max_rank, deterministic=args.deterministic,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        name = f"dummy:{write_architecture(args.model, Path(folder) / args.model)}"
        began = time.monotonic()
        _, executor, info = start(name, engine)
        assert isinstance(executor, CudaRunner), "needs a GPU"
        print(f"{args.model}, rank {RANK} of {args.max_rank}: started in {time.monotonic() - began:.0f} s", flush=True)
        with torch.inference_mode():
            if "drafts" not in args.skip:
                measure_drafts(executor, info.vocab_size)
            if "lora" not in args.skip and not args.deterministic:
                measure_lora(executor, RANK)
            if "steps" not in args.skip and not args.deterministic:
                check_steps(executor, Merged(name), info.vocab_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
