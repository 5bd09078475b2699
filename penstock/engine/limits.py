"""What a scheduler may use."""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def longest_sequence(self) -> int:
        return min(self.max_model_len, self.num_blocks * self.block_size)

    @property
    def least_prefill(self) -> int:
        """Tokens of prefill that a step always has room for, so that prompts move whatever was promised to streams."""
        return max(self.block_size, self.max_step_tokens // 64)
