"""Drafts by a model: what it computes before it can draft, and when."""

from __future__ import annotations

import pytest

from penstock.core.request import Chunk, GenerateRequest, SamplingParams
from penstock.engine.arrival import sequence_of
from penstock.engine.executor import SAMPLED, RowSetup, Step, StepResult
from penstock.engine.fairness import TenantCounter
from penstock.engine.limits import SchedulerLimits
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.engine.sequence import Sequence
from penstock.simulation.paged_executor import VOCAB, PagedExecutor, expected_output, next_token
from penstock.speculative import draft_model
from penstock.speculative.draft_model import DraftLimits, ModelDrafter
from tests.engine.guessing import tried_whenever_possible

LIMITS = SchedulerLimits(2000, 16, 4, 256, 10_000, VOCAB)
MOST = 32  # tokens of a step of the draft model
PROMPT = [(7 * i) % VOCAB for i in range(1000)]


class DraftExecutor:
    """Samples what the model samples, from the tokens that it was given. A token takes a millisecond."""

    idle_seconds = mask_memory = None
    runs_ahead = False

    def __init__(self) -> None:
        self.now = 0.0
        self.computed = 0  # tokens
        self._setups: dict[int, RowSetup] = {}
        self._tokens: dict[int, list[int]] = {}  # of each row

    def padded_tokens(self, tokens: int) -> int:
        return tokens

    def launch(self, step: Step) -> StepResult:
        for setup in step.setups:
            self._setups[setup.row] = setup
            self._tokens.setdefault(setup.row, [])
        sampled, given = list[list[int]](), iter(step.tokens)
        for row, start, count, samples in zip(step.rows, step.starts, step.counts, step.samples, strict=True):
            known = self._tokens[row]
            assert start <= len(known), "it begins behind what was computed"
            last = known[start:]
            del known[start:]
            for _, token in zip(range(count), given, strict=False):
                known.append(last[0] if token == SAMPLED else token)
            setup = self._setups[row]
            sampled.append([next_token(known, setup.prompt_len, setup.seed)] * samples)
            self.computed += count
            self.now += 1e-3 * count
            if samples:
                known += sampled[-1]  # where the next step may read it
        return StepResult(sampled)

    def collect(self, handle: StepResult) -> StepResult:
        return handle


def drafting(rows: int = 2) -> tuple[ModelDrafter, DraftExecutor]:
    executor = DraftExecutor()
    return ModelDrafter(executor, DraftLimits(rows, 100, 16, MOST), [], lambda: executor.now), executor  # type: ignore[arg-type]


def sequence(prompt: list[int], seed: int = 0) -> Sequence:
    request = GenerateRequest("r", prompt, SamplingParams(), seed=seed)
    return sequence_of(request, 0, TenantCounter("", 1.0), LIMITS, 0.0)


def caught_up(drafter: ModelDrafter, s: Sequence) -> ModelDrafter:
    for _ in range(1000):
        if drafter.behind(s) is None:
            return drafter
        assert drafter.catch_up(s, [], 1.0)
    raise AssertionError("it never catches up")


def test_no_call_computes_more_than_a_chunk() -> None:
    drafter, executor = drafting()
    s, most = sequence(PROMPT), 0
    for _ in range(1000):
        if drafter.behind(s) is None:
            break
        before = executor.computed
        assert drafter.propose([s], [4]) == [[]], "it has not seen all of it"
        assert executor.computed == before
        assert drafter.catch_up(s, [], 1.0)
        most = max(most, executor.computed - before)
        s.tokens.append(3)  # its stream goes on meanwhile
    assert most == MOST
    before = executor.computed
    assert drafter.propose([s], [4]) == [drafts(s, 4)]
    assert executor.computed - before <= draft_model._AT_ONCE + 4


def drafts(s: Sequence, count: int) -> list[int]:
    tokens = list(s.tokens)
    for _ in range(count):
        tokens.append(next_token(tokens, s.prompt_len, s.request.seed))
    return tokens[len(s.tokens) :]


def test_a_chunk_takes_as_long_as_it_may() -> None:
    drafter, executor = drafting()
    s = sequence(PROMPT)
    assert drafter.behind(s) == 0.0, "nobody knows how long it takes"
    assert drafter.catch_up(s, [], 0.02)
    assert executor.computed == draft_model._AT_ONCE, "the first one is short"
    assert drafter.behind(s) == pytest.approx(1e-3 * (999 - executor.computed))
    for seconds, tokens in ((0.02, 20), (1.0, MOST), (0.0, draft_model._AT_ONCE)):
        before = executor.computed
        assert drafter.catch_up(s, [], seconds)
        assert executor.computed - before == pytest.approx(tokens, abs=1)


def test_nobody_loses_a_row_while_it_decodes() -> None:
    drafter, executor = drafting(rows=1)
    first, second = sequence(PROMPT[:100]), sequence(PROMPT[:50])
    caught_up(drafter, first)
    before = executor.computed
    assert not drafter.catch_up(second, [first, second], 1.0)
    assert executor.computed == before
    assert drafter.catch_up(second, [second], 1.0), "the other one has stopped"
    assert caught_up(drafter, second).propose([second], [3]) == [drafts(second, 3)]
    assert drafter.behind(first) is not None


def test_a_sequence_longer_than_a_row_is_not_drafted_for() -> None:
    assert not drafting()[0].outlook(sequence(PROMPT * 2))


def test_outputs_stay_the_same_and_drafts_come_once_it_has_caught_up() -> None:
    drafter, executor = drafting()
    scheduler, chunks, outputs = Scheduler(LIMITS), list[Chunk](), 60
    scheduler.speculation = tried_whenever_possible(drafter, 5)
    paged = PagedExecutor(LIMITS.num_blocks, LIMITS.block_size, runs_ahead=False)
    loop = EngineLoop(scheduler, paged, chunks.extend)
    params = SamplingParams(max_tokens=outputs, ignore_eos=True)
    requests = [GenerateRequest(str(seed), PROMPT[seed : seed + 400], params, seed=seed) for seed in range(2)]
    for request in requests:
        loop.submit(request)
    before = 0
    while loop.step():
        assert executor.computed - before <= MOST + 2 * (draft_model._AT_ONCE + 5)
        before = executor.computed
    for request in requests:
        found = [token for chunk in chunks if chunk.request_id == request.id for token in chunk.token_ids]
        assert found == expected_output(request.prompt, request.seed, outputs, frozenset())
    assert loop.stats.accepted_tokens == loop.stats.drafted_tokens > outputs
