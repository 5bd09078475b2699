"""all-MiniLM-L6-v2 on this machine's CPU: Penstock, sentence-transformers and onnxruntime in int8 on the same texts.

    python -m venv /tmp/peers && /tmp/peers/bin/pip install sentence-transformers onnxruntime onnx onnxscript
    python benchmarks/embedding_peers.py --peers /tmp/peers/bin/python --threads 2 --rounds 5

Every system gets texts and gives normalised vectors, tokenising included. The peers sort texts by length and pad them
in batches of 32, as sentence-transformers does. Rounds are interleaved and ratios are taken within a round. CPU seconds
are those of all threads of a process: on a machine that others use, they say more than the time on the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

Vectors = Any  # numpy array [N, D]
Encode = Callable[[list[str]], Vectors]

BATCH = 32
BOOK = Path(__file__).parents[1] / "tests" / "data" / "moby-dick.txt"
LENGTHS = {"short": (3, 4, 6, 8, 12, 16), "mixed": (3, 8, 20, 40, 90, 170)}  # words of a text


def texts_of(kind: str, count: int, seed: int) -> list[str]:
    draw, words = random.Random(seed), BOOK.read_text().split()
    lengths = [draw.choice(LENGTHS[kind]) for _ in range(count)]
    return [" ".join(words[start : start + n]) for n in lengths for start in [draw.randrange(len(words) - n)]]


# ---------------------------------------------------------------- the systems


def penstock(quantization: Literal["int8", "none"], threads: int) -> Encode:
    from penstock.checkpoint.source import BUILT_IN_ENCODER, resolve
    from penstock.core.request import Chunk, GenerateRequest, SamplingParams
    from penstock.engine.local import LocalEngine
    from penstock.engine.settings import EngineConfig
    from penstock.runner.startup import start
    from penstock.text.tokenizer import load_tokenizer

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    dtype: Literal["auto", "float32"] = "float32" if quantization == "none" else "auto"
    config = EngineConfig(device="cpu", quantization=quantization, dtype=dtype)
    engine = LocalEngine(*start(BUILT_IN_ENCODER, config))
    tokenizer = load_tokenizer(resolve(BUILT_IN_ENCODER))
    params = SamplingParams(temperature=0, max_tokens=0)

    async def one(number: int, text: str) -> Chunk:
        request = GenerateRequest(str(number), tokenizer.truncated(tokenizer.encode(text), 256), params)
        (chunk,) = [chunk async for chunk in engine.submit(request)]
        return chunk

    async def every(texts: list[str]) -> list[Chunk]:
        return await asyncio.gather(*(one(number, text) for number, text in enumerate(texts)))

    def encode(texts: list[str]) -> Vectors:
        return np.stack([np.frombuffer(chunk.vector or b"", "<f4") for chunk in asyncio.run(every(texts))])

    return encode


def sentence_transformers(folder: str, threads: int) -> Encode:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(folder, device="cpu")
    return lambda texts: model.encode(texts, batch_size=BATCH, normalize_embeddings=True, show_progress_bar=False)


def onnxruntime_int8(folder: str, threads: int) -> Encode:
    import onnxruntime
    from tokenizers import Tokenizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(_exported(folder), options, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()

    def encode(texts: list[str]) -> Vectors:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors: Vectors = np.empty((len(texts), 384), np.float32)
        for start in range(0, len(order), BATCH):
            some = order[start : start + BATCH]
            encodings = tokenizer.encode_batch([texts[index] for index in some])
            ids = np.array([encoding.ids for encoding in encodings], np.int64)
            mask = np.array([encoding.attention_mask for encoding in encodings], np.int64)
            (hidden,) = session.run(None, {"ids": ids, "mask": mask, "types": np.zeros_like(ids)})
            means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            vectors[some] = means / np.linalg.norm(means, axis=1, keepdims=True)
        return vectors

    return encode


def _exported(folder: str) -> str:
    """The model as ONNX, its weights quantised to int8 per channel, activations dynamically."""
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from transformers import BertModel

    class LastHidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel.from_pretrained(folder, attn_implementation="eager").eval()

        def forward(self, ids: Any, mask: Any, types: Any) -> Any:
            return self.bert(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

    exact, int8 = (str(Path(tempfile.mkdtemp()) / name) for name in ("exact.onnx", "int8.onnx"))
    names, example = ["ids", "mask", "types"], torch.ones(2, 8, dtype=torch.long)
    axes = {name: {0: "texts", 1: "tokens"} for name in (*names, "hidden")}
    torch.onnx.export(
        LastHidden(),
        (example, example, example * 0),
        exact,
        input_names=names,
        output_names=["hidden"],
        dynamic_axes=axes,
        opset_version=17,
        dynamo=False,
    )
    quantize_dynamic(exact, int8, weight_type=QuantType.QInt8, per_channel=True)
    return int8


SYSTEMS: dict[str, Callable[[str, int], Encode]] = {
    "sentence-transformers": sentence_transformers,
    "onnxruntime int8": onnxruntime_int8,
    "penstock float32": lambda folder, threads: penstock("none", threads),
    "penstock int8": lambda folder, threads: penstock("int8", threads),
}


# ---------------------------------------------------------------- measuring


def child(name: str, folder: str, threads: int) -> None:
    """Texts come as lines of JSON; after each, times and a file of vectors go back."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    encode = SYSTEMS[name](folder, threads)
    path = Path(tempfile.mkdtemp()) / "vectors.npy"
    for line in sys.stdin:
        began, used = time.perf_counter(), time.process_time()
        vectors = encode(json.loads(line))
        figures = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - used, "path": str(path)}
        np.save(path, vectors)
        print(json.dumps(figures), file=answers, flush=True)


class System:
    def __init__(self, name: str, python: str, folder: str, threads: int) -> None:
        command = [python, __file__, "--child", name, "--folder", folder, "--threads", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def encode(self, texts: list[str]) -> tuple[float, float, Vectors]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(texts), file=self.process.stdin, flush=True)
        figures = json.loads(self.process.stdout.readline())
        return figures["seconds"], figures["cpu"], np.load(figures["path"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="the Python that has sentence-transformers and onnxruntime")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.folder, args.threads)
        return
    from penstock.checkpoint.source import BUILT_IN_ENCODER, resolve

    folder = str(resolve(BUILT_IN_ENCODER).path)
    pythons = {name: sys.executable if name.startswith("penstock") else args.peers for name in SYSTEMS}
    systems = {name: System(name, python, folder, args.threads) for name, python in pythons.items()}
    print(f"{args.texts} texts, {args.threads} threads, {args.rounds} rounds, seed {args.seed}\n")
    print(
        "| texts | system | texts/s | CPU ms per text | rate to sentence-transformers | to onnxruntime | least cosine |"
    )
    print("|---|---|---|---|---|---|---|")
    for kind in LENGTHS:
        _table(kind, systems, args)
    for system in systems.values():
        system.process.terminate()


def _table(kind: str, systems: dict[str, System], args: argparse.Namespace) -> None:
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    cosines = dict.fromkeys(systems, 1.0)
    for number in range(-1, args.rounds):  # the first one warms up
        texts, exact = texts_of(kind, args.texts, args.seed + number), None
        for name, system in systems.items():
            seconds, cpu, vectors = system.encode(texts)
            exact = vectors if exact is None else exact
            cosines[name] = min(cosines[name], float((vectors * exact).sum(1).min()))
            if number >= 0:
                rounds[name].append((seconds, cpu))
    for name, figures in rounds.items():
        rate, cpu = (args.texts / median(f[0] for f in figures), median(f[1] for f in figures) / args.texts * 1e3)
        ratios = [
            median(other[0] / own[0] for own, other in zip(figures, rounds[peer], strict=True))
            for peer in ("sentence-transformers", "onnxruntime int8")
        ]
        print(f"| {kind} | {name} | {rate:.0f} | {cpu:.2f} | {ratios[0]:.2f} | {ratios[1]:.2f} | {cosines[name]:.5f} |")


if __name__ == "__main__":
    main()
