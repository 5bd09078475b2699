"""What goes into an engine and what comes out of it: `SamplingParams`, `Objective`, `GenerateRequest`, `Chunk`."""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from penstock.core.errors import Failure, InvalidRequest, PenstockError
from penstock.core.ledger import Ledger

FinishReason = Literal["stop", "length", "abort", "error", "deadline"]

# Where a prompt leaves a model: within its reasoning, after it, or free to begin with it.
ReasoningStart = Literal["open", "closed", "free"]

GrammarKind = Literal["json_schema", "regex", "lark"]

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_GRAMMAR_BYTES = 128 * 1024
ALL_IDS = 2**31  # token ids are int32: no vocabulary has more
# What a model's authors may recommend, and settings override, for requests that do not say.
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise InvalidRequest(f"{param} {message}", param=param)


class Range(NamedTuple):
    """The values that a number may have, and what is said of others."""

    minimum: float
    maximum: float | None = None
    above: bool = False  # the minimum itself is not allowed
    wording: str = ""  # default: from the limits

    def check(self, param: str, value: float | None) -> None:
        """Refuse a number that is out of range; None stands for one that was not given."""
        if value is None:
            return
        low, high = self.minimum, self.maximum
        large_enough = value > low if self.above else value >= low
        if not (large_enough and (high is None or value <= high)):
            raise InvalidRequest(f"{param} {self.wording or f'must be between {low} and {high}'}", param=param)


# By parameter. Whoever validates or documents a field of the same meaning reads its range here.
RANGES = {
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, above=True, wording="must be above 0 and at most 1"),
    "top_k": Range(0, wording="must be 0 (all tokens) or positive"),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0.01, 100),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "seed": Range(-(2**63), 2**63 - 1, wording="must fit in 64 bits"),
    "max_tokens": Range(0, wording="must not be negative"),
    "min_tokens": Range(0, wording="must not be negative"),
    "n": Range(1, MAX_CHOICES),
    "logprobs": Range(0, MAX_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
}


_WHOLE = {"top_k", "seed", "max_tokens", "min_tokens", "n", "logprobs", "prompt_logprobs"}
_OPTIONAL = {"seed", "max_tokens", "logprobs", "prompt_logprobs"}


def _number(name: str, value: Any) -> Any:
    whole = name in _WHOLE
    if type(value) is int or (type(value) is float and not whole) or (value is None and name in _OPTIONAL):
        return value
    try:  # those of numpy, say
        return operator.index(value) if whole else float(value + 0.0)
    except (TypeError, ValueError, OverflowError):  # tensors raise a ValueError
        kind = "a whole number" if whole else "a number"
        raise InvalidRequest(f"{name} must be {kind}, not {value!r}", param=name) from None


def _token(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidRequest(f"{name} must hold token ids, not {value!r}", param=name) from None


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must match, for whoever compiles it beside the engine."""

    kind: GrammarKind
    source: str  # the JSON of a schema, a regular expression, or a grammar: GBNF, or llguidance's dialect of Lark
    after: tuple[int, ...] = ()  # tokens that end a part which may be anything, such as </think>; (): there is none
    param: str = "grammar"  # what the request calls it, for errors

    def __post_init__(self) -> None:
        kinds = get_args(GrammarKind)
        _require(self.kind in kinds, self.param, f"must be of kind {', '.join(kinds)}, not {self.kind!r}")
        if self.kind == "json_schema" and not isinstance(self.source, str):
            object.__setattr__(self, "source", json.dumps(self.source))
        _require(isinstance(self.source, str), self.param, "must have a source that is text")
        size = len(self.source.encode(errors="replace"))
        _require(size <= MAX_GRAMMAR_BYTES, self.param, f"must have at most {MAX_GRAMMAR_BYTES // 1024} KiB")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to turn logits into tokens and when to stop. Valid by construction."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0, as whatever is not below its size: the whole vocabulary
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None  # None: until the context is full; 0: the prompt is computed and nothing sampled
    min_tokens: int = 0
    # Applied to text, outside the engine, and not within reasoning. A string by itself is taken for one.
    stop: tuple[str, ...] = ()
    reasoning: ReasoningStart | None = None  # None: whatever it is, it is part of the text
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1  # fanned out into one GenerateRequest each, outside the engine
    logprobs: int | None = None  # alternatives beside each output token; None: off
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            given = getattr(self, name)
            if (value := _number(name, given)) is not given:
                object.__setattr__(self, name, value)
            allowed.check(name, value)
        if self.top_k >= ALL_IDS:
            object.__setattr__(self, "top_k", 0)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            _require(isinstance(getattr(self, name), tuple | list), name, "must be a tuple")
        _require(isinstance(self.logit_bias, dict), "logit_bias", "must be a dict from token ids to numbers")
        if self.logit_bias:
            bias = {_token("logit_bias", t): _number("logit_bias", value) for t, value in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", bias)
        if self.stop_token_ids:
            ids = tuple(_token("stop_token_ids", token) for token in self.stop_token_ids)
            object.__setattr__(self, "stop_token_ids", ids)
        _require(all(-100 <= v <= 100 for v in self.logit_bias.values()), "logit_bias", "values must be in -100..100")
        if self.max_tokens is not None:
            _require(self.min_tokens <= self.max_tokens, "min_tokens", "must not exceed max_tokens")
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"takes at most {MAX_STOP_STRINGS} strings")
        _require(all(isinstance(text, str) for text in self.stop), "stop", "must hold strings")
        _require(all(self.stop), "stop", "must not contain an empty string")
        _require(self.grammar is None or isinstance(self.grammar, Grammar), "grammar", "must be a Grammar")

    @property
    def greedy(self) -> bool:
        """Below this temperature scaled logits leave float32 before a second token has any chance."""
        return self.temperature < 1e-5


@dataclass(frozen=True, slots=True)
class Objective:
    """What the requests of a class are promised, in seconds. None: nothing, so there is nothing to refuse."""

    name: str = "standard"
    ttft: float | None = None  # from arrival to the first token
    itl: float | None = None  # inter-token latency: between two tokens
    rank: int = 0  # classes of a smaller rank go first
    paced: bool = False  # somebody reads along: without an ITL, too, prompts of others must not slow it down much

    def __post_init__(self) -> None:
        for name, value in (("ttft", self.ttft), ("itl", self.itl)):
            _require(value is None or 0 < value < float("inf"), name, "must be above 0")


@dataclass(frozen=True, slots=True)
class SimilarPrompt:
    """The part of a prompt that may be matched by its meaning; all the rest must be equal."""

    text: str
    rest: bytes  # digest of everything else that makes the prompt


@dataclass(frozen=True, slots=True)
class CacheControl:
    """What a result cache on the way to the engine may do with a request."""

    read: bool = True
    store: bool = True  # False: neither stored nor shared with identical requests in progress
    max_age: float | None = None  # seconds
    only_cached: bool = False  # no stored answer: an error instead of a computation
    similar: SimilarPrompt | None = None  # an answer to a prompt of the same meaning will do


@dataclass(slots=True, eq=False)
class Share:
    """One request's part in a computation that identical ones share. Its owner pays: the first of those still there."""

    owner: bool = False  # now, or when it left
    cached_tokens: int | None = None  # of the prompt, as the engine found it; None: this request has got nothing
    taken: int = 0  # output tokens that it has got
    paid: int | None = None  # of an heir: output tokens that owners before it pay for; None: not even the prompt
    unseen: int = 0  # of an owner that has left: output tokens it did not take, but others did or may find stored
    waived: bool = False  # nothing is charged for what it has got

    def charged(self, output_tokens: int) -> int:
        """Of as many that reached the client of an owner."""
        return max(0, output_tokens - (self.paid or 0)) + self.unseen


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """Where an answer came from. `shared`: another request in progress computes it. `bypass`: never looked up."""

    state: Literal["hit", "similar", "shared", "miss", "bypass"]
    tier: str = ""  # of a hit
    age: float = 0.0  # of a stored answer, seconds
    score: float = 0.0  # cosine between similar prompts
    share: Share | None = None  # in the computation, of a miss or a shared one

    @property
    def computed(self) -> bool:
        """Whether the engine worked for this request."""
        return self.state in ("miss", "bypass")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter by its content. A name may mean another one at any time, a digest never does."""

    digest: str  # of its weights and its configuration
    folder: str  # where an engine reads it


Waits = Literal["always", "begun", "never"]  # begun: once it has output, which may have been sent


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence for an engine. Text, choices and stop strings have been dealt with before."""

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    seed: int = 0  # decided by whoever builds the request, so that any engine continues the same stream
    # Tokens that another engine has emitted for this request. They count as its output wherever output is counted
    # (penalties, limits, sampling positions, usage) and do not come again in chunks.
    output: Sequence[int] = ()
    adapter: Adapter | None = None  # that the model computes with; None: the model as it is
    prediction: Sequence[int] = ()  # tokens that its output is expected to repeat; only its speed depends on them
    second_text: int = 0  # position where the second of two texts begins that a cross-encoder compares; 0: there is one
    resumed: bool = False  # another engine has accepted it before: it must not be refused for want of capacity
    priority: int = 0  # of a tenant's requests in a class lower runs first; beyond ±100 all are alike
    cache_salt: str = ""  # prefixes are shared only between equal salts
    prefix_scope: str = ""  # and only within a scope: a tenant, unless tenants share
    common_tokens: int = 0  # of the prompt's beginning that all scopes share
    objective: Objective = Objective()
    deadline: float | None = None  # seconds after arrival from which on an answer is of no use: the work stops
    session: str = ""  # requests of one session find more in the prefix cache if they meet on one replica
    tenant: str = ""  # who pays; tenants share the engine by weight
    weight: float = 1.0  # of the tenant
    waits: Waits = "always"  # for a replica where none can take it; otherwise another model answers
    cache: CacheControl | None = None  # for a result cache on the way; engines never see it


def choice_seed(seed: int | None, choice: int) -> int:
    """63 bits. Choices of one request differ; the same seed and choice always give the same stream."""
    if seed is None:
        return random.getrandbits(63)
    mask = 2**64 - 1
    mixed = (seed + (choice + 1) * 0x9E3779B97F4A7C15) & mask  # splitmix64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) >> 1


class TokenLogprob(NamedTuple):
    """Log-probability of one token under the unmodified model, with the most probable alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Chunk:
    """What one engine step produced for one request. The last chunk of a request has a finish reason."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # with the first chunk, when asked for
    vector: bytes | None = None  # float32, little endian: the embedding or the scores of a prompt, by a model for these
    cached_tokens: int = 0  # prompt tokens not computed because their KV was there; with the first chunk
    queue_seconds: float = 0.0  # from arrival at the engine to the first step; with the first chunk
    error: Failure | None = None  # with finish_reason "error", "deadline" or "abort": the request failed
    ledger: Ledger | None = None  # with the last chunk
    cache: CacheStatus | None = None  # with the first chunk, when a result cache stands before the engine
    replica: str = ""  # with the first chunk, when a fleet stands before the engine: which of its replicas

    def raise_failure(self) -> None:
        """For readers who want a failed request as an exception. Engines give it as a chunk, with its ledger."""
        if self.error is not None:
            raise self.error.exception()


def failed(request_id: str, reason: FinishReason, error: PenstockError, ledger: Ledger | None) -> Chunk:
    """The last chunk of a request that failed."""
    return Chunk(request_id, finish_reason=reason, error=Failure.of(error), ledger=ledger)
