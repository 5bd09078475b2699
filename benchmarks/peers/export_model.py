"""A GGUF file as a Hugging Face folder in bf16: run by the Python of the transformers environment."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def export(gguf: Path, folder: Path) -> None:
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=plain
    )
    model.save_pretrained(folder)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
