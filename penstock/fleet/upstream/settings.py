"""Settings of an upstream: a server of another kind, or on another machine, that computes for this gateway."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.core.errors import StartupError
from penstock.core.settings import check, check_choice

UpstreamKind = Literal["openai", "triton"]
Server = Literal["auto", "vllm", "sglang", "tgi", "tensorrt-llm", "llama.cpp", "penstock", "openai"]

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


@dataclass(frozen=True, slots=True)
class CapabilitySettings:
    """What is known of an upstream better than a probe would find out. None: it is probed."""

    token_ids_in: bool | None = None
    token_ids_out: bool | None = None
    logprobs: bool | None = None
    seed: bool | None = None
    continuation: bool | None = None


@dataclass(frozen=True, slots=True)
class UpstreamTimeouts:
    """Seconds. A server that is connected and sends nothing for so long has failed."""

    connect: float = 5.0
    first_token: float = 120.0  # from sending the request; includes the time it waits in the server's queue
    next_token: float = 30.0
    check: float = 5.0  # until a health check is answered
    check_interval: float = 3.0

    def __post_init__(self) -> None:
        for name in ("connect", "first_token", "next_token", "check", "check_interval"):
            check(0 < getattr(self, name) < float("inf"), name, "must be above 0")


@dataclass(frozen=True, slots=True)
class TritonTensors:
    """Names of the tensors of the model on a Triton server, by default those of its vLLM and TensorRT-LLM backends."""

    text_input: str = "text_input"
    text_output: str = "text_output"
    finish_reason: str | None = None  # where the model says why an answer ended, as in vLLM's words
    cumulative: bool = False  # each event has the whole text so far instead of what is new
    # SamplingParams' names and those of the model's input tensors or parameters. Others cannot be asked for.
    # Default: by what the model's metadata and its backend are known to take.
    parameters: Mapping[str, str] | None = None
    # Sent with every request: what makes Triton's backends stream, and leave out the prompt.
    constants: Mapping[str, bool | int | float | str] = field(
        default_factory=lambda: {"stream": True, "exclude_input_in_output": True}
    )

    def __post_init__(self) -> None:
        check(bool(self.text_input), "text_input", "must not be empty")
        check(bool(self.text_output), "text_output", "must not be empty")
        named = self.parameters is None or "max_tokens" in self.parameters
        check(named, "parameters", "must name the parameter for max_tokens")


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """Headers may hold secrets, so they are never shown (`repr=False`)."""

    url: str
    kind: UpstreamKind = "openai"
    server: Server = "auto"  # which program it is, of those that speak OpenAI's protocol; auto: it is found out
    model: str | None = None  # its name there; default: the only or first one that the server lists
    api_key_env: str | None = None  # name of the environment variable that has the key
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    max_model_len: int | None = None  # default: what the server says
    health_path: str | None = None  # default: /health, or the list of models where there is none
    capabilities: CapabilitySettings = CapabilitySettings()
    timeouts: UpstreamTimeouts = UpstreamTimeouts()
    triton: TritonTensors = TritonTensors()

    def __post_init__(self) -> None:
        check(self.url.startswith(("http://", "https://")), "url", "must begin with http:// or https://")
        check("@" not in self.url, "url", "must not hold a password; use api_key_env or headers")
        check_choice(self.kind, UpstreamKind, "kind")
        check_choice(self.server, Server, "server")
        check(self.max_model_len is None or self.max_model_len > 0, "max_model_len", "must be above 0")
        check(self.health_path is None or self.health_path.startswith("/"), "health_path", "must begin with /")
        check(self.kind == "openai" or bool(self.model), "model", "must be set: a Triton server has no list of models")
        for name, value in self.headers.items():
            check(_HEADER_NAME.fullmatch(name) is not None, "headers", f"holds {name!r}, which is no name of a header")
            check(value.isprintable(), "headers", f"has control characters in {name}")

    def api_key(self) -> str | None:
        """Raise StartupError if the variable that should have it is not set."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise StartupError(f"the environment variable {self.api_key_env} is not set", param="api_key_env")
        return key
