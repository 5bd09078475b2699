"""Decode attention for Hopper against the gathered reference on an emulated GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.kernels.hopper import decode
from penstock.kernels.hopper.decode import StreamConfig, decode_stream, stream_config
from penstock.kernels.triton.decode import Rope, decode_scratch
from penstock.kernels.triton.decode_plan import plan_decode
from penstock.kernels.triton.paged import LOG2_E, paged_attention_reference
from penstock.kernels.triton.prefix import SharedPrefix
from penstock.kernels.triton.rope import rope_reference
from tests.kernels.hopper.emulated_gpu import available, emulated_kernel, emulated_tensor_map

BLOCK, DIM, BF16, FP8 = 16, 128, torch.bfloat16, torch.float8_e4m3fn
CONFIG = StreamConfig(stages=2, tile=32, spare=16)
needs_compiler = pytest.mark.skipif(not available, reason="no g++")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def emulated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "kernel", emulated_kernel(folder, resident=3))
    monkeypatch.setattr(decode, "tensor_map", emulated_tensor_map)


def make_cache(
    generator: torch.Generator, contexts: list[int], kv_heads: int, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and tables, with NaN wherever no sequence has a token."""
    columns = max(1, max(-(-context // BLOCK) for context in contexts))
    tables = (torch.randperm(len(contexts) * columns, generator=generator) + 1).view(len(contexts), columns).int()
    tokens = torch.arange(columns * BLOCK).view(1, columns, 1, BLOCK, 1)
    unused = tokens >= torch.tensor(contexts).view(-1, 1, 1, 1, 1)
    caches = []
    for _ in range(2):
        values = torch.randn(len(contexts), columns, kv_heads, BLOCK, DIM, generator=generator)
        cache = torch.full((len(contexts) * columns + 1, kv_heads, BLOCK, DIM), torch.nan).to(dtype)
        cache[tables.flatten().long()] = values.masked_fill(unused, torch.nan).flatten(0, 1).to(dtype)
        caches.append(cache)
    for seq, context in enumerate(contexts):
        tables[seq, -(-context // BLOCK) :] = 0
    return caches[0], caches[1], tables


@needs_compiler
@pytest.mark.parametrize(
    ("heads", "parts", "window", "dtype", "config"),
    [
        ((8, 2), 6, 0, BF16, CONFIG),
        ((1, 1), 9, 0, BF16, CONFIG),
        ((14, 2), 9, 40, BF16, CONFIG),
        ((8, 2), 9, 0, FP8, CONFIG),
        ((4, 1), 9, 0, BF16, StreamConfig(stages=6, tile=64, spare=4)),
    ],
)
def test_decode(
    emulated: None, heads: tuple[int, int], parts: int, window: int, dtype: torch.dtype, config: StreamConfig
) -> None:
    generator = torch.Generator().manual_seed(1)
    contexts = [1, 37, 0, 130, 16]  # a first token, a partial block, padding, several parts, whole blocks
    k, v, tables = make_cache(generator, contexts, heads[1], dtype)
    q = torch.randn(len(contexts), heads[0], DIM, generator=generator).to(BF16)
    scratch = decode_scratch(len(contexts), *heads, DIM, parts, q.device)
    plan = plan_decode(torch.tensor(contexts, dtype=torch.int32), parts, config.tile, window=window)
    expected = paged_attention_reference(q, k, v, tables, list(range(len(contexts) + 1)), contexts, 0.2, window)
    for _ in range(2):  # the arrival counters must be back at zero after a launch
        out = torch.full_like(q, torch.nan)
        decode_stream(out, q, k, v, tables, plan, scale=0.2, scratch=scratch, config=config)
        torch.testing.assert_close(out.float(), expected, atol=1e-2, rtol=1e-2)


@needs_compiler
def test_a_shared_prefix_is_merged(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its partial results cover what the plan leaves out."""
    generator, heads, scale = torch.Generator().manual_seed(2), (4, 2), 0.2
    contexts, length, splits = [70, 0, 49, 130, 33], 32, 2  # of which the last shares nothing
    k, v, tables = make_cache(generator, contexts, heads[1])
    tables[2, :2] = tables[3, :2] = tables[0, :2]
    q = torch.randn(len(contexts), heads[0], DIM, generator=generator).to(BF16)
    shared = torch.tensor([length, 0, length, length, 0], dtype=torch.int32)
    plan = CONFIG.division(len(contexts), heads[1]).plan(torch.tensor(contexts, dtype=torch.int32), shared_S=shared)
    scratch = decode_scratch(len(contexts), *heads, DIM, len(plan) + splits * len(contexts), q.device)

    def attend_prefix(*_: object) -> None:
        """One block a split, for every query, whether it shares the prefix or not; base 2, as `triton/prefix.py`."""
        for split in range(splits):
            keys, values = (cache[tables[0, split]].float().repeat_interleave(2, 0) for cache in (k, v))
            scores = torch.einsum("shd,htd->sht", q.float(), keys) * scale
            out, rows = torch.einsum("sht,htd->shd", scores.softmax(-1), values), split * len(contexts)
            scratch.out.view(-1, heads[0], DIM)[rows : rows + len(contexts)] = out
            lse = scores.logsumexp(-1) * LOG2_E
            scratch.lse.view(-1, heads[0])[rows : rows + len(contexts)] = lse

    monkeypatch.setattr(decode, "attend_prefix", attend_prefix)
    prefix = SharedPrefix(tables[0], torch.tensor([length], dtype=torch.int32), shared, splits)
    expected = paged_attention_reference(q, k, v, tables, list(range(len(contexts) + 1)), contexts, scale)
    for _ in range(2):
        out = torch.full_like(q, torch.nan)
        decode_stream(out, q, k, v, tables, plan, scale=scale, scratch=scratch, config=CONFIG, prefix=prefix)
        torch.testing.assert_close(out.float(), expected, atol=1e-2, rtol=1e-2)


@needs_compiler
@pytest.mark.parametrize(
    ("heads", "rotary", "normed", "dtype"),
    [((4, 2), 128, True, BF16), ((2, 2), 64, False, BF16), ((4, 2), 64, True, FP8)],
)
def test_decode_rotates_and_stores_what_is_new(
    emulated: None, heads: tuple[int, int], rotary: int, normed: bool, dtype: torch.dtype
) -> None:
    """The same as rotating and storing first, down to what is in the cache."""
    generator = torch.Generator().manual_seed(4)
    contexts, (h, kv) = [1, 33, 0, 130, 64], heads
    k, v, tables = make_cache(generator, [max(context - 1, 0) for context in contexts], kv, dtype)
    tables[0, 0], tables[1, 2] = k.shape[0], k.shape[0] + 1  # blocks that begin with the new token
    k, v = (torch.cat((cache, cache[:2])) for cache in (k, v))
    lengths = torch.tensor(contexts, dtype=torch.int32)
    positions = (lengths - 1).clamp_min(0)
    qkv = torch.randn(len(contexts), (h + 2 * kv) * DIM, generator=generator).to(BF16)
    cos_sin = torch.randn(256, rotary, generator=generator)
    gains = torch.randn(2, DIM, generator=generator).to(BF16)
    norm_weights = (gains[0], gains[1]) if normed else None

    q_ref, k_ref, v_ref = (part.to(BF16) for part in rope_reference(qkv, cos_sin, positions, h, kv, norm_weights, 1e-6))
    k_expected, v_expected = k.clone(), v.clone()
    for seq, context in enumerate(contexts):
        if context:
            block = tables[seq, (context - 1) // BLOCK]
            k_expected[block, :, (context - 1) % BLOCK] = k_ref[seq].to(dtype)
            v_expected[block, :, (context - 1) % BLOCK] = v_ref[seq].to(dtype)
    expected = paged_attention_reference(
        q_ref.to(BF16), k_expected, v_expected, tables, list(range(len(contexts) + 1)), contexts, 0.05
    )

    plan = plan_decode(lengths, 12, CONFIG.tile)
    scratch = decode_scratch(len(contexts), h, kv, DIM, 12, qkv.device)
    out = torch.full((len(contexts), h, DIM), torch.nan, dtype=BF16)
    rope = Rope(cos_sin, norm_weights, 1e-6)
    decode_stream(out, qkv, k, v, tables, plan, scale=0.05, scratch=scratch, config=CONFIG, rope=rope)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    step = 0.13 if dtype == FP8 else 1e-2  # a unit of the last place
    torch.testing.assert_close(k.float(), k_expected.float(), atol=step / 8, rtol=step, equal_nan=True)
    torch.testing.assert_close(v.float(), v_expected.float(), atol=0, rtol=0, equal_nan=True)


def test_every_batch_has_parts_to_spare() -> None:
    for size in (1, 8, 32, 64, 160, 256, 512):
        assert stream_config(size, 8).division(size, 8).parts > size
    plan = StreamConfig(3, 32, 64).division(4, 2).plan(torch.tensor([600, 100, 32, 1], dtype=torch.int32)).tolist()
    used = [entry[:3] for entry in plan if entry[0] >= 0]
    assert used[:19] == [[0, start, min(start + 32, 600)] for start in range(0, 600, 32)]  # 733 tokens in 32 parts
    assert used[19:] == [[1, 0, 32], [1, 32, 64], [1, 64, 96], [1, 96, 100], [2, 0, 32], [3, 0, 1]]
