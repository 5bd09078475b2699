"""Every pair of `tests/crossings/features.py` through the engine on a GPU, with random weights.

    PYTHONPATH=. python3 benchmarks/gpu_crossings.py [--architecture qwen3-0.6b] [--seeds 3] [--usual]

What comes out of a pair must be what each gives alone, token for token. That can be asked for with
`engine.deterministic` only: with the usual kernels the last bits of logits depend on the batch, so of tokens that are
nearly as likely another one may win. `--usual` counts the pairs in which one did, and runs adapters, which exclude
`deterministic`. Temperature is 1, for greedy outputs of random weights repeat one token.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from profiled_server import write_model

from penstock.bench.adapters import RandomAdapters
from penstock.bench.architectures import ARCHITECTURES
from penstock.checkpoint.source import resolve
from penstock.engine.settings import EngineConfig, SpeculationConfig
from penstock.grammar.compiler import grammars_of
from penstock.runner.startup import start
from penstock.text.tokenizer import load_tokenizer
from tests.crossings.features import BASE, PAIRS, Bench, check_same

NOT_THERE = {"early exit"}  # on native CPU kernels only


def load(model: str, config: EngineConfig) -> Bench:
    scheduler, executor, _ = start(model, config)
    executor.enter_thread()
    tokenizer = load_tokenizer(resolve(model))
    grammars, adapters = grammars_of(scheduler.limits, model, tokenizer), RandomAdapters(executor.adapter_modules)
    assert grammars is not None
    return Bench(scheduler.limits, executor, grammars, tokenizer, adapters, base={**BASE, "temperature": 1.0})


def failures(bench: Bench, off: set[str]) -> Iterator[bool]:
    """For each pair whether it failed, which is printed."""
    for first, second in PAIRS:
        if {first, second} & off:
            continue
        try:
            check_same(*bench.crossed(first, second))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(f"  {first} and {second}: {type(error).__name__} {error}\n    {where.line}", flush=True)
            yield True
        else:
            yield False


def run(model: str, config: EngineConfig, seeds: int) -> int:
    began, mode = time.perf_counter(), "deterministic" if config.deterministic else "usual kernels"
    loaded = load(model, config)
    off = NOT_THERE | ({"adapter"} if config.deterministic else set())
    found = [failed for seed in range(seeds) for failed in failures(replace(loaded, seed=seed, plain={}), off)]
    print(f"{mode}: {sum(found)} of {len(found)} failed; {time.perf_counter() - began:.0f} s", flush=True)
    return sum(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default="qwen3-0.6b", choices=list(ARCHITECTURES))
    parser.add_argument("--quantization", choices=["none", "fp8"], default="none")
    parser.add_argument("--kv-dtype", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--usual", action="store_true", help="with the usual kernels, too")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; SmolLM2's where none is given")
    args = parser.parse_args()
    config = EngineConfig(
        "cuda",
        quantization=args.quantization,
        kv_dtype=args.kv_dtype,
        kv_memory_gib=2.0,
        max_model_len=256,
        max_seqs=16,
        deterministic=True,
        speculation=SpeculationConfig("off"),
    )
    with tempfile.TemporaryDirectory() as folder:
        if (tokenizer := args.tokenizer) is None:
            tokenizer = Path(folder) / "tokenizer.json"
            tokenizer.write_text(load_tokenizer(resolve("smollm2-135m")).serialized())
        model = f"dummy:{write_model(args.architecture, Path(folder) / args.architecture, tokenizer)}"
        failed = run(model, config, args.seeds)
        if args.usual:
            run(model, replace(config, deterministic=False), args.seeds)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
