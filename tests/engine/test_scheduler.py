"""The scheduler, block pool and loop against an executor that notices every misuse of the cache."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from penstock.core.errors import (
    ContextTooLong,
    DeadlineExceeded,
    EngineFailure,
    Failure,
    InvalidRequest,
    Unavailable,
)
from penstock.core.ledger import Ledger
from penstock.core.request import Adapter, Chunk, GenerateRequest, Grammar, SamplingParams
from penstock.engine.executor import NOT_A_NUMBER, AdapterWeights, Step, StepResult
from penstock.engine.limits import SchedulerLimits
from penstock.engine.loop import EngineLoop
from penstock.engine.planned_step import PlannedStep
from penstock.engine.scheduler import Scheduler
from penstock.simulation.clock import VirtualClock
from penstock.simulation.paged_executor import EOS, VOCAB, PagedExecutor, expected_output, seed_with
from tests.engine.guessing import Guesser, tried_whenever_possible
from tests.engine.toy_grammar import ToyGrammars, constrained_output


def limits(**changes: Any) -> SchedulerLimits:
    tiny = SchedulerLimits(
        num_blocks=12,
        block_size=4,
        max_seqs=4,
        max_step_tokens=8,
        max_model_len=40,
        vocab_size=VOCAB,
        eos_ids=frozenset({EOS}),
        max_adapters=2,
    )
    return replace(tiny, **changes)


@dataclass
class Outcome:
    tokens: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    cached: int = 0
    error: Failure | None = None
    ledger: Ledger | None = None


class ToyAdapters:
    def get(self, adapter: Adapter) -> AdapterWeights:
        return AdapterWeights(adapter.digest, 1, {})


class Harness:
    """An engine loop with its outcomes written down."""

    def __init__(self, bounds: SchedulerLimits, *, runs_ahead: bool = True, guesses: int | None = None) -> None:
        """`guesses`: the seed of a drafter, whose guesses are often right and often wrong."""
        self.limits = bounds
        self.scheduler = Scheduler(bounds)
        if guesses is not None:
            self.scheduler.speculation = tried_whenever_possible(Guesser(self.full_output, guesses), 5)
        self.executor = PagedExecutor(bounds.num_blocks, bounds.block_size, runs_ahead=runs_ahead)
        self.loop = EngineLoop(self.scheduler, self.executor, self._take, ToyGrammars(), ToyAdapters())
        self.requests: dict[str, GenerateRequest] = {}
        self.outcomes: dict[str, Outcome] = {}

    def _take(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            outcome = self.outcomes[chunk.request_id]
            assert not outcome.finish_reasons, "a chunk came after the last one"
            outcome.tokens += chunk.token_ids
            outcome.cached += chunk.cached_tokens
            if chunk.finish_reason is not None:
                outcome.finish_reasons.append(chunk.finish_reason)
                outcome.error, outcome.ledger = chunk.error, chunk.ledger

    def submit(self, prompt: list[int], max_tokens: int | None = None, **options: Any) -> str:
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=options.pop("min_tokens", 0),
            ignore_eos=options.pop("ignore_eos", False),
            grammar=Grammar("regex", source) if (source := options.pop("grammar", "")) else None,
        )
        adapter = Adapter(digest, "") if (digest := options.pop("adapter", "")) else None
        request = GenerateRequest(f"r{len(self.requests)}", prompt, params, adapter=adapter, **options)
        self.loop.submit(request)
        self.requests[request.id] = request
        self.outcomes[request.id] = Outcome()
        return request.id

    def expected(self, request_id: str) -> list[int]:
        request = self.requests[request_id]
        output = self.full_output(request)
        assert output[: len(request.output)] == list(request.output), "carried output that no engine gave"
        return output[len(request.output) :]

    def full_output(self, request: GenerateRequest) -> list[int]:
        params, room = request.params, self.limits.longest_sequence - len(request.prompt)
        seed = seed_with(request.seed, request.adapter.digest if request.adapter else "")
        stop = frozenset() if params.ignore_eos else frozenset({EOS})
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        if (grammar := params.grammar) is not None:
            return constrained_output(request.prompt, seed, most, stop, params.min_tokens, grammar.source)
        return expected_output(request.prompt, seed, most, stop, params.min_tokens)

    def run(self, steps: int = 10_000) -> None:
        for _ in range(steps):
            if not self.loop.step():
                return
            self.scheduler.check_integrity()
        raise AssertionError("the engine does not come to an end")


def test_empty_kv_slots_are_the_unused_ends_of_last_blocks() -> None:
    harness = Harness(limits(), runs_ahead=False)
    harness.submit([1, 2, 3, 4, 5], max_tokens=4, ignore_eos=True)
    harness.submit([1, 2, 3, 4, 6, 7], max_tokens=4, ignore_eos=True)
    while not all(outcome.tokens for outcome in harness.outcomes.values()):
        assert harness.loop.step()
    stats, running = harness.loop.stats, harness.scheduler.running
    assert len(running) == 2
    assert stats.kv_slots == 4 * stats.kv_blocks_used == 4 * 3, "the first block is shared"
    assert stats.kv_slots_empty == sum(-sequence.computed % 4 for sequence in running) > 0
    harness.run()
    assert (harness.loop.stats.kv_slots, harness.loop.stats.kv_slots_empty) == (0, 0)


def test_steps_read_all_weights_and_the_kv_of_their_sequences() -> None:
    now = 0.0

    def later() -> float:
        nonlocal now
        now += 0.5
        return now

    harness = Harness(limits(weight_bytes=1000, kv_token_bytes=10), runs_ahead=False)
    harness.loop._clock = later
    harness.submit([1, 2, 3, 4, 5], max_tokens=3, ignore_eos=True)
    harness.run()
    stats = harness.loop.stats
    assert stats.steps == 3
    assert stats.read_bytes_estimate == 3 * 1000 + (5 + 6 + 7) * 10
    assert stats.step_seconds == 3 * 0.5


def test_ended_requests_are_not_kept_until_their_deadlines() -> None:
    harness = Harness(limits(num_blocks=2000, max_model_len=4000), runs_ahead=False)
    harness.submit([1], max_tokens=3000, ignore_eos=True, deadline=3600)  # under way all the time, and due first
    for number in range(500):
        short = harness.submit([number % VOCAB], max_tokens=1, deadline=86400)
        while not harness.outcomes[short].finish_reasons:
            assert harness.loop.step()
        assert len(harness.scheduler._deadlines) <= 65
    assert not harness.outcomes["r0"].finish_reasons


class EngineMachine(RuleBasedStateMachine):
    """Random arrivals, sizes, priorities and aborts on a cache so small that preemption is constant."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.harness = Harness(limits())
        self.aborted: set[str] = set()

    @initialize(runs_ahead=st.booleans(), guesses=st.none() | st.integers(0, 9))
    def choose_executor(self, runs_ahead: bool, guesses: int | None) -> None:
        self.harness = Harness(limits(), runs_ahead=runs_ahead, guesses=guesses)

    @rule(
        target=live,
        shared=st.integers(0, 16),
        own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
        max_tokens=st.integers(0, 12),
        min_tokens=st.integers(0, 6),
        emitted=st.sampled_from([0, 0, 1, 2, 5, 12]),
        priority=st.integers(0, 2),
        seed=st.integers(0, 3),
        salt=st.sampled_from(["", "", "other"]),
        scope=st.sampled_from(["", "a", "b"]),
        common=st.sampled_from([0, 0, 5, 8]),
        ignore_eos=st.booleans(),
        grammar=st.sampled_from(["", "", "6", "9 1 2 3", "1 5", "4 2 2 2 2", "30", "closing"]),
        adapter=st.sampled_from(["", "", "one", "two", "three"]),
    )
    def submit(
        self,
        shared: int,
        own: list[int],
        max_tokens: int,
        min_tokens: int,
        emitted: int,
        priority: int,
        seed: int,
        salt: str,
        scope: str,
        common: int,
        ignore_eos: bool,
        grammar: str,
        adapter: str,
    ) -> str:
        prompt, least = [*range(shared), *own], min(min_tokens, max_tokens)
        stop = frozenset() if ignore_eos else frozenset({EOS})
        room = self.harness.limits.longest_sequence - len(prompt)
        most = min(max_tokens, room)
        if grammar:
            output = constrained_output(prompt, seed_with(seed, adapter), most, stop, least, grammar)[:-1]
        else:
            output = expected_output(prompt, seed_with(seed, adapter), most, stop, least)
        if output and output[-1] in stop and len(output) >= least:
            output.pop()  # what it ends with is never carried: it would not be resumed
        return self.harness.submit(
            prompt,
            max_tokens,
            min_tokens=least,
            output=output[:emitted],
            priority=priority,
            seed=seed,
            cache_salt=salt,
            prefix_scope=scope,
            common_tokens=min(common, shared),
            ignore_eos=ignore_eos,
            grammar=grammar,
            adapter=adapter,
        )

    @rule(target=live, request_id=consumes(live))
    def abort(self, request_id: str) -> object:
        if not self.harness.outcomes[request_id].finish_reasons:
            self.aborted.add(request_id)
        self.harness.loop.abort(request_id)
        return multiple()

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.loop.step()

    @invariant()
    def books_balance(self) -> None:
        self.harness.scheduler.check_integrity()

    def teardown(self) -> None:
        self.harness.run()
        self.harness.scheduler.check_integrity()
        assert self.harness.scheduler.pool.used == 0
        for request_id, outcome in self.harness.outcomes.items():
            expected = self.harness.expected(request_id)
            if request_id in self.aborted:
                assert outcome.tokens == expected[: len(outcome.tokens)]
                assert outcome.finish_reasons == ["abort"]
            else:
                assert outcome.tokens == expected
                assert len(outcome.finish_reasons) == 1


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_grammar_that_fails_ends_its_own_request(runs_ahead: bool) -> None:
    """Whether there is no mask, or a mask that allows nothing."""
    harness = Harness(limits(num_blocks=64), runs_ahead=runs_ahead)
    beside = harness.submit([1, 2, 3], 12, grammar="30")
    failing = [harness.submit([1, 2, 3], 12, grammar=source) for source in ("hopeless", "empty")]
    harness.run()
    assert [harness.outcomes[name].finish_reasons for name in failing] == [["error"], ["error"]]
    errors = [harness.outcomes[name].error for name in failing]
    assert [error and error.error for error in errors] == ["InvalidRequest", "InvalidRequest"]
    sent = [len(outcome.tokens) for outcome in harness.outcomes.values()]
    assert harness.scheduler.counters.output_tokens == sum(sent)
    assert [own.ledger.output_tokens for own in harness.outcomes.values() if own.ledger] == sent
    assert harness.outcomes[beside].tokens == harness.expected(beside)
    with pytest.raises(InvalidRequest):
        harness.submit([1, 2, 3], 12, grammar="broken")


@pytest.mark.parametrize("guesses", [None, 1])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_an_ignored_end_comes_only_where_nothing_else_may(runs_ahead: bool, guesses: int | None) -> None:
    """Whether tokens are sampled with a mask or without, one by one or after drafts, or follow what came before."""
    harness = Harness(limits(num_blocks=256, max_seqs=32, max_step_tokens=64), runs_ahead=runs_ahead, guesses=guesses)
    texts = [harness.submit([1, 2, 3], 25, grammar="30 1 2", seed=seed, ignore_eos=True) for seed in range(16)]
    closing = [harness.submit([1, 2, 3], 25, grammar="closing", seed=seed, ignore_eos=True) for seed in range(8)]
    resumed = [
        harness.submit([1, 2, 3], 25, grammar="30 1 2", seed=seed, ignore_eos=True, output=harness.expected(name)[:10])
        for seed, name in enumerate(texts)
    ]
    harness.run()
    for name in (*texts, *closing, *resumed):
        assert harness.outcomes[name].tokens == harness.expected(name)
    assert all(harness.outcomes[name].finish_reasons == ["length"] for name in (*texts, *resumed))
    assert all(EOS not in harness.outcomes[name].tokens for name in (*texts, *resumed))
    for name in closing:
        outcome = harness.outcomes[name]
        assert (outcome.tokens.index(EOS), outcome.finish_reasons) == (len(outcome.tokens) - 1, ["stop"])


@pytest.mark.parametrize("grammar", [None, "30"])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_request_without_numbers_fails_alone(runs_ahead: bool, grammar: str | None) -> None:
    harness = Harness(limits(num_blocks=64), runs_ahead=runs_ahead)
    beside = harness.submit([1, 2, 3], 12)
    broken = harness.submit([1, 2, 3, 4], 12, ignore_eos=True, grammar=grammar)
    collect, results = harness.executor.collect, list[StepResult]()

    def overflow(handle: Any) -> StepResult:
        """The third token of the request is none."""
        results.append(result := collect(handle))
        if len(results) == 3:
            result.tokens[-1] = [NOT_A_NUMBER]
        return result

    harness.executor.collect = overflow  # type: ignore[method-assign]
    harness.run()
    outcome = harness.outcomes[broken]
    assert outcome.finish_reasons == ["error"]
    assert outcome.error is not None
    assert (outcome.error.error, outcome.error.code) == ("InvalidLogits", "invalid_logits")
    assert outcome.tokens == harness.expected(broken)[: len(outcome.tokens)]
    assert outcome.ledger is not None
    assert outcome.ledger.output_tokens == len(outcome.tokens)
    assert harness.outcomes[beside].tokens == harness.expected(beside)
    assert harness.scheduler.counters.output_tokens == len(outcome.tokens) + len(harness.outcomes[beside].tokens)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_forced_tokens_take_no_step_of_their_own(runs_ahead: bool) -> None:
    harness = Harness(limits(num_blocks=64, max_step_tokens=64, eos_ids=frozenset()), runs_ahead=runs_ahead)
    whole = harness.submit([1, 2, 3], 30, grammar="6 2 4 6 8 10 12")
    harness.run()
    outcome = harness.outcomes[whole]
    assert outcome.tokens == [2, 4, 6, 8, 10, 12] == harness.expected(whole)
    assert outcome.finish_reasons == ["stop"]
    assert harness.scheduler.counters.steps == 1 + runs_ahead
    assert harness.scheduler.counters.output_tokens == 6
    assert outcome.ledger is not None
    assert (outcome.ledger.output_tokens, outcome.ledger.forced_tokens) == (6, 5)


def test_a_request_waits_for_an_adapter_slot() -> None:
    harness = Harness(limits(num_blocks=64, max_seqs=8, max_step_tokens=64))
    names = ["one", "two", "one", "three", ""]
    ids = [harness.submit([1, 2, 3], 6, ignore_eos=True, adapter=name) for name in names]
    harness.loop.step()
    assert [s.request.adapter and s.request.adapter.digest for s in harness.scheduler.running] == names[:3]
    harness.run()
    assert all(harness.outcomes[i].tokens == harness.expected(i) for i in ids)
    queued = [ledger.queued for i in ids if (ledger := harness.outcomes[i].ledger) is not None]
    assert queued[3]["adapters"] > 0
    assert "adapters" not in queued[0]


def test_an_adapter_stays_in_its_slot_until_another_needs_it() -> None:
    harness, filled = Harness(limits(num_blocks=64), runs_ahead=False), list[str]()
    launch = harness.executor.launch

    def watch(step: Step) -> StepResult:
        filled.extend(adapter.digest for _, adapter in step.adapters)
        return launch(step)

    harness.executor.launch = watch  # type: ignore[method-assign]
    for name in ("one", "two", "one", "", "two", "three", "two", "one"):
        request_id = harness.submit([1, 2, 3], 3, adapter=name)
        harness.run()
        assert harness.outcomes[request_id].tokens == harness.expected(request_id)
    assert filled == ["one", "two", "three", "one"]


def test_a_lost_step_leaves_no_adapter_behind() -> None:
    harness = Harness(limits(num_blocks=64))
    lost = harness.submit([1, 2, 3], 6, adapter="one")
    harness.executor.fail_next = True
    harness.run()
    assert harness.outcomes[lost].finish_reasons == ["error"]
    again = harness.submit([1, 2, 3], 6, adapter="one")
    harness.run()
    assert harness.outcomes[again].tokens == harness.expected(again)


def test_adapters_are_refused_where_there_are_none() -> None:
    harness = Harness(limits(max_adapters=0))
    with pytest.raises(InvalidRequest, match="without LoRA adapters"):
        harness.submit([1, 2, 3], 6, adapter="one")


def test_in_flight_prefix_is_computed_once() -> None:
    """Requests that arrive together with a common prefix share it within the very step that computes it."""
    harness = Harness(limits(num_blocks=64, max_seqs=8, max_step_tokens=64))
    ids = [harness.submit([*range(16), 20 + i], 2, ignore_eos=True) for i in range(6)]
    harness.loop.step()
    assert harness.scheduler.counters.batch_tokens == 17 + 5
    harness.run()
    assert [harness.outcomes[i].cached for i in ids] == [0] + [16] * 5
    assert all(harness.outcomes[i].tokens == harness.expected(i) for i in ids)


def test_next_turn_hits_generated_tokens() -> None:
    harness = Harness(limits(num_blocks=16))
    first = harness.submit(list(range(6)), 10, ignore_eos=True)
    harness.run()
    second = harness.submit([*range(6), *harness.outcomes[first].tokens, 3, 4], 4)
    harness.run()
    # Of 6 + 10 tokens the last was sampled but never computed, so three of four blocks are full.
    assert harness.outcomes[second].cached == 12
    assert harness.outcomes[second].tokens == harness.expected(second)


def test_prefixes_are_not_shared_across_salts() -> None:
    harness = Harness(limits(num_blocks=32))
    harness.submit(list(range(12)), 2, cache_salt="a")
    harness.run()
    other = harness.submit(list(range(12)), 2, cache_salt="b")
    same = harness.submit(list(range(12)), 2, cache_salt="a")
    harness.run()
    assert (harness.outcomes[other].cached, harness.outcomes[same].cached) == (0, 8)


def test_prefixes_are_shared_within_a_scope() -> None:
    harness = Harness(limits(num_blocks=64))
    harness.submit(list(range(12)), 2, prefix_scope="a")
    harness.run()
    ids = [harness.submit(list(range(12)), 2, prefix_scope=scope) for scope in ("b", "", "a", "b")]
    harness.run()
    assert [harness.outcomes[i].cached for i in ids] == [0, 0, 8, 8]
    salted = [harness.submit(list(range(12)), 2, prefix_scope=p, cache_salt=s) for p, s in (("", "a"), ("a", "b"))]
    harness.run()
    assert [harness.outcomes[i].cached for i in salted] == [0, 0], "a salt does not pass for a scope"


def test_scopes_share_the_blocks_that_are_common_to_all() -> None:
    """Blocks of four: of ten common tokens two are whole, and what follows them is each scope's own."""
    harness = Harness(limits(num_blocks=64))
    prompt = list(range(20))
    first = harness.submit(prompt, 2, prefix_scope="a", common_tokens=10)
    harness.run()
    asked = [("b", 10, ""), ("b", 10, ""), ("a", 10, ""), ("c", 0, ""), ("c", 10, "salt"), ("", 10, "")]
    ids = []
    for scope, common, salt in asked:
        ids.append(harness.submit(prompt, 2, prefix_scope=scope, common_tokens=common, cache_salt=salt))
        harness.run()
    assert [harness.outcomes[i].cached for i in ids] == [8, 16, 16, 0, 0, 8]
    assert all(harness.outcomes[i].tokens == harness.expected(i) for i in (first, *ids))


def test_better_priority_displaces_running_work() -> None:
    harness = Harness(limits(num_blocks=8, max_seqs=2))
    slow = [harness.submit([i] * 10, 6, priority=5, ignore_eos=True) for i in range(2)]
    for _ in range(3):
        harness.loop.step()
    urgent = harness.submit([9] * 14, 4, priority=0, ignore_eos=True)
    while not harness.outcomes[urgent].finish_reasons:
        harness.loop.step()
    assert harness.scheduler.counters.preemptions >= 1
    assert not all(harness.outcomes[i].finish_reasons for i in slow)
    harness.run()
    assert all(harness.outcomes[i].tokens == harness.expected(i) for i in [*slow, urgent])


def test_decodes_keep_running_while_a_long_prompt_is_prefilled() -> None:
    harness = Harness(limits(num_blocks=64, max_step_tokens=4, max_model_len=100))
    short = harness.submit([1, 2], 30, ignore_eos=True)
    harness.loop.step()
    harness.submit([3] * 60, 1, ignore_eos=True)
    for _ in range(10):
        harness.loop.step()
    assert len(harness.outcomes[short].tokens) >= 9


def test_stalls_name_requests_of_the_same_tenant_only() -> None:
    harness = Harness(limits(num_blocks=64, max_seqs=2, max_model_len=100))
    stream = harness.submit([1, 2], 60, ignore_eos=True, tenant="ann")
    harness.loop.step()
    for tenant in ("bob", "ann"):
        other = harness.submit([3] * 40, 1, ignore_eos=True, tenant=tenant)
        while not harness.outcomes[other].finish_reasons:
            harness.loop.step()
    harness.run()
    ledger = harness.outcomes[stream].ledger
    assert ledger is not None
    assert {stall.request_id for stall in ledger.stalls} == {"", "r2"}


def test_every_end_has_its_ledger() -> None:
    harness = Harness(limits(num_blocks=64, max_seqs=2))
    aborted = harness.submit([1] * 9, 5)
    done = harness.submit([2], 2, ignore_eos=True)
    expired = harness.submit([3] * 9, 5, deadline=1e-9)
    harness.loop.step()
    harness.loop.abort(aborted)
    harness.run()
    lost = harness.submit([4] * 9, 5)
    harness.executor.fail_next = True
    harness.run()
    found = {
        request_id: (outcome.finish_reasons, outcome.error and type(outcome.error.exception()))
        for request_id, outcome in harness.outcomes.items()
    }
    assert found == {
        aborted: (["abort"], Unavailable),
        done: (["length"], None),
        expired: (["deadline"], DeadlineExceeded),
        lost: (["error"], EngineFailure),
    }
    assert all(outcome.ledger is not None for outcome in harness.outcomes.values())


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    harness = Harness(limits(num_blocks=64, max_seqs=2))
    lost = [harness.submit([i] * 9, 5, ignore_eos=True) for i in range(2)]
    waiting = harness.submit([5] * 9, 5, ignore_eos=True)
    harness.loop.step()
    harness.executor.fail_next = True
    harness.run()
    assert [harness.outcomes[i].finish_reasons for i in lost] == [["error"], ["error"]]
    assert harness.outcomes[waiting].tokens == harness.expected(waiting)
    again = harness.submit([0] * 9, 5, ignore_eos=True)
    harness.run()
    assert harness.outcomes[again].tokens == harness.expected(again)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_who_ended_in_the_turn_of_a_failed_step_is_told(runs_ahead: bool) -> None:
    harness = Harness(limits(num_blocks=64), runs_ahead=runs_ahead)
    clock = VirtualClock()
    harness.loop._clock = clock
    expired = harness.submit([1, 2, 3], 30, ignore_eos=True, deadline=1.0)
    lost = harness.submit([4, 5, 6], 30, ignore_eos=True)
    for _ in range(4):
        harness.loop.step()
    clock.now = 2.0
    harness.executor.fail_next = True
    harness.run()
    assert [harness.outcomes[i].finish_reasons for i in (expired, lost)] == [["deadline"], ["error"]]


def test_who_ended_before_masks_failed_is_told() -> None:
    harness = Harness(limits(num_blocks=64), runs_ahead=True)
    done = harness.submit([1, 2, 3], 3, ignore_eos=True)
    lost = harness.submit([4, 5, 6], 30, ignore_eos=True, grammar="20 9")
    masks = harness.loop._masks
    assert masks is not None
    of = masks.of

    def failing(planned: PlannedStep) -> Any:
        if done not in harness.scheduler._sequences:
            raise RuntimeError("the device is lost")
        return of(planned)

    masks.of = failing  # type: ignore[method-assign]
    harness.run()
    assert harness.outcomes[done].tokens == harness.expected(done)
    assert [harness.outcomes[i].finish_reasons for i in (done, lost)] == [["length"], ["error"]]


def test_a_stop_in_the_middle_of_the_loop_is_not_lost() -> None:
    loop = Harness(limits()).loop
    clear, cleared = loop._wake.clear, 0

    def stop_just_before() -> None:
        nonlocal cleared
        cleared += 1
        if cleared == 2:  # after the idle check nothing but `stop` wakes the loop
            loop.stop()
        clear()

    loop._wake.clear = stop_just_before  # type: ignore[method-assign]
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("prompt", [[3], list(range(9)), list(range(30))])
def test_a_request_for_no_output_ends_once_its_prompt_is_computed(prompt: list[int], runs_ahead: bool) -> None:
    harness = Harness(limits(), runs_ahead=runs_ahead)
    ids = [harness.submit(prompt, 0), harness.submit([*prompt, 5], 3, ignore_eos=True), harness.submit(prompt, 0)]
    harness.run()
    assert [harness.outcomes[i].finish_reasons for i in ids] == [["length"]] * 3
    assert [len(harness.outcomes[i].tokens) for i in ids] == [0, 3, 0]
    assert harness.outcomes[ids[2]].cached == (len(prompt) - 1) // 4 * 4
    assert harness.scheduler.counters.output_tokens == 3


def test_output_from_elsewhere_counts_in_the_ledger_and_not_among_cached_prompt_tokens() -> None:
    harness = Harness(limits(num_blocks=32))
    first = harness.submit(list(range(6)), 12, ignore_eos=True)
    harness.run()
    emitted = harness.outcomes[first].tokens[:9]
    resumed = harness.submit(list(range(6)), 12, ignore_eos=True, output=emitted)
    harness.run()
    ledger = harness.outcomes[resumed].ledger
    assert ledger is not None
    assert (ledger.prompt_tokens, ledger.cached_tokens, ledger.output_tokens) == (6, 6, 12)
    assert ledger.decode_steps == 2, "three tokens were sampled here, the first of them with the prefill"


@given(prompt_len=st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_whatever_is_accepted_can_run(prompt_len: int) -> None:
    harness = Harness(limits(num_blocks=7))  # 28 tokens, less than max_model_len
    prompt = [1] * prompt_len
    if prompt_len >= 28:
        with pytest.raises(ContextTooLong, match=r"^This model's maximum context length is 28 tokens"):
            harness.submit(prompt)
    else:
        request_id = harness.submit(prompt, ignore_eos=True)
        harness.run()
        assert harness.outcomes[request_id].finish_reasons == ["length"]
        assert len(harness.outcomes[request_id].tokens) == 28 - prompt_len


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], SamplingParams(), "prompt"),
        ([VOCAB], SamplingParams(), "prompt"),
        ([-1], SamplingParams(), "prompt"),
        ([1], SamplingParams(stop_token_ids=(VOCAB,)), "stop_token_ids"),
        ([1], SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias"),
    ],
)
def test_refusals_name_the_field(prompt: list[int], params: SamplingParams, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        limits().check(GenerateRequest("r", prompt, params))
    assert caught.value.param == param


@pytest.mark.parametrize(("output", "error"), [([VOCAB], InvalidRequest), ([1] * 40, ContextTooLong)])
def test_output_that_cannot_be_is_refused(output: list[int], error: type[InvalidRequest]) -> None:
    with pytest.raises(error) as caught:
        limits().check(GenerateRequest("r", [1], SamplingParams(), output=output))
    assert caught.value.param == "output"
