"""Tunes the tile configs of GEMMs and decode attention on Hopper by whole decode steps in CUDA graphs.

    PYTHONPATH=. python3 benchmarks/gpu_steps.py --architecture llama-3.1-8b [--quantization fp8] 32x256 96x600 ...

Steps have so many sequences with about so many tokens. One config after the other is tried, all others as they are;
what `hopper/gemm_configs.py` and `hopper/decode.py` choose stands beside the best.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.bench.architectures import ARCHITECTURES, write_architecture
from penstock.engine.settings import EngineConfig, Quantization
from penstock.kernels import linear as linear_layers
from penstock.kernels.hopper.decode import StreamConfig, stream_config
from penstock.kernels.hopper.gemm import STEP_BYTES, HopperConfig, padded_rows, shared_bytes
from penstock.kernels.hopper.persistent_gemm import Tiling
from penstock.runner import paged_attention
from penstock.runner.cuda_runner import CudaRunner, _Kind
from penstock.runner.fused_layers import Dense
from penstock.runner.startup import start

TileConfig = HopperConfig | Tiling | StreamConfig
RINGS = (224, 190, 148, 128, 110, 72, 54)  # KiB of shared memory for stages
SHARED_BYTES = 227 << 10
MOST_SEQUENCES = 512
REPLAYS = 10
SHOWN = 5


class Overrides:
    """Tile configs that are tried in place of the chosen ones: by the shape of a weight, and for attention."""

    def __init__(self) -> None:
        self.weights: dict[tuple[int, ...], TileConfig] = {}
        self.attention: StreamConfig | None = None
        layers: Any = linear_layers  # a module, whose functions are replaced below
        attention: Any = paged_attention
        gemm_config, swiglu_tiling = layers.gemm_config, layers.swiglu_tiling

        def gemm_or(x: torch.Tensor, weight: torch.Tensor) -> object:
            tried = self.weights.get(tuple(weight.shape))
            return gemm_config(x, weight) if tried is None else tried if isinstance(tried, HopperConfig) else None

        def tiling_or(x: torch.Tensor, weight: torch.Tensor, *, streams: bool) -> object:
            tried = self.weights.get(tuple(weight.shape))
            if tried is None:
                return swiglu_tiling(x, weight, streams=streams)
            return tried if isinstance(tried, Tiling) else None

        layers.gemm_config = gemm_or
        layers.swiglu_tiling = tiling_or
        attention.stream_config = lambda *sizes: self.attention or stream_config(*sizes)


class Steps:
    """Decoding steps of a model with random weights."""

    def __init__(self, architecture: str, quantization: Quantization) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = write_architecture(architecture, Path(folder) / architecture)
            _, executor, _ = start(f"dummy:{path}", EngineConfig(max_seqs=MOST_SEQUENCES, quantization=quantization))
        assert isinstance(executor, CudaRunner), "needs a GPU"
        self.runner, self.size = executor, 0

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Of the weights of a layer: output channels, input channels."""
        layer = self.runner._forward._layers[0]
        assert isinstance(layer.mlp, Dense), "grouped GEMMs have configs of their own"
        weights = {"qkv": layer.qkv, "out": layer.out, "gate_up": layer.mlp.gate_up, "down": layer.mlp.down}
        return {name: (p.weight.shape[0], p.weight.shape[1]) for name, p in weights.items()}

    def place(self, sequences: int, context: int) -> None:
        """Contexts differ by up to three quarters, as they do where requests come and go."""
        runner, self.size = self.runner, sequences
        blocks = -(-2 * context // 16)
        tables = torch.arange(sequences * blocks, dtype=torch.int32, device="cuda") % (runner.num_blocks - 1)
        runner._tables[:sequences, :blocks] = tables.view(sequences, blocks)
        contexts = np.random.default_rng(sequences).integers(context // 4, 2 * context - context // 4, sequences)
        runner._inputs.send(
            runner._slots.take().inputs, np.arange(sequences, dtype=np.int32), contexts.astype(np.int32)
        )
        torch.cuda.synchronize()

    @torch.inference_mode()
    def milliseconds(self) -> float:
        kind = _Kind(self.size)
        with torch.cuda.stream(torch.cuda.Stream()):
            self.runner._decode_body(kind, self.runner._forward.distinct_layers)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.runner._decode_body(kind)
        return min(self._replay(graph), self._replay(graph))

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        times = []
        for _ in range(REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            times.append((begin, end))
        torch.cuda.synchronize()
        milliseconds: list[float] = [begin.elapsed_time(end) for begin, end in times]
        return statistics.median(milliseconds)


def gemm_candidates(name: str, n: int, k: int, itemsize: int, rows: int) -> Iterator[TileConfig]:
    padded, steps, gated = padded_rows(rows), -(-k * itemsize // STEP_BYTES), name == "gate_up"
    seen = set()
    for tile, splits, ring in product((64, 128, 256), (1, 2, 4), RINGS):
        blocks, stages = (
            -(-n // tile) * splits,
            min((ring << 10) // ((tile + padded) * STEP_BYTES), -(-steps // splits)),
        )
        config = HopperConfig(tile, stages, splits)
        fits = (
            stages >= 2 and padded * max(1, tile // 128) <= 384 and shared_bytes(config, padded, gated) <= SHARED_BYTES
        )
        if fits and blocks >= 48 and (splits == 1 or blocks <= 132) and config not in seen:
            seen.add(config)
            yield config
    if gated and rows > 64:
        yield from (Tiling(width, common_rows=rows <= 128) for width in (256, 224, 192))


def attention_candidates(sequences: int, kv_heads: int) -> Iterator[StreamConfig]:
    """In no more parts than there is scratch memory for."""
    most = stream_config(MOST_SEQUENCES, kv_heads).division(MOST_SEQUENCES, kv_heads).parts
    for shape in product((3, 4, 6), (64, 128, 256), (528, 1056, 2112)):
        config = StreamConfig(*shape)
        if config.division(sequences, kv_heads).parts <= most:
            yield config


def label(config: TileConfig) -> str:
    if isinstance(config, Tiling):
        return f"many rows, {config.width}"
    if isinstance(config, StreamConfig):
        return f"{config.stages},{config.tile} x{config.spare}"
    return f"{config.tile},{config.stages},{config.splits}"


def report(name: str, usual: float, found: list[tuple[float, TileConfig]]) -> None:
    best = sorted(found, key=lambda entry: entry[0])[:SHOWN]
    tried = "  ".join(f"{time:.3f} {label(config)}" for time, config in best)
    print(f"  {name}: as chosen {usual:.3f} ms | {tried}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", choices=list(ARCHITECTURES), default="llama-3.1-8b")
    parser.add_argument("--quantization", choices=["none", "fp8"], default="none")
    parser.add_argument("sizes", nargs="+", metavar="SEQUENCESxTOKENS")
    args = parser.parse_args()
    overrides, steps = Overrides(), Steps(args.architecture, args.quantization)
    for size in args.sizes:
        steps.place(*map(int, size.split("x")))
        print(f"{args.architecture} {args.quantization}, {size}: {steps.milliseconds():.3f} ms", flush=True)
        for name, shape in steps.shapes.items():
            usual, found = steps.milliseconds(), []
            for config in gemm_candidates(name, *shape, 1 if args.quantization == "fp8" else 2, steps.size):
                overrides.weights[shape] = config
                found.append((steps.milliseconds(), config))
            overrides.weights.clear()
            report(name, usual, found)
        usual, found = steps.milliseconds(), []
        for config in attention_candidates(steps.size, steps.runner._forward.attention.keys.shape[2]):
            overrides.attention = config
            found.append((steps.milliseconds(), config))
        overrides.attention = None
        report("attention", usual, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
