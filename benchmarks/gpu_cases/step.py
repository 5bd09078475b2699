"""Sampling, and a whole decoding step: what the kernels give together."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu_cases.case import BF16, COPY_BYTES, DEVICE, FP8, Case, Variant, randn, relative_error, sets_for, short
from gpu_cases.linear import scratch
from penstock.kernels import decode_triton as decode
from penstock.kernels import linear as linear_layers
from penstock.kernels.decode_plan_triton import decode_parts, plan_decode
from penstock.kernels.hopper.layers import KVCache, LayerShape, decode_step, stack_layers
from penstock.kernels.hopper.program import is_hopper
from penstock.kernels.linear import add_linear, gated_linear, linear, product_config
from penstock.kernels.rope_triton import rope_and_cache
from penstock.kernels.sampling_reference import sample_reference
from penstock.kernels.sampling_triton import SamplingRows, argmax, sample, sampling_scratch


def sampling_case(rows: int, vocab: int, dtype: torch.dtype) -> Case:
    sets = min(4, sets_for(rows * vocab * dtype.itemsize))
    logits = [randn(rows, vocab, dtype=dtype, scale=3.0) for _ in range(sets)]
    work = sampling_scratch(rows, vocab, DEVICE)
    out = torch.zeros(rows, dtype=torch.int64, device=DEVICE)

    def variant(label: str, top_k: int, top_p: float) -> Variant:
        parameters = SamplingRows(
            temperature=torch.full((rows,), 0.8, device=DEVICE),
            seed=torch.arange(rows, device=DEVICE) * 7919,
            position=torch.arange(rows, device=DEVICE),
            top_k=torch.full((rows,), top_k, dtype=torch.int32, device=DEVICE),
            top_p=torch.full((rows,), top_p, device=DEVICE),
            min_p=torch.zeros(rows, device=DEVICE),
        )

        def run(i: int) -> None:
            sample(logits[i], out, parameters, work, any_top_k=top_k > 0, any_top_p=top_p < 1, any_min_p=False)

        def mismatches() -> float:
            got = out[:8].tolist()
            wanted = [
                sample_reference(logits[0][r].cpu(), r * 7919, r, 0.8, top_k, top_p, 0.0) for r in range(len(got))
            ]
            return float(sum(a != b for a, b in zip(got, wanted, strict=True)))

        return Variant(label, run, mismatches)

    def greedy_mismatches() -> float:
        return float((logits[0].gather(1, out[:, None])[:, 0] != logits[0].amax(-1)).sum())

    variants = [
        Variant("argmax", lambda i: argmax(logits[i], out, work), greedy_mismatches),
        Variant("* torch argmax", lambda i: logits[i].argmax(-1)),
        variant("plain", 0, 1.0),
        variant("top-k", 40, 1.0),
        variant("top-p", 0, 0.9),
        variant("both", 40, 0.9),
    ]
    return Case(f"sampling {rows} {short(dtype)}", rows * vocab * dtype.itemsize / COPY_BYTES, sets, variants)


def step_case(model: str, dtype: torch.dtype, rows: int, context: int, most_layers: int = 64) -> Case:
    """A whole decoding step, every layer with weights of its own: what the kernels give together."""
    hidden, inner, heads, layers, vocab, normed = {
        "llama": (4096, 14336, 32, 32, 128256, False),
        "qwen": (1024, 3072, 16, 28, 151936, True),
    }[model]
    layers = min(layers, most_layers)

    def make_weight(n: int, k: int, dtype: torch.dtype = dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        if dtype == FP8:
            return randn(n, k, dtype=FP8), torch.full((n,), k**-0.5, device=DEVICE)
        return randn(n, k, scale=k**-0.5), None

    attention_width = heads * 128
    shapes = [(attention_width + 2048, hidden), (hidden, attention_width), (2 * inner, hidden), (hidden, inner)]
    weights = [[make_weight(*shape) for shape in shapes] for _ in range(layers)]
    head, gain, gains = make_weight(vocab, hidden, BF16)[0], randn(hidden), (randn(128), randn(128)) if normed else None
    size = sum(w.numel() * w.itemsize for layer in weights for w, _ in layer) + head.numel() * 2
    size += layers * rows * context * 4096
    k_all, v_all = (randn(layers, rows * -(-context // 16), 8, 16, 128) for _ in range(2))
    tables = torch.randperm(k_all.shape[1], device=DEVICE).view(rows, -1).to(torch.int32)
    cos_sin, contexts = (
        torch.randn(4096, 128, device=DEVICE),
        torch.full((rows,), context, dtype=torch.int32, device=DEVICE),
    )
    positions, embedded = contexts - 1, head[:rows]  # the tokens of rows 0, 1, 2...
    slots = tables[:, -1] * 16 + (context - 1) % 16
    config = decode.decode_config(rows, 8)
    parts = decode_parts(rows, 8)
    work = decode.decode_scratch(rows, heads, 8, 128, parts, DEVICE)
    sampling = sampling_scratch(rows, vocab, DEVICE)
    tokens = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    turn = decode.Turn(cos_sin, gains, 1e-6)
    logits = torch.empty(rows, vocab, device=DEVICE)

    def step(turns: bool, count: int = layers) -> None:
        x, begun = embedded.clone(), None
        plan = plan_decode(contexts, parts, config.block_n)
        for layer, k, v in zip(weights[:count], k_all[:count], v_all[:count], strict=True):
            (qkv, qkv_s), (o, o_s), (gate_up, gate_up_s), (down, down_s) = layer
            y = linear(x, qkv, scratch(), scales=qkv_s, norm=(gain, 1e-5), begun=begun)
            if not turns:
                y = rope_and_cache(y, cos_sin, positions, slots, k, v, heads, norm_weights=gains, eps=1e-6)
            attended = torch.empty(rows, heads, 128, dtype=BF16, device=DEVICE)
            decode.decode_attention(
                attended, y, k, v, tables, plan, scale=0.09, scratch=work, config=config,
                turn=turn if turns else None,
            )  # fmt: skip
            begun = add_linear(x, attended.flatten(1), o, scratch(), scales=o_s, next_gain=gain)
            z = gated_linear(x, gate_up, scratch(), scales=gate_up_s, norm=(gain, 1e-5), begun=begun)
            begun = add_linear(x, z, down, scratch(), scales=down_s, next_gain=gain)
        argmax(linear(x, head, scratch(), norm=(gain, 1e-5), out=logits), tokens, sampling)

    def stacked_step(count: int = layers) -> None:
        last_tokens.zero_()
        decode_step(
            stacked,
            KVCache(k_all, v_all, cos_sin, 0.09),
            first_row,
            contexts,
            last_tokens,
            tables,
            logits,
            num_layers=count,
        )

    head_gains = gains or (gain, gain)
    addresses = [
        [t.data_ptr() for t in (gain, qkv, *head_gains, o, gain, gate_up, down)]
        + [(gain if scales is None else scales).data_ptr() for _, scales in layer]
        for layer in weights
        for (qkv, _), (o, _), (gate_up, _), (down, _) in [layer]
    ]
    shape = LayerShape(hidden, inner, heads, 8, normed, dtype == FP8)
    programs = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    stacked = stack_layers(shape, addresses, head, gain, head, 1e-6, programs)
    first_row, last_tokens = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros_like(tokens)

    def stacked_error() -> float:
        """Of the logits after two layers, against layers launched one by one; rounding adds up over more."""
        stacked_step(2)
        found = logits.clone()
        step(True, 2)
        return relative_error(found, logits)

    def variant(label: str, choose: Callable[[torch.Tensor, torch.Tensor], object], turns: bool = True) -> Variant:
        def run(i: int) -> None:
            linear_layers.product_config = choose  # type: ignore[assignment]
            step(turns)

        return Variant(label, run)

    variants = [
        variant("table", product_config),
        variant("rope apart", product_config, turns=False),
        variant("* library only", lambda x, weight: None),
    ]
    if rows == 1 and is_hopper(DEVICE):
        variants.append(Variant("one launch", lambda i: stacked_step(), stacked_error))
    return Case(f"step {model} {short(dtype)} S{rows} ctx {context}", size / COPY_BYTES, 1, variants)
