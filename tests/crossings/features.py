"""What requests can ask for and what can happen to them, each in a line, and how two of them are run at once.

A feature either shapes the output (a sampling parameter, a grammar), or must leave it as it is (log-probabilities, a
prefix hit, preemption). For a pair of features the outcome must be the plain one: what the shaping features give to a
request that is alone in an engine where nothing happens.

To add a feature, add its line to `FEATURES`; if it is something that happens, say in `_Run` how. Then
`python -m tests.crossings.features` writes docs/crossings.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from penstock.bench.adapters import adapter_of
from penstock.bench.schemas import compact, record
from penstock.core.ledger import Ledger
from penstock.core.request import (
    Chunk,
    FinishReason,
    GenerateRequest,
    Grammar,
    Objective,
    SamplingParams,
    TokenLogprob,
    choice_seed,
)
from penstock.engine.executor import Adapters, Executor
from penstock.engine.grammar import Grammars
from penstock.engine.limits import SchedulerLimits
from penstock.engine.loop import EngineLoop
from penstock.engine.planned_step import PlannedStep
from penstock.engine.scheduler import Scheduler
from penstock.engine.speculation import Drafter
from penstock.grammar.matcher import LLGuidanceMatcher
from penstock.text.stream import TextStream
from penstock.text.tokenizer import Tokenizer
from penstock.text.tool_calls import hermes
from penstock.text.tool_calls.grammar import literal
from penstock.text.tool_calls.parser import Function
from tests.engine.guessing import Guesser, tried_whenever_possible

PROMPT = (
    "The harbour master wrote down every ship that came in before the storm, with its name, its captain and what it "
    "carried, and then he closed the book. The first one was"
)
SEED = 5
ABORTED = ", aborted"  # of the id of a request
SHIP = record(
    {
        "captain": {"type": "string", "pattern": "^[A-Z][a-z]{9}$"},
        "crew": {"type": "integer", "minimum": 10, "maximum": 99},
        "came in before the storm": {"type": "boolean"},
    }
)
CALL = hermes.grammar([Function("ship", SHIP)], literal, one=False).only_calls(literal, one=False)
LOG = record({name: {"type": "string", "maxLength": 9} for name in ("ship", "captain", "cargo", "came from")})
BASE: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
BATCH = Objective("batch", rank=1)
PAGE = Path(__file__).parents[2] / "docs" / "crossings.md"


@dataclass(frozen=True)
class Feature:
    name: str
    what: str
    params: Mapping[str, Any] = field(default_factory=dict)  # of SamplingParams
    shapes: bool = True  # whether these may change which tokens come out
    fields: Mapping[str, Any] = field(default_factory=dict)  # of GenerateRequest, which change them too
    limits: Mapping[str, Any] = field(default_factory=dict)  # of the engine


FEATURES = (
    Feature("temperature", "temperature 1", {"temperature": 1.0}),
    Feature("filters", "top-p, top-k and min-p", {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01}),
    Feature(
        "penalties",
        "presence, frequency and repetition penalty",
        {"presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    ),
    Feature("logit bias", "some tokens more, others less likely", {"logit_bias": {28: -20.0, 260: 4.0, 34: 3.0}}),
    Feature(
        "min tokens", "stop tokens, but not among the first eight", {"min_tokens": 8, "stop_token_ids": (28, 30, 260)}
    ),
    Feature(
        "slow masks",
        "tokens are sampled without a mask, as its grammar is slow, and again where they are refused",
        {"grammar": Grammar("json_schema", compact(LOG))},
    ),
    Feature("grammar", "JSON for a schema", {"grammar": Grammar("json_schema", compact(SHIP))}),
    Feature("tools", "a forced call", {"grammar": Grammar("lark", CALL)}),
    Feature("reasoning", "a schema after reasoning", {"grammar": Grammar("json_schema", compact(SHIP), after=(28,))}),
    Feature("adapter", "a LoRA adapter, beside requests with another and with none", fields={"adapter": adapter_of(0)}),
    Feature("logprobs", "log-probabilities of the output", {"logprobs": 2}, shapes=False),
    Feature("prompt logprobs", "log-probabilities of the prompt", {"prompt_logprobs": 1}, shapes=False),
    Feature("n", "two choices, each with its own seed"),
    Feature("stop string", "the text ends at a string that it has in its middle"),
    Feature("prefix hit", "the prompt has been computed for another request"),
    Feature("chunked prefill", "the prompt is computed 16 tokens at a time", limits={"max_step_tokens": 16}),
    Feature("preemption", "its memory is taken away for others, and it is recomputed", limits={"num_blocks": 6}),
    Feature("run-ahead", "steps are launched before the one before them is read"),
    Feature("speculation", "tokens are drafted, most of them rightly, and several verified in one step"),
    Feature("early exit", "tokens are drafted by the model's own first layers"),
    Feature("resumption", "another engine has given the first half of the output"),
    Feature("abort", "the same request, beside it, is aborted in the middle"),
    Feature("batch", "it sits out steps for requests that somebody waits for", fields={"objective": BATCH}),
)
PAIRS = tuple(itertools.combinations([feature.name for feature in FEATURES], 2))
BY_NAME = {feature.name: feature for feature in FEATURES}
# Pairs of which one turns the other off.
OFF = {
    (
        "prompt logprobs",
        "prefix hit",
    ): "logits of the whole prompt are needed, so nothing of it is taken from the cache",
    ("prompt logprobs", "resumption"): "the first engine has given them with the first token",
    ("speculation", "early exit"): "one drafter is used at a time",
}


@dataclass
class Outcome:
    """Of one choice."""

    text: TextStream
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached: int = 0
    sat_out: int = 0  # steps without it, though it has a row
    unmasked: int = 0  # tokens that it sampled without the mask of its grammar
    ledger: Ledger | None = None


@dataclass
class Bench:
    """A loaded model, for engines that are made anew for every run."""

    limits: SchedulerLimits
    executor: Executor
    grammars: Grammars
    tokenizer: Tokenizer
    adapters: Adapters
    early_exit: Drafter | None = None  # where the executor can
    base: Mapping[str, Any] = field(default_factory=lambda: BASE)
    seed: int = SEED
    plain: dict[str, list[Outcome]] = field(default_factory=dict)  # what came out, by the parameters asked for

    def alone(self, params: Mapping[str, Any], choices: int, **fields: Any) -> list[Outcome]:
        key = repr(sorted([*params.items(), *fields.items()], key=str)) + str(choices)
        if key not in self.plain:
            self.plain[key] = [
                _Run(self, {}, params, fields).finish([_request(self, params, choice, **fields)])[0]
                for choice in range(choices)
            ]
        return self.plain[key]

    def crossed(self, first: str, second: str) -> tuple[list[Outcome], list[Outcome]]:
        """What comes out with both features, and what should."""
        names = {first, second}
        shaping, scoring = dict(self.base), dict[str, Any]()
        for name in (first, second):  # of several grammars the last one counts
            (shaping if BY_NAME[name].shapes else scoring).update(BY_NAME[name].params)
        fields = {name: value for feature in names for name, value in BY_NAME[feature].fields.items()}
        plain = self.alone(shaping, 1 + ("n" in names), **fields)
        params = {**shaping, **scoring}
        if "stop string" in names:
            text = plain[0].text.text
            params["stop"] = shaping["stop"] = (text[len(text) // 2 :][:4],)
            plain = [self._stopped(outcome, shaping) for outcome in plain]
        limits = {name: value for feature in names for name, value in BY_NAME[feature].limits.items()}
        return _Run(self, limits, params, fields).cross(names, plain), plain

    def _stopped(self, outcome: Outcome, params: Mapping[str, Any]) -> Outcome:
        """The outcome as it is with stop strings, from the tokens without."""
        stream = TextStream(self.tokenizer, SamplingParams(**params))
        delta = stream.push(Chunk("", list(outcome.tokens), outcome.finish_reason))
        return Outcome(stream, delta.token_ids, delta.finish_reason)


def _request(bench: Bench, params: Mapping[str, Any], choice: int, **fields: Any) -> GenerateRequest:
    tokens = bench.tokenizer.encode(PROMPT)
    return GenerateRequest(
        f"choice {choice}", tokens, SamplingParams(**params), seed=choice_seed(bench.seed, choice), **fields
    )


class _Run:
    """One engine, its requests, and what came of them."""

    def __init__(
        self, bench: Bench, limits: Mapping[str, Any], params: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> None:
        self._bench = bench
        self._params = params
        self._fields = fields
        self._scheduler = Scheduler(replace(bench.limits, **limits))
        self._loop = EngineLoop(self._scheduler, bench.executor, self._take, bench.grammars, bench.adapters)
        self._outcomes: dict[str, Outcome] = {}
        plan = self._scheduler.schedule

        def schedule(*args: Any) -> PlannedStep | None:
            planned = plan(*args)
            if planned is not None:
                for sequence in self._scheduler.running:
                    self._outcomes[sequence.request.id].sat_out += sequence not in planned.sequences
            return planned

        self._scheduler.schedule = schedule  # type: ignore[method-assign, assignment]
        complete = self._scheduler.complete

        def counted(planned: PlannedStep, *args: Any) -> list[Chunk]:
            for index in planned.step.checked:
                self._outcomes[planned.sequences[index].request.id].unmasked += 1
            return complete(planned, *args)

        self._scheduler.complete = counted  # type: ignore[method-assign, assignment]

    def cross(self, names: set[str], plain: list[Outcome]) -> list[Outcome]:
        bench = self._bench
        before = bench.executor.runs_ahead
        bench.executor.runs_ahead = before or "run-ahead" in names
        if "prefix hit" in names:
            warm = {**bench.base, "max_tokens": 1}
            self.finish([replace(_request(bench, warm, 9, **self._fields), id="warm")])
        fields = {**self._fields, "priority": 1}
        requests = [_request(bench, self._params, choice, **fields) for choice in range(len(plain))]
        if "resumption" in names:
            halves = [outcome.tokens[: len(outcome.tokens) // 2] for outcome in plain]
            requests = [replace(r, output=half, resumed=True) for r, half in zip(requests, halves, strict=True)]
        if "speculation" in names:
            right = {request.id: outcome.tokens for request, outcome in zip(requests, plain, strict=True)}
            drafter = Guesser(lambda request: right.get(request.id.removesuffix(ABORTED), []), bench.seed, right=0.8)
            self._scheduler.speculation = tried_whenever_possible(drafter, 5)
        if "early exit" in names:
            assert bench.early_exit is not None
            self._scheduler.speculation = tried_whenever_possible(bench.early_exit, 5)
        slow = patch.object(LLGuidanceMatcher, "mask_seconds", 1.0) if "slow masks" in names else nullcontext()
        try:
            with slow:
                return self.finish(requests, crowded=True, aborted="abort" in names)
        finally:
            bench.executor.runs_ahead = before

    def finish(
        self, requests: Sequence[GenerateRequest], crowded: bool = False, aborted: bool = False
    ) -> list[Outcome]:
        """Run these to their end; `crowded`: beside others that come a little later and go first."""
        twins = [replace(request, id=request.id + ABORTED) for request in requests] if aborted else []
        for request in [*requests, *twins]:
            self._submit(request)
        for _ in range(3 if crowded else 0):
            self._loop.step()
        for twin in twins:
            self._loop.abort(twin.id)
        if crowded:
            others = ({"temperature": 1.0}, {"grammar": BY_NAME["grammar"].params["grammar"], "frequency_penalty": 1.0})
            for number, params in enumerate(others):
                tokens = self._bench.tokenizer.encode(f"{number}. {PROMPT}")
                other = GenerateRequest(f"other {number}", tokens, SamplingParams(**{**BASE, **params}), seed=1)
                adapter = adapter_of(1) if "adapter" in self._fields and number else None
                self._submit(replace(other, adapter=adapter))
        while self._loop.step():
            pass
        return [self._outcomes[request.id] for request in requests]

    def _submit(self, request: GenerateRequest) -> None:
        outcome = self._outcomes[request.id] = Outcome(TextStream(self._bench.tokenizer, request.params))
        if request.output:  # what the first engine gave
            outcome.text.push(Chunk(request.id, list(request.output)))
            outcome.tokens += request.output
        self._loop.submit(request)

    def _take(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            outcome = self._outcomes[chunk.request_id]
            outcome.ledger = chunk.ledger or outcome.ledger
            if outcome.finish_reason is not None:
                continue  # a stop string has ended it
            delta = outcome.text.push(chunk)
            outcome.tokens += delta.token_ids
            outcome.logprobs += delta.logprobs or []
            outcome.prompt_logprobs = chunk.prompt_logprobs or outcome.prompt_logprobs
            outcome.cached += chunk.cached_tokens
            outcome.finish_reason = delta.finish_reason
            if delta.finish_reason is not None and chunk.finish_reason is None:
                self._loop.abort(chunk.request_id)


def check_same(found: Sequence[Outcome], plain: Sequence[Outcome]) -> None:
    assert [outcome.tokens for outcome in found] == [outcome.tokens for outcome in plain]
    assert [outcome.text.text for outcome in found] == [outcome.text.text for outcome in plain]
    assert [outcome.finish_reason for outcome in found] == [outcome.finish_reason for outcome in plain]


def check_parts(first: str, second: str, found: Sequence[Outcome]) -> None:
    """That both features had a part in the outcomes. Whether they have depends on what the model says."""
    names, off = {first, second}, (first, second) in OFF
    if "chunked prefill" in names and "prefix hit" not in names:
        assert any(outcome.ledger and len(outcome.ledger.prefill) > 1 for outcome in found)
    for outcome in found:
        ledger = outcome.ledger
        assert ledger is not None
        if "stop string" not in names:
            assert ledger.output_tokens == len(outcome.tokens)
        if "preemption" in names:
            assert ledger.preemptions
        if "batch" in names:
            assert outcome.sat_out
        if "prefix hit" in names and not off:
            assert outcome.cached
        if "grammar" in names and not names & {"logprobs", "prompt logprobs", "resumption", "stop string"}:
            assert ledger.forced_tokens
        # Grammars reject such drafts before they are computed, and running ahead no sequence waits for them.
        if "early exit" in names and not names & {"grammar", "tools", "reasoning", "run-ahead"}:
            assert ledger.drafted_tokens
        if "speculation" in names and "early exit" not in names:
            assert ledger.accepted_tokens
            if not names & {"grammar", "tools", "reasoning"}:  # these reject wrong tokens before they are computed
                assert ledger.accepted_tokens < ledger.drafted_tokens
        # What changes logits or shows them needs every mask; of drafted tokens all have theirs.
        masked = {"penalties", "logit bias", "min tokens", "logprobs", "prompt logprobs", "speculation", "early exit"}
        if "slow masks" in names and not names & masked:
            assert outcome.unmasked
        if "logprobs" in names:
            resumed = len(outcome.tokens) // 2 if "resumption" in names else 0
            scored = [score.token_id for score in outcome.logprobs]  # but for tokens that lie in the stop string
            assert scored == outcome.tokens[resumed:][: len(scored) if "stop string" in names else None]
        if "prompt logprobs" in names and not off:
            assert len(outcome.prompt_logprobs or ()) == ledger.prompt_tokens


def page() -> str:
    """docs/crossings.md."""
    lines = [
        "# Crossings",
        "",
        "Bugs of servers sit where two features meet. `tests/crossings/test_pairs.py` runs every pair of these through",
        "the real engine with the built-in model on the CPU, beside other requests, and compares what comes out, token",
        "for token, with a request that is alone and to which nothing happens. This page is written by",
        "`python -m tests.crossings.features`.",
        "",
        "| feature | what |",
        "|---|---|",
        *(f"| {feature.name} | {feature.what} |" for feature in FEATURES),
        "",
        "| | " + " | ".join(feature.name for feature in FEATURES[1:]) + " |",
        "|---" * len(FEATURES) + "|",
    ]
    for at, first in enumerate(FEATURES[:-1]):
        marks = ("–" if (first.name, other.name) in OFF else "✓" for other in FEATURES[at + 1 :])
        lines.append(f"| {first.name} |" + " |" * at + " " + " | ".join(marks) + " |")
    lines += [
        "",
        "–: one turns the other off. " + "; ".join(f"{a} and {b}: {why}" for (a, b), why in OFF.items()) + ".",
    ]
    lines += [
        "",
        "`benchmarks/gpu_crossings.py` runs them on a GPU. On an H200 all 210 pairs without adapters and early exit",
        "gave the plain outcome with `engine.deterministic`: Qwen3-0.6B with two seeds. So did the 190 pairs without",
        "slow masks in fp8 with an fp8 cache, and of Llama-3.1-8B. With the usual kernels, where the last bits of",
        "logits depend on the batch, 11 of 630 had another token in the place of one that was about as likely.",
        "",
        "With a replica killed in the middle (`tests/crossings/test_failover.py`), from replicas that sleep",
        "(`test_waking.py`) and by versions, cascades and hedging (`test_other_ways.py`), requests of many kinds are",
        "tested through a server.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
