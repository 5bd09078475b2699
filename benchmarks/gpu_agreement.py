"""Does the fused CUDA path compute the same function? Three questions, each answered on one GPU.

    python benchmarks/gpu_agreement.py logits --model FOLDER_OR_DUMMY [--quantization fp8] [--kv-dtype fp8]
    python benchmarks/gpu_agreement.py transformers --model smollm2-135m --text tests/data/moby-dick.txt
    python benchmarks/gpu_agreement.py sampling --model dummy:qwen3-0.6b

`logits`: against plain torch in float32 on the same weights, over random prompts of odd lengths that are prefilled
together and decoded, teacher-forced, through the paged cache. As a yardstick, plain torch in bfloat16.
`transformers`: the same weights in transformers on the same GPU, over a real text, half prefilled and half decoded.
`sampling`: every token that the engine draws by kernel, drawn again in plain torch from the same logits.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.bench.architectures import ARCHITECTURES, write_architecture
from penstock.checkpoint.source import Checkpoint, resolve
from penstock.core.request import Chunk, GenerateRequest, SamplingParams
from penstock.engine.executor import RowSetup, Step
from penstock.engine.loop import EngineLoop
from penstock.engine.settings import EngineConfig
from penstock.kernels.attention_reference import ReferenceAttention
from penstock.kernels.triton.decode_inputs import DecodeInputs
from penstock.models.base import CausalLM
from penstock.models.config import ModelConfig, read_config
from penstock.models.loader import load_model
from penstock.quantization.fp8 import quantize_model
from penstock.runner.batch import Batch, build_batch
from penstock.runner.forward import Forward, TorchForward
from penstock.runner.fused_forward import FusedForward, supports_fused
from penstock.runner.row_state import RowState, TorchRows
from penstock.runner.sampler import sample
from penstock.runner.transfer import to_device

DEVICE = torch.device("cuda")
BLOCK, TABLE = 16, 64  # tokens of a block, blocks of a sequence
LENGTHS = (1, 7, 130, 333, 512, 64)
DECODES = 24
WINDOWS, WINDOW, GREEDY_START = 8, 1024, 64  # of the text; tokens of it that are continued
KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    prefilled: int  # the others are decoded one by one


def logits_of(forward: Forward, prompts: list[Prompt], vocab: int, every: bool = False) -> torch.Tensor:
    """Teacher-forced: prefill all prompts in one step, then one known token each. One row per step and prompt, or per
    token if `every`, then ordered by prompt; on the CPU, since there may be many."""
    state = RowState(len(prompts), TABLE, vocab, DEVICE)
    step = Step()
    for row, prompt in enumerate(prompts):
        step.setups.append(RowSetup(row, SamplingParams(temperature=0), 0, prompt.tokens, prompt.prefilled, ()))
        step.blocks.append((row, 0, list(range(row * TABLE, (row + 1) * TABLE))))
        step.rows.append(row)
        step.starts.append(0)
        step.counts.append(prompt.prefilled)
        step.samples.append(1)
        step.tokens += prompt.tokens[: prompt.prefilled]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    decodes = min(len(prompt.tokens) - prompt.prefilled for prompt in prompts)
    for decode in range(decodes + 1):
        state.apply(step)
        batch = build_batch(step, state, BLOCK)
        wanted = np.arange(len(batch.tokens_T), dtype=np.int32) if every else batch.last_N
        counts = step.counts if every else [1] * len(prompts)
        for rows, logits in zip(found, forward(batch, state, wanted)[0].float().cpu().split(counts), strict=True):
            rows.append(logits)
        if decode < decodes:
            step = Step(
                rows=step.rows,
                starts=[prompt.prefilled + decode for prompt in prompts],
                counts=[1] * len(prompts),
                samples=[1] * len(prompts),
                tokens=[prompt.tokens[prompt.prefilled + decode] for prompt in prompts],
            )
    return torch.cat([torch.cat(rows) for rows in found])


class GraphPath:
    """Steps that only decode go the way of the CUDA graphs, with RoPE and cache write within attention."""

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
        if forward.stacks(len(tokens), int(batch.contexts_S.max())):
            logits = torch.empty((1, len(forward.embedding)), device=forward.device)
            chosen = torch.empty(1, dtype=torch.int64, device=forward.device)
            forward.decode_stacked(rows, contexts, tokens.long(), tables, logits, chosen)
            return logits, chosen
        inputs = DecodeInputs(torch.nn.functional.embedding(tokens, forward.embedding), positions, slots, tables)
        hidden = forward.hidden(inputs.x_SC, forward.attention.attend_decode(inputs, contexts))
        logits = forward.logits(hidden[rows.long()])
        return logits, logits.argmax(-1)


def report(label: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((actual - expected).norm() / expected.norm())
    same = float((actual.argmax(-1) == expected.argmax(-1)).float().mean())
    print(f"{label:44s} relative error {error:.2e}, same argmax {same:.2%} of {len(expected)}", flush=True)


@contextmanager
def named_checkpoint(model: str) -> Iterator[Checkpoint]:
    with tempfile.TemporaryDirectory() as folder:
        name = model.removeprefix("dummy:")
        if name in ARCHITECTURES:
            model = f"dummy:{write_architecture(name, Path(folder) / name)}"
        yield resolve(model)


def plain(model: CausalLM, dtype: torch.dtype, blocks: int) -> TorchForward:
    return TorchForward(model, ReferenceAttention(model.attention_spec, blocks, BLOCK, dtype, DEVICE), DEVICE)


def fused(model: CausalLM, config: ModelConfig, prompts: int, kv_dtype: str) -> FusedForward:
    assert supports_fused(model, config)
    return FusedForward(
        model,
        config,
        num_blocks=prompts * TABLE,
        block_size=BLOCK,
        max_seqs=prompts,
        max_model_len=TABLE * BLOCK,
        kv_dtype=KV_DTYPES[kv_dtype],
    )


def compare_logits(checkpoint: Checkpoint, quantization: str, kv_dtype: str) -> None:
    config = read_config(checkpoint)
    generator = np.random.default_rng(0)
    prompts = [
        Prompt(generator.integers(1, config.vocab_size, length + DECODES).tolist(), length) for length in LENGTHS
    ]
    # The same bfloat16-rounded weights everywhere, computed with in float32.
    bf16 = load_model(checkpoint, config, dtype=torch.bfloat16, device=DEVICE)
    wide = load_model(checkpoint, config, dtype=torch.float32, device=DEVICE)
    for (_, target), (_, source) in zip(wide.checkpoint_tensors(), bf16.checkpoint_tensors(), strict=True):
        target.copy_(source)
    blocks = TABLE * len(prompts)
    expected = logits_of(plain(wide, torch.float32, blocks), prompts, config.vocab_size)
    del wide
    rounded = logits_of(plain(bf16, torch.bfloat16, blocks), prompts, config.vocab_size)
    report("plain torch bfloat16", rounded, expected)
    if quantization == "fp8":
        assert supports_fused(bf16, config)
        quantize_model(bf16)
    forward = fused(bf16, config, len(prompts), kv_dtype)
    for label, path in (("mixed", forward), ("graph", GraphPath(forward))):
        found = logits_of(path, prompts, config.vocab_size)
        report(f"fused, weights {quantization}, KV {kv_dtype}, {label} steps", found, expected)


def compare_with_transformers(checkpoint: Checkpoint, text: Path, quantization: str, kv_dtype: str) -> None:
    """Over the text itself, where next tokens often nearly tie, and over what transformers makes of its beginnings."""
    from penstock.text.tokenizer import load_tokenizer

    config = read_config(checkpoint)
    tokens = load_tokenizer(checkpoint).encode(text.read_text())[: WINDOWS * WINDOW]
    written = torch.tensor(tokens, device=DEVICE).view(WINDOWS, WINDOW)
    model = load_model(checkpoint, config, dtype=torch.bfloat16, device=DEVICE)
    wide, rounded = (_transformers(model, config, dtype) for dtype in (torch.float32, torch.bfloat16))
    starts = written.view(-1, WINDOW // 4)[:, :GREEDY_START]
    length = WINDOW // 4 - GREEDY_START
    continued = rounded.generate(starts, do_sample=False, min_new_tokens=length, max_new_tokens=length)
    peers = {(kind, name): _peer_logits(peer, windows)
             for kind, windows in (("text", written), ("greedy", continued))
             for name, peer in (("float32", wide), ("bfloat16", rounded))}  # fmt: skip
    del wide, rounded
    if quantization == "fp8":
        assert supports_fused(model, config)
        quantize_model(model)
    for kind, windows, first in (("text", written, 0), ("greedy", continued, GREEDY_START - 1)):
        prompts = [Prompt(window, max(first, len(window) // 2)) for window in windows.tolist()]
        forward = GraphPath(fused(model, config, len(prompts), kv_dtype))
        ours = logits_of(forward, prompts, config.vocab_size, every=True)
        # What predicts the tokens of a continuation begins with the last token of its start.
        counted = torch.arange(len(ours)) % windows.shape[1] >= first
        float32, bfloat16 = (peers[kind, name][counted] for name in ("float32", "bfloat16"))
        ours = ours[counted]
        print(f"{kind}: {len(windows)} x {windows.shape[1]} tokens; weights {quantization}, KV {kv_dtype}")
        report("  Penstock against transformers bfloat16", ours, bfloat16)
        report("  Penstock against transformers float32", ours, float32)
        report("  transformers bfloat16 against float32", bfloat16, float32)
        top_two = float32.topk(2, -1).values
        clear = top_two[:, 0] - top_two[:, 1] > 4 * (bfloat16 - float32).abs().amax(-1).median()
        label = f"  Penstock where float32 is clear ({float(clear.float().mean()):.0%})"
        report(label, ours[clear], float32[clear])


def _transformers(model: CausalLM, config: ModelConfig, dtype: torch.dtype) -> Any:
    """The same weights."""
    import transformers

    assert config.architecture == "LlamaForCausalLM"
    assert config.rope_scaling is None
    peer_config = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_embeddings,
        pad_token_id=0,
    )
    make_peer: Any = transformers.LlamaForCausalLM
    peer = make_peer(peer_config).to(DEVICE, dtype).eval()
    weights = {name: tensor.to(dtype) for name, tensor in model.checkpoint_tensors()}
    absent = peer.load_state_dict(weights, strict=False)
    assert not absent.unexpected_keys
    assert set(absent.missing_keys) <= {"lm_head.weight"}
    return peer


def _peer_logits(peer: Any, windows: torch.Tensor) -> torch.Tensor:
    """In float32 from the last hidden state: in bfloat16 likely tokens tie."""
    hidden = peer.model(windows).last_hidden_state.float().flatten(0, 1)
    return torch.cat([(part @ peer.lm_head.weight.float().T).cpu() for part in hidden.split(1024)])


def compare_sampling(model: str) -> None:
    from penstock.runner.cuda_runner import CudaRunner
    from penstock.runner.startup import start

    scheduler, executor, info = start(model, EngineConfig(max_seqs=32, max_model_len=1024, kv_memory_gib=8))
    assert isinstance(executor, CudaRunner)
    hooked: Any = executor
    sample_step, drawn, different = executor._sample, 0, 0
    rows, table_blocks = executor._state.tables_RM.shape
    reference = TorchRows(rows, table_blocks, info.vocab_size, DEVICE)

    def sample_twice(flight: Any) -> None:
        nonlocal drawn, different
        count, step = len(flight.rows), flight.step
        logits, greedy = executor._logits[:count].clone(), executor._tokens[:count].clone()
        reference.apply(step)
        sample_step(flight)
        if count:
            positions = np.array([step.starts[i] + step.counts[i] for i in flight.sampled], dtype=np.int32)
            expected = sample(logits, greedy, reference, flight.rows, positions)
            drawn += count
            different += int((executor._tokens[:count] != expected).sum())

    hooked._sample = sample_twice
    outputs: dict[str, list[int]] = {}

    def take(chunks: list[Chunk]) -> None:
        for chunk in chunks:
            outputs.setdefault(chunk.request_id, []).extend(chunk.token_ids)

    loop = EngineLoop(scheduler, executor, take)
    generator = np.random.default_rng(1)
    filters: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.7}, {"min_p": 0.05}]
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    kinds = [*filters, {"temperature": 0.0}, penalties, {"temperature": 0.0, **penalties}]
    for number in range(48):
        kind = {"temperature": 0.8, **kinds[number % len(kinds)]}
        prompt = generator.integers(1, min(info.vocab_size, 50_000), 5 + number).tolist()
        params = SamplingParams(**kind, seed=number, max_tokens=40, ignore_eos=True)
        loop.submit(GenerateRequest(str(number), prompt, params))
    while loop.step():
        pass
    complete = sum(len(tokens) == 40 for tokens in outputs.values())
    print(f"{complete} of 48 requests complete; {drawn} tokens drawn, {different} of them unlike the reference")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", choices=["logits", "transformers", "sampling"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--quantization", choices=["none", "fp8"], default="none")
    parser.add_argument("--kv-dtype", choices=list(KV_DTYPES), default="bf16")
    parser.add_argument("--text", type=Path, default=Path("tests/data/moby-dick.txt"))
    args = parser.parse_args()
    with named_checkpoint(args.model) as checkpoint, torch.inference_mode():
        match args.question:
            case "logits":
                compare_logits(checkpoint, args.quantization, args.kv_dtype)
            case "transformers":
                compare_with_transformers(checkpoint, args.text, args.quantization, args.kv_dtype)
            case "sampling":
                kind = "dummy:" if checkpoint.kind == "dummy" else ""
                compare_sampling(f"{kind}{checkpoint.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
