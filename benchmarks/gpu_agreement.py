"""Does the fused CUDA path compute the same function? Logits against plain torch in float32 on the same weights.

    python benchmarks/gpu_agreement.py --model FOLDER_OR_DUMMY [--quantization fp8]

Random prompts of odd lengths are prefilled together and decoded, teacher-forced, through the paged cache; reported are
the relative error of the logits and the share of positions with the same likeliest token. As a yardstick the same is
reported for plain torch in bfloat16, whose rounding is unavoidable.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from penstock.bench.architectures import ARCHITECTURES, write_architecture
from penstock.checkpoint.source import resolve
from penstock.core.request import SamplingParams
from penstock.engine.executor import RowSetup, Step
from penstock.kernels.attention_reference import ReferenceAttention
from penstock.kernels.decode_inputs_triton import DecodeInputs
from penstock.models.config import read_config
from penstock.models.loader import load_model
from penstock.runner.batch import Batch, build_batch
from penstock.runner.forward import Forward, TorchForward
from penstock.runner.fused_forward import FusedForward, quantize_fp8
from penstock.runner.row_state import RowState
from penstock.runner.transfer import to_device

LENGTHS = (1, 7, 130, 333, 512, 64)
DECODES = 24
BLOCK = 16


def logits_of(forward: Forward, sequences: list[list[int]], vocab: int, device: torch.device) -> torch.Tensor:
    """Of every decode position: prefill all prompts in one step, then one known token each."""
    state = RowState(len(sequences), 64, vocab, device)
    table_blocks = 64
    step = Step()
    for row, (tokens, length) in enumerate(zip(sequences, LENGTHS, strict=True)):
        step.setups.append(RowSetup(row, SamplingParams(temperature=0), 0, tokens, length, ()))
        step.blocks.append((row, 0, list(range(row * table_blocks, (row + 1) * table_blocks))))
        step.rows.append(row)
        step.starts.append(0)
        step.counts.append(length)
        step.samples.append(True)
        step.tokens += tokens[:length]
    found = []
    for decode in range(DECODES + 1):
        state.apply(step)
        batch = build_batch(step, state, BLOCK)
        found.append(forward(batch, state, batch.last_N)[0].float())
        step = Step(
            rows=step.rows,
            starts=[length + decode for length in LENGTHS],
            counts=[1] * len(sequences),
            samples=[True] * len(sequences),
            tokens=[tokens[length + decode] for tokens, length in zip(sequences, LENGTHS, strict=True)],
        )
    return torch.cat(found)


class CapturedPath:
    """Steps that only decode go the way that captured steps go, with rotation and cache write within attention."""

    def __init__(self, forward: FusedForward) -> None:
        self._forward = forward

    def __call__(
        self, batch: Batch, state: RowState, logit_rows: npt.NDArray[np.int32]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        forward = self._forward
        if batch.num_decodes < len(batch.contexts_S):
            return forward(batch, state, logit_rows)
        arrays = (batch.tokens_T, batch.positions_T, batch.slots_T, batch.tables_SM, batch.contexts_S, logit_rows)
        tokens, positions, slots, tables, contexts, rows = (to_device(array, forward.device) for array in arrays)
        inputs = DecodeInputs(torch.nn.functional.embedding(tokens, forward.embedding), positions, slots, tables)
        logits = forward.logits(forward.hidden(inputs.x_SC, forward.attend_decode(inputs, contexts))[rows.long()])
        return logits, logits.argmax(-1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--quantization", choices=["none", "fp8"], default="none")
    args = parser.parse_args()
    device = torch.device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        name = args.model.removeprefix("dummy:")
        model_name = args.model
        if name in ARCHITECTURES:
            model_name = f"dummy:{write_architecture(name, Path(folder) / name)}"
        checkpoint = resolve(model_name)
        config = read_config(checkpoint)
        generator = np.random.default_rng(0)
        sequences = [generator.integers(1, config.vocab_size, length + DECODES + 1).tolist() for length in LENGTHS]
        blocks = 64 * len(sequences)

        with torch.inference_mode():
            # The same bfloat16-rounded weights everywhere, computed with in float32.
            bf16 = load_model(checkpoint, config, dtype=torch.bfloat16, device=device)
            wide = load_model(checkpoint, config, dtype=torch.float32, device=device)
            for (_, target), (_, source) in zip(wide.checkpoint_tensors(), bf16.checkpoint_tensors(), strict=True):
                target.copy_(source)
            spec = wide.attention_spec
            exact = TorchForward(wide, ReferenceAttention(spec, blocks, BLOCK, torch.float32, device), device)
            expected = logits_of(exact, sequences, config.vocab_size, device)
            del exact, wide
            rounded = TorchForward(bf16, ReferenceAttention(spec, blocks, BLOCK, torch.bfloat16, device), device)
            report("plain torch bfloat16", logits_of(rounded, sequences, config.vocab_size, device), expected)
            if args.quantization == "fp8":
                quantize_fp8(bf16)
            fused = FusedForward(
                bf16, config, num_blocks=blocks, block_size=BLOCK, max_seqs=len(sequences), max_model_len=1024
            )
            for label, forward in (("mixed", fused), ("captured", CapturedPath(fused))):
                found = logits_of(forward, sequences, config.vocab_size, device)
                report(f"fused {args.quantization}, {label} steps", found, expected)
    return 0


def report(label: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((actual - expected).norm() / expected.norm())
    same = float((actual.argmax(-1) == expected.argmax(-1)).float().mean())
    print(f"{label:28s} relative error {error:.2e}, same likeliest token {same:.1%} of {len(expected)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
