"""One request on its way through the engine.

There are no phases. A sequence has `known` tokens (prompt, then what was sampled) and `computed` tokens (their keys
and values are in the cache, or in a step already launched). A step lets computed catch up with known; when it does,
the last token's logits are sampled and known grows by one. Prefill, decoding, chunks, prefix hits and recomputation
after preemption are all this one rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from penstock.core.block_hashes import extend_block_hashes
from penstock.core.errors import InvalidLogits
from penstock.core.ledger import Ledger
from penstock.core.request import FinishReason, GenerateRequest, TokenLogprob
from penstock.engine.executor import NO_ADAPTER, NOT_A_NUMBER, AdapterWeights
from penstock.engine.fairness import TenantCounter
from penstock.engine.grammar import Constraint, follow


@dataclass(slots=True, eq=False)
class Sequence:
    request: GenerateRequest
    order: tuple[int, int, int]  # (rank, priority, arrival number)
    arrival: float
    max_len: int  # prompt plus output tokens
    stop_ids: frozenset[int]
    tokens: list[int]  # prompt and output as far as this side knows
    prompt_len: int
    given: int  # tokens that came with the request: the prompt, and output from elsewhere
    counter: TenantCounter
    ledger: Ledger
    due: float  # when its next token should be there while it waits or prefills
    promoted: bool = False  # to the best class, since it had waited far too long
    promised: bool = False  # whether `due` is an objective; else it is only how long a request should wait at most
    itl: float = math.inf  # the objective for its inter-token latency, in seconds
    paced: bool = False  # whether steps are kept short for its stream even if there is no such objective
    background: bool = False  # nobody waits for it
    sampling: bool = True  # False: it ends once its tokens are computed
    to_compute: int = 0  # of the tokens given: those that were in no cache when it arrived
    pending: int = 0  # tokens sampled in launched steps and not read back yet
    computed: int = 0
    row: int = -1  # device row while running
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # chain over the full blocks of `tokens`
    lost: int = 0  # tokens that were computed when it was last preempted
    shared: int = 0  # leading blocks that have been offered for sharing
    started: float | None = None  # when it was first scheduled
    finished: FinishReason | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    mark: float = 0.0  # up to here its time is in the ledger
    first_token: float | None = None
    last_token: float = 0.0
    constraint: Constraint | None = None  # what its output must match
    adapter: AdapterWeights | None = None  # that it is computed with
    adapter_slot: int = NO_ADAPTER  # where that is on the device while running
    draft_from: int = 0  # tokens that it has when a draft is next thought of
    draft_pause: int = 1  # tokens until then, if there is none now
    late_tokens: int = 0  # that came later after the one before than the objective says
    stalls: dict[str, list[float]] = field(default_factory=dict)  # by the request at fault: seconds, steps

    @property
    def known(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    def counts_sample(self, sampled: list[int]) -> bool:
        """Whether the sample of a step is one of the output. It may be void, or nothing, as the grammar refused it."""
        assert self.constraint is not None
        if self.constraint.void:
            self.constraint.void -= 1
            return False
        if not sampled:
            self._sample_again(self.constraint)
        return bool(sampled)

    def _sample_again(self, constraint: Constraint) -> None:
        """The last token is computed once more, to sample after it with a mask. A step that goes on from the refused
        one is void."""
        self.pending -= 1
        constraint.refused = True
        constraint.void, constraint.void_token, self.pending = self.pending, self.tokens[-1], 0
        if self.row >= 0:
            self.computed = len(self.tokens) - 1

    def may_end_with(self, token: int) -> bool:
        """Whether `cut` may end it at this token, the last one that it has."""
        return token in self.stop_ids or token == NOT_A_NUMBER or len(self.tokens) >= self.max_len

    def cut(self, sampled: list[int], samples: int) -> FinishReason | None:
        """Why these tokens, the last ones, of up to `samples` that a step might have given, end it, if they do. Those
        after the one that ends it are deleted here and in `sampled`. Raises InvalidLogits where one is none and
        InvalidRequest where its grammar cannot go on with them."""
        if sampled[-1] == NOT_A_NUMBER:
            raise self.no_numbers("logits")
        if self.row >= 0:
            self.computed -= samples - len(sampled)  # tokens that were proposed and rejected
        first = len(self.tokens) - len(sampled)
        complete = False
        last, constraint = sampled[-1], self.constraint
        if constraint is not None and not (last in self.stop_ids and self._stops(last, len(self.tokens))):
            complete = follow(self, constraint, sampled)
        if not complete and len(self.tokens) < self.max_len and self.stop_ids.isdisjoint(sampled):
            return None  # as it nearly always is
        for taken, token in enumerate(sampled, start=1):
            end = first + taken
            if self._stops(token, end) or (complete and taken == len(sampled)):
                reason: FinishReason = "stop"
            elif end >= self.max_len:
                reason = "length"
            else:
                continue
            del self.tokens[end:], sampled[taken:]
            return reason
        return None

    def _stops(self, token: int, end: int) -> bool:
        """Whether a token at this end of the output ends it."""
        return token in self.stop_ids and end - self.prompt_len >= self.request.params.min_tokens

    def no_numbers(self, what: str) -> InvalidLogits:
        """The error of a sequence for which no numbers come out."""
        whose = "of the model" if self.adapter is None else "of the model or of its LoRA adapter"
        return InvalidLogits(f"the {what} of this request hold NaN: computing them overflows with the weights {whose}")

    def block_hashes(self, block_size: int, blocks: int) -> list[bytes]:
        """Hashes of the first `blocks` full blocks, extended as tokens become known."""
        extend_block_hashes(self.hashes, self.request, self.tokens, block_size, blocks)
        return self.hashes[:blocks]
