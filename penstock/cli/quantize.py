"""`penstock quantize`: pack a model's weights ahead of the first start, and say what the precision costs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.config import DEFAULT_MODEL
from penstock.core.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.kernels.native import Scheme
    from penstock.kernels.native_model import NativeModel
    from penstock.models.config import ModelConfig
    from penstock.text.tokenizer import Tokenizer

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

BLOCK_SIZE = 16
MIN_TOKENS = 256


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("quantize", help="pack a model for the CPU and measure what that costs")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="as for serve")
    parser.add_argument("--scheme", choices=["int8", "int4"], default="int8")
    parser.add_argument("--output", metavar="FOLDER", help="also write a checkpoint to move and to serve elsewhere")
    parser.add_argument("--check", metavar="TEXT", help="a text file: report perplexity on it against bfloat16")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from penstock.checkpoint.source import resolve
    from penstock.core.machine import usable_cpus
    from penstock.models.config import read_config
    from penstock.runner.packed import fill, native_model
    from penstock.runner.perplexity import WINDOW, perplexity
    from penstock.runner.progress import LoadProgress
    from penstock.text.tokenizer import load_tokenizer

    checkpoint = resolve(args.model)
    if checkpoint.kind == "packed":
        raise StartupError(f"{args.model} is quantised already; start from the original checkpoint", param="model")
    config = read_config(checkpoint)
    tokenizer = load_tokenizer(checkpoint) if args.check or args.output else None
    tokens = _tokens(Path(args.check), tokenizer) if args.check and tokenizer else []

    def packed(scheme: Scheme) -> NativeModel:
        model = native_model(
            config, scheme, block_size=BLOCK_SIZE, num_blocks=WINDOW // BLOCK_SIZE, threads=usable_cpus()
        )
        path = fill(model, checkpoint, config, LoadProgress(sys.stderr))
        print(f"{scheme}: {model.weight_bytes / 2**20:.0f} MiB, packed for `penstock serve` in {path}")
        return model

    quantized = packed(args.scheme)
    if args.output and tokenizer:
        _write(Path(args.output), quantized, config, tokenizer)
    if tokens:
        print(f"perplexity on {args.check}, {len(tokens)} tokens in windows of {WINDOW}:")
        exact = perplexity(packed("none"), tokens)
        rough = perplexity(quantized, tokens)
        print(f"  bfloat16 {exact:.4f}\n  {args.scheme:8s} {rough:.4f}  ({rough / exact - 1:+.2%})")
    return 0


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
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read {path}: {error}", param="check") from error
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) < MIN_TOKENS:
        raise StartupError(f"{path} has {len(tokens)} tokens; a perplexity needs {MIN_TOKENS} at least", param="check")
    return tokens
