"""Flags of `vllm serve` that have another name here, or need none. Those that differ by a few letters are found by
`did_you_mean`."""

from __future__ import annotations

_FLAGS = {
    "--max-num-seqs": "use --max-seqs",
    "--max-num-batched-tokens": "use --max-step-tokens",
    "--kv-cache-dtype": "use --kv-dtype",
    "--kv-cache-memory-bytes": "use --kv-memory-gib",
    "--gpu-memory-utilization": "a model takes what the GPU has; engine.gpu_memory_share in a settings file divides it",
    "--api-key": "make a key with 'penstock keys create NAME', or say --open",
    "--data-parallel-size": "use --replicas",
    "--api-server-count": "use --processes",
    "--tensor-parallel-size": "no tensor parallelism; replicas and devices in a settings file use several GPUs",
    "--enable-lora": "name adapters in a settings file (adapters, adapter_folder), or load them while it runs",
    "--lora-modules": "name adapters in a settings file (adapters, adapter_folder), or load them while it runs",
    "--max-loras": "engine.max_adapters in a settings file",
    "--max-lora-rank": "engine.max_adapter_rank in a settings file",
    "--tool-call-parser": "found from the chat template; tool_parser of a model in a settings file says otherwise",
    "--reasoning-parser": "found from the chat template; reasoning_parser of a model in a settings file says otherwise",
    "--speculative-config": "engine.speculation in a settings file",
    "--override-generation-config": "engine.sampling_defaults in a settings file",
    "--ssl-keyfile": "server.tls in a settings file",
    "--ssl-certfile": "server.tls in a settings file",
    "--allowed-origins": "server.cors in a settings file",
    "--enable-auto-tool-choice": "leave it out: tools need no flag",
    "--enable-prefix-caching": "leave it out: prefixes are cached",
    "--enable-chunked-prefill": "leave it out: long prompts are computed in chunks",
    "--trust-remote-code": "leave it out: no code of a checkpoint is run",
    "--disable-log-requests": "leave it out: a request is one line without its text; --log-level warning for none",
}
_SHORT = {"-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size"}


def instead_of(flag: str) -> str:
    """What to write for a flag of vLLM's; empty for others."""
    found = _FLAGS.get(_SHORT.get(flag, flag))
    return f" (of vLLM; here: {found})" if found else ""
