"""The native GEMMs, by instruction set and precision: do they compute what they should, and how fast on one core?

    python setup.py build_ext --inplace && PYTHONPATH=. python benchmarks/cpu_gemm.py

Numpy and the built library are all it needs. The weights of one layer of SmolLM2-135M stay in the cache, so the figures
are those of arithmetic: in a step of few rows reading weights takes longer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import get_args

import numpy as np

from penstock.core.errors import StartupError
from penstock.kernels.native import bindings
from penstock.quantization import scheme

LAYER = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
ROWS = (1, 8, 16, 32, 64, 240)
ODD = [(1, 33, 100), (7, 40, 160), (16, 32, 64), (17, 100, 96), (47, 70, 577), (300, 33, 1536)]
SECONDS = 0.05  # spent on each figure, at the least
TOLERANCE = 1e-3  # a fused multiply rounds a rare activation to the int8 value beside the reference's: some 1e-4

WEIGHTS = {"none": scheme.round_bfloat16, "int8": scheme.int8_affine_round_trip, "int4": scheme.int4_round_trip}
INPUTS = {"int8": scheme.int8_affine_round_trip, "int4": scheme.int8_group_round_trip}
ROUNDS_INPUTS = ("avx512bf16", "amx")  # to bfloat16, beside weights in it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None, help="of the inputs (default: a fresh one)")
    rng = np.random.default_rng(parser.parse_args().seed)
    sets = list(usable_sets())
    kinds = get_args(bindings.Scheme)
    errors = {f"{kind} {isa}": largest_error(isa, kind, rng) for kind in kinds for isa in sets}
    wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
    print(f"WRONG: {wrong}" if wrong else f"all right: relative RMS error up to {max(errors.values()):.0e}")
    print("\nmilliseconds for the GEMMs of a layer, one core\n")
    print("| rows | " + " | ".join(f"{kind} {isa}" for kind in kinds for isa in sets) + " |")
    print("|" + "---|" * (len(kinds) * len(sets) + 1))
    for rows in ROWS:
        figures = [layer_seconds(isa, kind, rows, rng) for kind in kinds for isa in sets]
        print(f"| {rows} | " + " | ".join(f"{1e3 * figure:.3f}" for figure in figures) + " |", flush=True)
    return 1 if wrong else 0


def usable_sets() -> Iterator[bindings.Isa]:
    """Those with vectors: the portable kernels are there for the others."""
    for isa in get_args(bindings.Isa)[1:]:
        try:
            bindings.set_isa(isa)
        except StartupError as error:
            print(error.message)
        else:
            yield isa


def largest_error(isa: bindings.Isa, kind: bindings.Scheme, rng: np.random.Generator) -> float:
    """Relative to the outputs, root mean square, over shapes that leave ragged ends."""
    bindings.set_isa(isa)
    errors = []
    for rows, n, k in ODD:
        x, w = draw(rows, n, k, rng)
        rounded, weights = INPUTS[kind](x) if kind in INPUTS else x, WEIGHTS[kind](w)
        if kind == "none" and isa in ROUNDS_INPUTS:
            rounded = scheme.round_bfloat16(x)
        expected = rounded.astype(np.float64) @ weights.astype(np.float64).T
        errors.append(float(np.std(bindings.matmul(x, w, kind) - expected) / np.std(expected)))
    return max(errors)


def layer_seconds(isa: bindings.Isa, kind: bindings.Scheme, rows: int, rng: np.random.Generator) -> float:
    bindings.set_isa(isa)
    total = 0.0
    for n, k in LAYER.values():
        x, w = draw(rows, n, k, rng)
        once = bindings.timed_matmul(x, w, kind)[1]
        total += bindings.timed_matmul(x, w, kind, times=max(3, int(SECONDS / len(LAYER) / once)))[1]
    return total


def draw(rows: int, n: int, k: int, rng: np.random.Generator) -> tuple[bindings.Floats, bindings.Floats]:
    return rng.standard_normal((rows, k), dtype=np.float32), rng.standard_normal((n, k), dtype=np.float32)


if __name__ == "__main__":
    sys.exit(main())
