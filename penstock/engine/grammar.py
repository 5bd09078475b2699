"""Grammars as the engine sees them: which tokens an output may go on with, and which it must go on with.

The library that knows stands behind `Grammars`; `Constraint` is what a sequence keeps of it. Tokens that the grammar
forces are appended at once, without sampling them (jump-forward): the next step computes them as a chunk, like a piece
of a prompt. Where a step that samples for the sequence is under way already, its sample is void: it may only sample the
first forced token, so that the device counts it, and the result is ignored.

Where a mask costs more than it is worth, a sequence samples without one (opportunistic masking), and its matcher takes
or refuses the token afterwards: `Constraint.samples_unmasked`, `refused`. What comes out is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.request import GenerateRequest, Grammar, SamplingParams
from penstock.engine.executor import NOT_A_NUMBER, UNDECIDED, StepResult, TokenMask

if TYPE_CHECKING:
    from penstock.engine.planned_step import PlannedStep
    from penstock.engine.sequence import Sequence as EngineSequence


# A token that is sampled without a mask saves that mask if it stands. If it is refused, it was sampled for nothing, and
# where steps run ahead the sequence was in two steps for nothing: its share of them in a batch of dozens. So masks must
# take as many seconds, and more if not all tokens stand, which is known of the last ones; where too few do, it is tried
# again after some tens of tokens. Where steps run one by one and nothing but a refusal costs anything, no mask is
# computed that need not be.
_PRICE, _PRICE_AHEAD = 50e-6, 200e-6
_KEPT_SHARE, _RECOVERY = 1 / 8, 1 / 256


class Matcher(Protocol):
    """Where one output is in its grammar. Used by one thread at a time."""

    @property
    def ended(self) -> bool:
        """Whether the output is complete and nothing may follow but an end token."""
        ...

    @property
    def error(self) -> str:
        """Why the output cannot go on; empty while it can."""
        ...

    @property
    def mask_seconds(self) -> float:
        """What a mask of its grammar takes, as others have of late."""
        ...

    def take_forced(self) -> list[int]:
        """The output goes on with the tokens that must follow, as the tokenizer would split their text. Returns them.
        The last ones may be left out: those whose split depends on what comes after them."""
        ...

    def follow(self, token: int, /) -> list[int]:
        """The output goes on with this token and those that it forces, which are returned. Raises InvalidRequest for a
        token that the grammar does not allow here."""
        ...

    def take(self, token: int, /) -> list[int] | None:
        """The same for a token that may be refused: None, and the output stays where it is, or cannot go on at all,
        which its mask tells. An end token that is to be ignored is always refused: only a mask tells whether it is all
        that may come."""
        ...

    def copy(self) -> Matcher:
        """At the same place, to go on from there by itself."""
        ...


class Grammars(Protocol):
    """Compiled grammars of one model, shared by its requests. May be used from several threads."""

    pausing: Callable[[], AbstractContextManager[None]]  # entered where a library holds the GIL for long

    def prepare(self) -> None:
        """Do now, while nobody waits, what the first grammar would have to wait for. Raises nothing: if it fails, so
        will the grammars."""
        ...

    def is_compiled(self, grammar: Grammar, /) -> bool:
        """Whether `matcher` is fast for this grammar."""
        ...

    def compile(self, grammar: Grammar, /) -> None:
        """Make `matcher` fast for this grammar. Raises InvalidRequest for one that cannot be compiled."""
        ...

    def matcher(self, grammar: Grammar, ignored: Collection[int] = (), /) -> Matcher:
        """At the beginning of an output. The end tokens in `ignored` may come only where nothing else may."""
        ...

    def fill(self, matchers: Mapping[int, Matcher], masks: TokenMask, /) -> list[int]:
        """Write what may follow for each into its row of `masks`. Returns the rows of those that cannot go on."""
        ...


@dataclass(slots=True, eq=False)
class Constraint:
    """The grammar of one sequence."""

    matcher: Matcher
    races: bool = False  # whether its tokens may be sampled without a mask: `Step.checked`
    truncates: bool = False  # then some of them are undecided
    refused: bool = False  # its last sample was: the next one has a mask
    kept: float = 1.0  # share of the tokens sampled without a mask that were not refused, of late
    jumps: bool = True  # False: forced tokens are sampled one by one, because their logits are asked for
    ahead: list[int] = field(default_factory=list)  # forced tokens that the matcher has and the sequence has not yet
    unsent: list[int] = field(default_factory=list)  # forced before the first sampled token, which is sent with them
    uncounted: list[int] = field(default_factory=list)  # appended, and the sequence's row does not know of them yet
    void: int = 0  # samples of launched steps that are to be ignored
    void_token: int = 0  # which these may sample
    jumped: int = 0  # tokens that were appended without sampling them

    def follow(self, tokens: Iterable[int]) -> None:
        """These were sampled, or came with the request."""
        self.refused = False
        for token in tokens:
            if not self.ahead:
                self.ahead = self.matcher.follow(token)
            elif self.ahead[0] == token:
                del self.ahead[0]
            else:
                raise InvalidRequest("output does not match the grammar", param="output")

    def samples_unmasked(self, runs_ahead: bool) -> bool:
        """Whether its next sample is to be a checked one."""
        price, seconds = _PRICE_AHEAD if runs_ahead else _PRICE if self.truncates else 0.0, self.matcher.mask_seconds
        if seconds < price or not self.races or self.refused or self.only is not None:
            return False
        if self.kept * seconds >= (1 - self.kept) * price:
            return True
        self.kept += _RECOVERY * (1 - self.kept)
        return False

    def sampled_unmasked(self, token: int) -> bool:
        """Whether this token, sampled without a mask, stands. If so, it is expected by `follow` next."""
        forced = None if token == UNDECIDED else self.matcher.take(token)
        self.kept += _KEPT_SHARE * ((forced is not None) - self.kept)
        if forced is None:
            return False
        self.ahead = [token, *forced]
        return True

    def jump(self, most: int) -> list[int]:
        """Forced tokens to append now, at most so many."""
        taken, self.ahead = (self.ahead[:most], self.ahead[most:]) if self.jumps else ([], self.ahead)
        self.jumped += len(taken)
        return taken

    @property
    def ended(self) -> bool:
        return not self.ahead and self.matcher.ended

    @property
    def only(self) -> int | None:
        """The one token that the next sample may be; None: the matcher says which."""
        if self.void:
            return self.void_token
        return self.ahead[0] if self.ahead else None


def constraint_of(request: GenerateRequest, matcher: Matcher, stop_ids: Container[int], max_len: int) -> Constraint:
    """Of a request that arrives, with what is forced before its first sample. One token at least is sampled."""
    params = request.params
    scores = params.logprobs is not None or params.prompt_logprobs is not None
    found = Constraint(
        matcher,
        races=not scores and _races(params),
        truncates=not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0),
        jumps=not scores,
        ahead=matcher.take_forced(),
    )
    found.follow(request.output)
    room = max_len - len(request.prompt) - len(request.output) - 1
    stop = next((at for at, token in enumerate(found.ahead) if token in stop_ids), room)
    found.unsent = found.jump(max(0, min(room, stop, len(found.ahead) - matcher.ended)))
    return found


def _races(params: SamplingParams) -> bool:
    """The best token wins, with noise (Gumbel-max) or without, whatever the others are. What changes logits is left out
    because it would change them twice."""
    penalises = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    return not (penalises or params.logit_bias or params.min_tokens)


def follow(sequence: EngineSequence, constraint: Constraint, sampled: list[int]) -> bool:
    """Append what the grammar forces after sampled tokens, the last ones of the sequence, to both lists. Returns
    whether the output is complete."""
    constraint.follow(sampled)
    if not constraint.ahead:
        return constraint.matcher.ended
    if forced := constraint.jump(sequence.max_len - len(sequence.tokens)):
        sequence.tokens += forced
        sampled += forced
        if sequence.pending:
            constraint.void, constraint.void_token = sequence.pending, forced[0]
            sequence.pending = 0
        if sequence.row >= 0:
            constraint.uncounted += forced[constraint.void :]
    return constraint.ended


def allowed_draft(constraint: Constraint, draft: list[int]) -> list[int]:
    """The beginning of a draft that the grammar allows. It ends with a token after which others are forced, for those
    need no draft, and before one that completes the output."""
    if constraint.ahead or constraint.void:
        return []
    matcher = constraint.matcher.copy()
    for length, token in enumerate(draft):
        if (forced := matcher.take(token)) is None:
            return draft[:length]
        if forced:
            return draft[: length + 1]
        if matcher.ended:
            return draft[:length]
    return draft


def refused(planned: PlannedStep, result: StepResult) -> dict[int, EngineSequence]:
    """Of the checked sequences of a step, by index, those whose grammars refuse what they sampled, or have to decide
    it. The others have taken it."""
    found: dict[int, EngineSequence] = {}
    for index in planned.step.checked:
        sequence, [token] = planned.sequences[index], result.tokens[index]
        constraint = sequence.constraint
        if sequence.finished is not None or constraint is None or constraint.void or token == NOT_A_NUMBER:
            continue
        if not constraint.sampled_unmasked(token):
            found[index] = sequence
    return found


class Masks:
    """Which tokens the constrained sequences of a launched step may sample. Every step overwrites the one before."""

    def __init__(self, grammars: Grammars, memory: TokenMask) -> None:
        """`memory`: [rows, words], where the masks of most steps fit."""
        self._grammars = grammars
        self._memory = memory

    def of(self, planned: PlannedStep) -> tuple[TokenMask, list[tuple[str, PenstockError]]]:
        """A row for each sample; and the requests that cannot go on, with the reason."""
        step, at = planned.step, 0
        rows = self._rows(sum(step.samples[index] for index in step.constrained))
        asked: dict[int, EngineSequence] = {}  # by row
        for index in step.constrained:
            sequence, end = planned.sequences[index], at + step.samples[index]
            constraint = sequence.constraint
            if sequence.finished is not None or constraint is None:
                rows[at:end] = -1  # any
            elif (draft := planned.drafts.get(index)) is not None:
                self._fill_along(constraint.matcher.copy(), draft, rows[at:end])
            elif (only := constraint.only) is not None:
                _allow_only(only, rows[at])
            else:
                asked[at] = sequence
            at = end
        return rows, self._fill(asked, rows)

    def of_refused(
        self, refused: dict[int, EngineSequence]
    ) -> tuple[dict[int, TokenMask], list[tuple[str, PenstockError]]]:
        """The same for what `refused` has found, by index."""
        rows = self._rows(len(refused))
        return dict(zip(refused, rows, strict=True)), self._fill(dict(enumerate(refused.values())), rows)

    def _rows(self, count: int) -> TokenMask:
        fits = count <= len(self._memory)
        return self._memory[:count] if fits else np.empty((count, self._memory.shape[1]), np.int32)

    def _fill(self, asked: dict[int, EngineSequence], masks: TokenMask) -> list[tuple[str, PenstockError]]:
        """`asked`: by row of the masks. Returns who cannot go on."""
        matchers = {row: own.constraint.matcher for row, own in asked.items() if own.constraint is not None}
        failures: list[tuple[str, PenstockError]] = []
        for row in self._grammars.fill(matchers, masks) if matchers else ():
            request, problem = asked[row].request, matchers[row].error
            param = request.params.grammar.param if request.params.grammar is not None else None
            failures.append((request.id, InvalidRequest(f"the output cannot go on: {problem}", param=param)))
        return failures

    def _fill_along(self, matcher: Matcher, draft: list[int], masks: TokenMask) -> None:
        """What may stand at the place of each token of the draft, and behind it."""
        forced: list[int] = []  # after the last of them, if at all: see `allowed_draft`
        for at, token in enumerate(draft):
            self._grammars.fill({at: matcher}, masks)
            forced = matcher.follow(token)
        if forced:
            _allow_only(forced[0], masks[-1])
        else:
            self._grammars.fill({len(draft): matcher}, masks)


def _allow_only(token: int, mask: TokenMask) -> None:
    mask[:] = 0
    mask.view(np.uint32)[token // 32] = 1 << token % 32
