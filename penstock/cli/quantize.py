"""`penstock quantize`: pack a model's weights ahead of the first start, and say what the precision costs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checkpoint.source import DEFAULT_MODEL
from penstock.core.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.kernels.native.model import NativeModel
    from penstock.models.config import ModelConfig
    from penstock.runner.quality import Quality
    from penstock.text.tokenizer import Tokenizer

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

BLOCK_SIZE = 16
MIN_TOKENS = 256


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("quantize", help="pack a model for the CPU and measure what that costs")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="as for serve")
    parser.add_argument("--scheme", choices=["int8", "int4"], default="int8")
    parser.add_argument("--output", metavar="FOLDER", help="also write a checkpoint to move and to serve elsewhere")
    parser.add_argument(
        "--check",
        metavar="TEXT",
        help="a text file: report perplexity, top-1 agreement and KL divergence on it, against float32",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from penstock.checkpoint.source import resolve
    from penstock.core.machine import usable_cpus
    from penstock.models.config import read_config
    from penstock.models.host_weights import host_weights
    from penstock.runner.packed import fill, native_model
    from penstock.runner.progress import LoadProgress
    from penstock.runner.quality import WINDOW, ExactText
    from penstock.text.tokenizer import load_tokenizer

    checkpoint = resolve(args.model)
    if checkpoint.kind == "packed":
        raise StartupError(f"{args.model} is quantised already; start from the original checkpoint", param="model")
    config = read_config(checkpoint)
    tokenizer = load_tokenizer(checkpoint) if args.check or args.output else None
    tokens = _tokens(Path(args.check), tokenizer) if args.check and tokenizer else []

    quantized = native_model(
        config, args.scheme, block_size=BLOCK_SIZE, num_blocks=WINDOW // BLOCK_SIZE, threads=usable_cpus()
    )
    path = fill(quantized, checkpoint, config, LoadProgress(sys.stderr))
    kept = f", packed for `penstock serve` in {path}" if path.exists() else ""  # else the log has told why not
    print(f"{args.scheme}: {quantized.weight_bytes / 2**20:.0f} MiB{kept}", flush=True)
    if args.output and tokenizer:
        _write(Path(args.output), quantized, config, tokenizer)
    if tokens:
        print(f"against float32 on {args.check}, {len(tokens)} tokens in windows of {WINDOW}:", flush=True)
        progress = LoadProgress(sys.stderr, "computing in float32", bytes_done=False)
        exact = ExactText(host_weights(checkpoint, config), config, tokens, progress)
        _report(exact.compare(quantized, LoadProgress(sys.stderr, f"computing in {args.scheme}", bytes_done=False)))
    return 0


def _report(quality: Quality) -> None:
    exact, rough = quality.exact_perplexity, quality.perplexity
    print(f"  perplexity       {rough:.4f} instead of {exact:.4f}  ({rough / exact - 1:+.2%})")
    print(f"  top-1 agreement  {quality.top1:.2%}")
    print(f"  KL divergence    {quality.kl:.5f}")


def _write(folder: Path, model: NativeModel, config: ModelConfig, tokenizer: Tokenizer) -> None:
    from penstock.runner.packed import write_checkpoint

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(model, config, folder)
        tokenizer.save(folder)
    except OSError as error:
        raise StartupError(f"cannot write {folder}: {error}", param="output") from error
    print(f"wrote {folder}; serve it with `penstock serve {folder}`")


def _tokens(path: Path, tokenizer: Tokenizer) -> Sequence[int]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read {path}: {error}", param="check") from error
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) < MIN_TOKENS:
        raise StartupError(f"{path} has {len(tokens)} tokens; a perplexity needs {MIN_TOKENS} at least", param="check")
    return tokens
