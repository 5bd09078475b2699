"""Whether operators and layers of `engine.deterministic` give the same bits in any batch, and what each costs."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from penstock.core.request import SamplingParams
from penstock.engine.executor import RowSetup, Step
from penstock.kernels import batch_invariant
from penstock.kernels.triton.decode_inputs import DecodeInputs
from penstock.kernels.triton.norm import add_rms_norm
from penstock.kernels.triton.prefill import prefill_attention
from penstock.runner.batch import build_batch
from penstock.runner.fused_forward import FusedForward
from penstock.runner.fused_layers import Dense
from penstock.runner.paged_attention import MixedStep
from penstock.runner.row_state import RowState

MODEL_LEN, BLOCK = 8192, 16
ROW_COUNTS = (*range(1, 513), 640, 1000, 1024, 2048, 3001, 4096, 8192)

Report = Callable[[str], None]


# -- operators --------------------------------------------------------------------------------------------------------


def ranges(numbers: Sequence[int]) -> str:
    """1-3, 7 of [1, 2, 3, 7]."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)


def compare_rows(report: Report, name: str, run: Callable[[int], torch.Tensor]) -> None:
    """`run` computes the first so many rows of something: all must have the bits of the largest run, and of 64 rows."""
    whole, few = run(max(ROW_COUNTS)).clone(), run(64).clone()
    different, unlike_few = [], []
    for rows in ROW_COUNTS:
        found = run(rows)
        if not torch.equal(found, whole[:rows]):
            different.append(rows)
        both = min(rows, 64)
        if not torch.equal(found[:both], few[:both]):
            unlike_few.append(rows)
    verdict = "same bits" if not different else f"DIFFERENT from {max(ROW_COUNTS)} rows: {ranges(different)}"
    if unlike_few:
        verdict += f"; DIFFERENT from 64 rows: {ranges(unlike_few)}"
    report(f"  {name}: {verdict}")


def check_operators(forward: FusedForward, report: Report) -> None:
    layer = forward._layers[1]
    assert isinstance(layer.mlp, Dense)
    most, device = max(ROW_COUNTS), forward.device
    torch.manual_seed(0)

    def rows(width: int) -> torch.Tensor:
        return torch.randn(most, width, device=device).bfloat16()

    hidden = rows(layer.qkv.weight.shape[1])
    norm = (layer.mlp_norm, 1e-6)
    compare_rows(report, "RMSNorm", lambda count: add_rms_norm(hidden[:count], *norm))
    for name, projection in (("out", layer.out), ("down", layer.mlp.down)):
        x, weight, scales = rows(projection.weight.shape[1]), projection.weight, projection.scales

        def added(count: int, x: Any = x, weight: Any = weight, scales: Any = scales) -> torch.Tensor:
            out = hidden[:count].clone()
            batch_invariant.add_linear(out, x[:count], weight, scales=scales)
            return out

        def followed(count: int, x: Any = x, weight: Any = weight, scales: Any = scales) -> torch.Tensor:
            out = hidden[:count].clone()
            deferred = batch_invariant.add_linear(out, x[:count], weight, scales=scales, next_gain=norm[0])
            qkv = layer.qkv
            return batch_invariant.linear(out, qkv.weight, scales=qkv.scales, norm=norm, deferred=deferred)

        compare_rows(report, f"{name} {tuple(weight.shape)}, residual", added)
        compare_rows(report, f"{name}, then qkv {tuple(layer.qkv.weight.shape)} with the RMSNorm between", followed)
    qkv, gate_up = layer.qkv, layer.mlp.gate_up
    compare_rows(
        report,
        "qkv, RMSNorm before",
        lambda n: batch_invariant.linear(hidden[:n], qkv.weight, scales=qkv.scales, norm=norm),
    )
    compare_rows(
        report,
        f"gate_up {tuple(gate_up.weight.shape)}, SwiGLU",
        lambda n: batch_invariant.linear(hidden[:n], gate_up.weight, scales=gate_up.scales, gated=True),
    )
    compare_rows(report, "the same with the RMSNorm before", lambda n: _gated_after_norm(forward, hidden[:n], norm))
    few = hidden[:512]
    outputs = {n: forward.logits(few[:n]) for n in (1, 2, 16, 33, 64, 129, 256, 257, 512)}
    different = [n for n, out in outputs.items() if not torch.equal(out, outputs[512][:n])]
    report(f"  logits: {'same bits' if not different else f'DIFFERENT: {ranges(different)}'}")


def _gated_after_norm(forward: FusedForward, x: torch.Tensor, norm: tuple[torch.Tensor, float]) -> torch.Tensor:
    layer = forward._layers[1]
    assert isinstance(layer.mlp, Dense)
    gate_up, out = layer.mlp.gate_up, x.clone()
    mixed = torch.ones(len(x), layer.out.weight.shape[1], dtype=x.dtype, device=x.device)
    deferred = batch_invariant.add_linear(out, mixed, layer.out.weight, scales=layer.out.scales, next_gain=norm[0])
    return batch_invariant.linear(out, gate_up.weight, scales=gate_up.scales, gated=True, norm=norm, deferred=deferred)


def check_attention(forward: FusedForward, report: Report, length: int = 3100) -> None:
    """Queries of one sequence: all at once, as decode tokens beside others, and in chunks beside others."""
    spec, device, others = forward._spec, forward.device, 40
    torch.manual_seed(1)
    blocks = -(-length // BLOCK)
    shape = (blocks * 2, spec.num_kv_heads, BLOCK, spec.head_dim)
    k, v = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    table = torch.randperm(2 * blocks, device=device).int()
    q = torch.randn(length, spec.num_heads, spec.head_dim, device=device).bfloat16()

    def attend(chunks: list[tuple[int, int]]) -> list[torch.Tensor]:
        counts = [end - first for first, end in chunks]
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=device)
        ends = torch.tensor([end for _, end in chunks], dtype=torch.int32, device=device)
        queries = torch.cat([q[first:end] for first, end in chunks])
        out = torch.empty_like(queries)
        prefill_attention(
            out, queries, k, v, table[None, :blocks].repeat(len(chunks), 1), starts, ends,
            num_queries=len(queries), scale=spec.scale, window=spec.windows[0], invariant=True,
        )  # fmt: skip
        return list(out.split(counts))

    whole = attend([(0, length)])[0]
    edges = (0, 1, 63, 127, 128, 500, 1022, 1023, 1024, 1025, 2047, 2048, 2500, 3071, 3072, 3099)
    positions = [position for position in edges if position < length]
    beside = [(p, p + 1) for p in range(7, length, length // others)]
    for name, cut in (
        ("decode alone", [[(p, p + 1)] for p in positions]),
        ("decode beside 40", [[*beside, (p, p + 1)] for p in positions]),
        ("chunks of 100", [[(p, p + 100)] for p in (0, 90, length - 100)]),
        ("chunks beside others", [[*beside, *[(0, 50)] * 9, (p, min(p + 700, length))] for p in (0, 90, length - 110)]),
    ):  # fmt: skip
        different = [chunks[-1][0] for chunks in cut if not torch.equal(attend(chunks)[-1], whole[slice(*chunks[-1])])]
        report(f"  attention, {name}: {'same bits' if not different else f'DIFFERENT at {different}'}")


# -- the first operator that differs ----------------------------------------------------------------------------------


class Trace:
    """Computes a sequence in its own cache, step by step, and keeps what each operator gave for its last token."""

    def __init__(self, forward: FusedForward, tokens: Sequence[Sequence[int]]) -> None:
        self._forward, self._tokens = forward, tokens
        table = MODEL_LEN // BLOCK
        self._state = RowState(len(tokens), table, forward.embedding.shape[0], forward.device)
        share = min(table, forward.attention.num_blocks // len(tokens))
        places = [(row, 0, list(range(row * share, (row + 1) * share))) for row in range(len(tokens))]
        greedy = SamplingParams(temperature=0)
        setups = [RowSetup(row, greedy, 0, list(known), len(known), ()) for row, known in enumerate(tokens)]
        self._begun: dict[str, Any] = {"setups": setups, "blocks": places}

    @torch.inference_mode()
    def __call__(self, *chunks: tuple[int, int, int]) -> list[tuple[str, torch.Tensor]]:
        """(row, first position, end) each; those of one token first. The last token of the last one is traced."""
        step = Step(
            rows=[row for row, _, _ in chunks],
            starts=[first for _, first, _ in chunks],
            counts=[end - first for _, first, end in chunks],
            samples=[1] * len(chunks),
            tokens=[token for row, first, end in chunks for token in self._tokens[row][first:end]],
            **self._begun,
        )
        self._begun = {}
        self._state.apply(step)
        batch = build_batch(step, self._state, BLOCK)
        kept: list[tuple[str, torch.Tensor]] = []
        with _recorded(self._forward, kept):
            hidden = self._forward.step_hidden(batch, self._state)
        kept.append(("logits", self._forward.logits(hidden[-1:])[0]))
        return kept


@contextmanager
def _recorded(forward: FusedForward, kept: list[tuple[str, torch.Tensor]]) -> Iterator[None]:
    operators: Any = forward
    attention: Any = forward.attention
    names = ("_linear", "_gated_linear", "_add_linear")
    saved, attend_invariant = {name: getattr(operators, name) for name in names}, attention._attend_invariant

    def recording(name: str) -> Callable[..., Any]:
        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            made = saved[name](x, *args, **kwargs)
            kept.append((name[1:], (x if name == "_add_linear" else made)[-1].clone()))
            return made

        return run

    def attending(step: Any) -> Any:
        attend = attend_invariant(step)

        def run(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = attend(layer, qkv)
            kept.append((f"attention of layer {layer}", out[-1].clone()))
            return out

        return run

    for name in names:
        setattr(operators, name, recording(name))
    attention._attend_invariant = attending
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(operators, name, function)
        attention._attend_invariant = attend_invariant


def check_layers(forward: FusedForward, report: Report, length: int = 1500, beside: int = 40) -> None:
    """One position in several ways through all layers, without CUDA graphs."""
    draw = random.Random(3)
    tokens = [[draw.randrange(100, 50_000) for _ in range(length)] for _ in range(beside + 1)]
    whole = Trace(forward, tokens)((0, 0, length))

    def in_chunks(size: int) -> list[tuple[str, torch.Tensor]]:
        trace = Trace(forward, tokens)
        for first in range(0, length, size):
            found = trace((0, first, min(first + size, length)))
        return found

    def decoded(others: int, alone: int) -> list[tuple[str, torch.Tensor]]:
        trace = Trace(forward, tokens)
        trace((0, 0, length - alone))
        trace(*[(row, 0, 2 + row) for row in range(1, others + 1)]) if others else None
        for position in range(length - alone, length):
            ahead = position - length + alone
            found = trace(
                *[(row, 2 + row + ahead, 3 + row + ahead) for row in range(1, others + 1)], (0, position, position + 1)
            )
        return found

    ways: dict[str, Callable[[], list[tuple[str, torch.Tensor]]]]
    ways = {"chunks of 100": lambda: in_chunks(100), "chunks of 700": lambda: in_chunks(700)}
    ways |= {"3 decoded": lambda: decoded(0, 3), f"3 decoded beside {beside}": lambda: decoded(beside, 3)}
    for name, way in ways.items():
        found = way()
        first = next(
            (i for i, (a, b) in enumerate(zip(found, whole, strict=True)) if not torch.equal(a[1], b[1])), None
        )
        verdict = "same bits in all layers"
        if first is not None:
            (operator, here), (_, there) = found[first], whole[first]
            gap = float((here.float() - there.float()).abs().max())
            verdict = f"DIFFERENT first at operator {first} of {len(whole)}, {operator}, by up to {gap:.3g}"
        report(f"  {name}: {verdict}")


# -- what operators take ----------------------------------------------------------------------------------------------


def microseconds(run: Callable[[int], object], layers: int) -> float:
    """Of `run(layer)`, in a CUDA graph of all layers, so that weights come from memory and launches cost nothing."""
    with torch.cuda.stream(torch.cuda.Stream()):
        run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            run(layer)
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    milliseconds: list[float] = [begin.elapsed_time(end) for begin, end in times]
    return statistics.median(milliseconds) / layers * 1e3


def time_operators(default: FusedForward, deterministic: FusedForward, report: Report) -> None:
    """Each with the norm before it or the addition after it; default / deterministic."""
    report(f"  µs a layer, default/deterministic {'qkv':>14}{'out':>14}{'gate_up':>14}{'down':>14}")
    for rows in (1, 8, 32, 64, 128, 256, 512, 2048, 8192):
        cells = []
        for which in range(4):
            times = [_gemm_time(forward, which, rows) for forward in (default, deterministic)]
            cells.append(f"{times[0]:.1f}/{times[1]:.1f}")
        report(f"  {rows:5} rows {'':23}" + "".join(f"{cell:>14}" for cell in cells))
    for seqs, context in ((1, 300), (1, 1000), (1, 4000), (32, 300), (32, 1000), (128, 600), (8, 7000)):
        times = [_decode_time(forward, seqs, context) for forward in (default, deterministic)]
        report(f"  decode attention of {seqs} x {context}: {times[0]:.1f}/{times[1]:.1f}")
    for counts, context in (((2048,), 2048), ((4096,), 4096), ((512,) * 4, 512), ((1024,), 8000), ((64,), 3000)):
        times = [_prefill_time(forward, counts, context) for forward in (default, deterministic)]
        chunks = f"{len(counts)} x {counts[0]} after {context - counts[0]}"
        report(f"  prefill attention of {chunks}: {times[0]:.1f}/{times[1]:.1f}")


def _gemm_time(forward: FusedForward, which: int, rows: int) -> float:
    layers, device = forward._layers, forward.device
    first = layers[0].mlp
    assert isinstance(first, Dense)
    weight = (layers[0].qkv, layers[0].out, first.gate_up, first.down)[which].weight
    residual = torch.randn(rows, layers[0].qkv.weight.shape[1], device=device).bfloat16()
    x = torch.randn(rows, weight.shape[1], device=device).bfloat16()

    def run(number: int) -> None:
        layer = layers[number]
        assert isinstance(layer.mlp, Dense)
        projection = (layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down)[which]
        if which % 2:
            forward._add_linear(residual, x, projection.weight, scales=projection.scales, next_gain=layer.mlp_norm)
        else:
            apply = forward._linear if which == 0 else forward._gated_linear
            apply(x, projection.weight, scales=projection.scales, norm=(layer.mlp_norm, 1e-6))

    return microseconds(run, len(layers))


def _decode_time(forward: FusedForward, seqs: int, context: int) -> float:
    spec, device = forward._spec, forward.device
    blocks = -(-context // BLOCK)
    tables = torch.arange(seqs * blocks, dtype=torch.int32, device=device).view(seqs, blocks)
    contexts = torch.full((seqs,), context, dtype=torch.int32, device=device)
    slots = tables[:, -1] * BLOCK + (context - 1) % BLOCK
    qkv = torch.randn(seqs, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, device=device).bfloat16()
    attend = forward.attention.attend_decode(DecodeInputs(qkv, contexts - 1, slots.int(), tables), contexts)
    return microseconds(lambda layer: attend(layer, qkv), len(forward._layers))


def _prefill_time(forward: FusedForward, counts: tuple[int, ...], context: int) -> float:
    spec, device, total = forward._spec, forward.device, sum(counts)
    blocks = -(-context // BLOCK)
    tables = torch.arange(len(counts) * blocks, dtype=torch.int32, device=device).view(len(counts), blocks)
    positions = torch.cat([torch.arange(context - count, context, device=device) for count in counts]).int()
    rows = torch.repeat_interleave(torch.arange(len(counts), device=device), torch.tensor(counts, device=device))
    slots = tables[rows, (positions // BLOCK).long()] * BLOCK + positions % BLOCK
    starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=device)
    contexts = torch.full((len(counts),), context, dtype=torch.int32, device=device)
    qkv = torch.randn(total, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, device=device).bfloat16()
    step = MixedStep(positions, slots.int(), tables, starts, contexts, num_decodes=0, num_queries=total)
    attend = forward.attention.attend_mixed(step)
    return microseconds(lambda layer: attend(layer, qkv), len(forward._layers))
