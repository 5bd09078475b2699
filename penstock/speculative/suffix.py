"""Drafts without a model: an output often repeats what stands before it, or what was answered before.

The last tokens of a sequence are looked up among all earlier ones, and the draft is what followed them there. Once
found, a place is followed token by token for as long as the output goes on as the text does there: each token that
comes tests one guess, drafted or not, so how often guesses are right is known without drafting any.

A sequence is only compared with its own prompt and output, with what its client predicts, and with recent answers that
the same tenant got in the same prefix scope, with the same salt and adapter: how fast tokens come must not tell one
tenant what another one has read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from penstock.engine.sequence import Sequence
from penstock.speculative.acceptance import Acceptance

_RUN = 2  # tokens by which a place is looked up
_PLACES = 4  # the latest ones of a run that are compared
_LENGTHS = (1, 3, 4, 6, 10, 18)  # of matches: guesses after longer ones are right more often, and are counted apart
_TRUSTED = 6  # tokens of a match that is followed on after one token that differs
_MOST_COMPARED = 32  # tokens of a match that are counted
_MOST_INDEXED = 8192  # tokens of one sequence, the latest when it was first seen, and of what is predicted for it
_INDEXED_AT_ONCE = 1024  # tokens in one step: less than a millisecond
_TESTED_AT_ONCE = 16  # of tokens that have come since it was last asked: the latest
_ANSWERS = 2048  # tokens of answers of one scope, twice: the older half goes when the newer one is full
_SCOPES = 32  # that are remembered, those used last
# Share of guesses that are right, before any was tested: few, for waiting for a few tests costs nothing.
_PRIOR, _PRIOR_GUESSES = 0.3, 2.0
_MEMORY, _MEMORY_OF_LENGTH = 32.0, 16.0  # guesses


class Index:
    """Where runs of tokens were seen in a text that grows at its end."""

    __slots__ = ("_before", "_first", "_places", "end", "tokens")

    def __init__(self, tokens: list[int], first: int = 0) -> None:
        """Of the tokens from `first` on."""
        self.tokens = tokens
        self.end = first + _RUN - 1  # of the tokens that are indexed
        self._first = self.end + 1
        self._places: dict[int, int] = {}  # by run: where the token after it stands, the last time
        self._before: list[int] = []  # for each place: the one before it of the same run; 0: there is none

    def extend(self, end: int) -> None:
        """Index the tokens before `end`."""
        tokens, places, before = self.tokens, self._places, self._before
        for at in range(self.end + 1, end + 1):
            run = tokens[at - 2] << 32 | tokens[at - 1]
            before.append(places.get(run, 0))
            places[run] = at
        self.end = max(self.end, end)

    def match(self, text: list[int], end: int) -> tuple[int, int]:
        """Where the text that ends before `end` would go on here, and how many of its last tokens agree; 0: nowhere."""
        at = self._places.get(text[end - 2] << 32 | text[end - 1], 0)
        best = longest = 0
        for _ in range(_PLACES):
            if not at:
                break
            if (length := agreeing(self.tokens, at, text, end)) > longest:
                best, longest = at, length
            at = self._before[at - self._first]
        return best, longest


def agreeing(a: list[int], a_end: int, b: list[int], b_end: int) -> int:
    """How many tokens before these ends are the same, of which a run is."""
    most = min(a_end, b_end, _MOST_COMPARED)
    for length in range(_RUN, most):
        if a[a_end - 1 - length] != b[b_end - 1 - length]:
            return length
    return most


class _Answers:
    """Recent answers of one scope, in two halves."""

    __slots__ = ("newer", "older")

    def __init__(self) -> None:
        self.newer, self.older = Index([]), Index([])

    def add(self, answer: list[int]) -> None:
        if len(self.newer.tokens) + len(answer) > _ANSWERS:
            self.older, self.newer = self.newer, Index([])
        self.newer.tokens += answer[:_ANSWERS]

    def read(self) -> None:
        """Index what has been added, once somebody asks: many answers are gone by then."""
        for index in (self.newer, self.older):
            index.extend(min(len(index.tokens) - 1, index.end + _INDEXED_AT_ONCE))  # a token must follow


class _Reader:
    """One sequence: what is indexed of it, and the place that it seems to repeat."""

    __slots__ = (
        "_acceptance",
        "_answers",
        "_at",
        "_by_length",
        "_index",
        "_length",
        "_predicted",
        "_prompt_len",
        "_source",
    )

    def __init__(self, tokens: list[int], prompt_len: int, answers: _Answers, predicted: list[int]) -> None:
        self._index = Index(tokens, max(0, len(tokens) - _MOST_INDEXED))
        self._prompt_len = prompt_len  # how a prompt goes on says nothing about the output
        self._answers = answers
        self._predicted = Index(predicted)
        self._acceptance = Acceptance(_MEMORY)
        self._by_length = [Acceptance(_MEMORY_OF_LENGTH) for _ in range(len(_LENGTHS) + 1)]
        self._source: list[int] | None = None  # the text that it repeats
        self._at = 0  # where the guess of its next token stands there
        self._length = 0  # of the match before it

    def read(self) -> bool:
        """Take in tokens that have come, and test the guesses of them. False: there are still more."""
        self._answers.read()
        index = self._index
        tokens = index.tokens
        tested_from = max(len(tokens) - _TESTED_AT_ONCE, min(len(tokens) - 1, self._prompt_len))
        if index.end < tested_from:
            index.extend(min(tested_from, index.end + _INDEXED_AT_ONCE))
            self._source = None
        predicted = self._predicted
        if predicted.end < len(predicted.tokens) - 1:
            predicted.extend(min(len(predicted.tokens) - 1, predicted.end + _INDEXED_AT_ONCE))
        if index.end < tested_from:
            return False
        for end in range(index.end + 1, len(tokens) + 1):
            if self._source is not None:
                self._test(self._source, end)
            if self._source is None or not self._length:
                self._find(end)  # before it is indexed: it must not be found itself
            index.extend(end)
        return True

    def _test(self, source: list[int], end: int) -> None:
        """Whether the guess of the token before `end` was right, and what the next guess is then."""
        tokens, kind = self._index.tokens, self._kind
        token = tokens[end - 1]
        right = source[self._at] == token
        self._acceptance.add(right)
        self._by_length[kind].add(right)
        self._at += 1
        if right:
            self._length += 1
        elif self._length >= _TRUSTED:  # an edited copy: one token was replaced, or left out
            self._at += self._at < len(source) and source[self._at] == token
            self._length = 0
        else:
            self._source = None
        if self._at >= (end if source is tokens else len(source)):
            self._source = None

    def _find(self, end: int) -> None:
        """The place whose text before it agrees most with the tokens before `end`."""
        tokens = self._index.tokens
        if self._source is None:
            self._length = 0
        for index in (self._index, self._predicted, self._answers.newer, self._answers.older):
            at, length = index.match(tokens, end)
            if length > self._length:
                self._at, self._length, self._source = at, length, index.tokens

    @property
    def _kind(self) -> int:
        length = self._length
        return sum(length >= limit for limit in _LENGTHS)

    @property
    def outlook(self) -> float:
        if self._source is None:
            return 0.0
        usual = self._acceptance.rate(_PRIOR, _PRIOR_GUESSES)
        return self._by_length[self._kind].rate(usual, _PRIOR_GUESSES)

    def draft(self, depth: int) -> list[int]:
        """What follows in the text that it repeats. Where that is its own end, the repetition goes on and on."""
        if self._source is None:
            return []
        draft = self._source[self._at : self._at + depth]
        if self._source is self._index.tokens:
            while len(draft) < depth:
                draft += draft[: depth - len(draft)]
        return draft


class SuffixDrafter:
    def __init__(self) -> None:
        self._readers: dict[Sequence, _Reader] = {}
        self._scopes: OrderedDict[Hashable, _Answers] = OrderedDict()  # least recently used first

    def outlook(self, sequence: Sequence) -> float:
        reader = self._readers.get(sequence)
        if reader is None:
            answers, predicted = self._answers_of(sequence), _predicted(sequence)
            reader = _Reader(sequence.tokens, sequence.prompt_len, answers, predicted)
            self._readers[sequence] = reader
        return reader.outlook if reader.read() else 0.0

    def behind(self, sequence: Sequence) -> float | None:
        return None

    def catch_up(self, sequence: Sequence, decodes: list[Sequence], seconds: float) -> bool:
        return True

    def seconds(self, sequences: int) -> float:
        return 0.0  # some microseconds for each sequence and step, whatever is drafted

    def propose(self, sequences: list[Sequence], depths: list[int]) -> list[list[int]]:
        return [self._readers[s].draft(depth) for s, depth in zip(sequences, depths, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        """Its answer is remembered for others of its scope."""
        if self._readers.pop(sequence, None) is not None:
            self._answers_of(sequence).add(sequence.tokens[sequence.prompt_len :])

    def _answers_of(self, sequence: Sequence) -> _Answers:
        request = sequence.request
        adapter = request.adapter.digest if request.adapter is not None else None
        scope = request.tenant, request.prefix_scope, request.cache_salt, adapter
        answers = self._scopes.pop(scope, None) or _Answers()
        self._scopes[scope] = answers
        if len(self._scopes) > _SCOPES:
            self._scopes.popitem(last=False)
        return answers


def _predicted(sequence: Sequence) -> list[int]:
    """What its client expects it to write, behind the end of the prompt, which leads there."""
    request = sequence.request
    if not request.prediction:
        return []
    return [*sequence.tokens[: sequence.prompt_len][-_MOST_COMPARED:], *request.prediction[:_MOST_INDEXED]]
