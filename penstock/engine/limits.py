"""What a scheduler may use."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.errors import ContextTooLong, InvalidRequest
from penstock.core.request import GenerateRequest


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    num_blocks: int
    block_size: int
    max_seqs: int
    max_step_tokens: int
    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int] = frozenset()
    prefix_caching: bool = True
    max_waiting: int = 4096
    fcfs: bool = False  # first come, first served: objectives and tenants are ignored
    max_adapters: int = 0  # LoRA adapters that one step computes with
    pools: bool = False  # prompts become vectors: nothing is sampled
    whole_prompts: bool = False  # all tokens of a prompt are computed in one step, as attention of encoders needs it
    weight_bytes: int = 0  # these two: in the memory of this process; 0: not there, as on a GPU
    kv_token_bytes: int = 0  # keys and values of a token
    query_tile: int = 1  # tokens that attention computes together: a part of a prompt is a multiple of this

    @property
    def longest_sequence(self) -> int:
        return min(self.max_model_len, self.num_blocks * self.block_size)

    @property
    def least_prefill(self) -> int:
        """Tokens of prefill that a step always has room for, so that prompts move whatever was promised to streams."""
        tiles = -(-(self.max_step_tokens // 85) // self.query_tile)  # about a hundred tokens of 8,192
        return max(self.block_size, tiles * self.query_tile)

    def read_bytes(self, kv_tokens: int) -> int:
        """Estimate of what a step reads of the memory: all weights once, and the keys and values of so many tokens.
        Less is read of prefixes that sequences share, and of a mixture of experts for few tokens."""
        return self.weight_bytes + kv_tokens * self.kv_token_bytes

    def check(self, request: GenerateRequest) -> None:
        """Refuse what could never run."""
        if not request.prompt:
            raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
        if self.pools and request.params.max_tokens != 0:
            raise InvalidRequest("this model computes vectors and generates no text", param="model")
        if len(request.prompt) - self.pools >= self.longest_sequence:
            tokens, most = len(request.prompt), self.longest_sequence - (not self.pools)
            left = "" if self.pools else ", and at least one must be left for the output"
            raise ContextTooLong.beyond(
                self.longest_sequence,
                f"there are {tokens} tokens in the prompt{left}; shorten the prompt",
                param="prompt",
                excess=f"{tokens} tokens > {most} maximum",
            )
        if len(request.prompt) + len(request.output) > self.longest_sequence:
            tokens = len(request.prompt) + len(request.output)
            however = f"there are {tokens} tokens in prompt and output"
            raise ContextTooLong.beyond(self.longest_sequence, however, param="output")
        if request.adapter is not None and not self.max_adapters:
            raise InvalidRequest("this engine runs without LoRA adapters", param="model")
        params = request.params
        if params.min_tokens > self.longest_sequence:
            bound = f"must be at most {self.longest_sequence}, the tokens of prompt and output together"
            raise InvalidRequest(f"min_tokens {bound}", param="min_tokens")
        for name, ids in (
            ("prompt", request.prompt),
            ("output", request.output),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
                raise InvalidRequest(f"{name} must hold token ids in 0..{self.vocab_size - 1}", param=name)
