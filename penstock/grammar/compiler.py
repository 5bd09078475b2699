"""Grammars compiled by llguidance: once each, within limits, and shared by all requests that ask for the same.

Nobody has to trust a grammar that comes with a request. Its source is short, it is tried in a process of its own first
(`trial.py`), and llguidance has limits (`limits.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.checkpoint.source import resolve
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.machine import usable_cpus
from penstock.core.request import Grammar
from penstock.engine.limits import SchedulerLimits
from penstock.grammar.limits import new_matcher, on_deep_stack
from penstock.grammar.matcher import LLGuidanceMatcher, MaskTimes, one_line
from penstock.grammar.sources import llguidance_source
from penstock.grammar.trial import Trials
from penstock.grammar.vocabulary import UnreadableTokenizer, Vocabulary, read_vocabulary, without
from penstock.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

# Slow masks are computed on several threads where together they are worth waking them, and a grammar that has some gets
# further prototypes where compiling one is short: requests that arrive wait for it.
MOST_THREADS, WAKING_SECONDS = 8, 1e-3
SLOW_SECONDS, SHORT_SECONDS = 200e-6, 5e-3
FAST_SECONDS = 50e-6  # masks of a grammar that take less are not timed until one has taken longer
MAX_COMPILED = 128
MAX_COMPILED_BYTES = 4 * 2**20  # of their sources, to which what is built is about proportional


class _Refused(Exception):
    """Why a grammar cannot be enforced, to be read behind the name of its field."""


@dataclass(slots=True)
class _Compiled:
    """A grammar. Copies of one prototype take turns, for they share a lexer, so a grammar whose masks take long has
    several of them."""

    source: str  # as llguidance reads it
    prototypes: list[Any]  # llguidance.LLMatcher, at the beginning of an output
    seconds: float  # that compiling took
    times: MaskTimes = field(default_factory=MaskTimes)
    copies: int = 0  # that were made


class LLGuidance:
    """The grammars of one model."""

    def __init__(
        self, load: Callable[[], Tokenizer], vocab_size: int, eos_ids: Collection[int], trials: Trials | None = None
    ) -> None:
        """`eos_ids` may name tokens that the model does not have. Without `trials` whoever asks is trusted not to ask
        for what takes forever."""
        self.pausing: Callable[[], AbstractContextManager[None]] = nullcontext
        self._load = load
        self._vocab_size = vocab_size
        self._eos_ids = sorted(token for token in eos_ids if token < vocab_size)
        self._trials = trials
        self._lock = threading.Lock()  # of what is compiled and being compiled; never held while compiling
        self._loading = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._unreadable = ""  # why there will never be one
        self._warned = False
        self._compiled: OrderedDict[tuple[str, str], _Compiled] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._compiling: dict[tuple[str, str], Future[_Compiled]] = {}
        self._threads = min(MOST_THREADS, usable_cpus())  # for slow masks
        self._executor: Any = None  # llguidance.LLExecutor, once there are some

    def prepare(self) -> None:
        """Read the vocabulary. llguidance holds the GIL for half a second, or longer: running streams would stall."""
        try:
            self._ready()
            if self._trials is not None:
                self._trials.start()
        except (ImportError, OSError, PenstockError):
            pass  # a grammar that needs it will say so
        except BaseException as error:  # what llguidance raises may be no Exception; whoever prepares must go on
            if not self._warned:
                self._warned = True
                log.warning(
                    "structured output is not available with this model: %s. Requests with a grammar (response_format, "
                    "structured_outputs, tools that must be called) are refused; all others are answered as usual.",
                    error,
                )

    def is_compiled(self, grammar: Grammar) -> bool:
        return (grammar.kind, grammar.source) in self._compiled

    def compile(self, grammar: Grammar) -> None:
        self._compiled_of(grammar)

    def matcher(self, grammar: Grammar, ignored: Collection[int] = ()) -> LLGuidanceMatcher:
        last_resort = [token for token in self._eos_ids if token in ignored]
        compiled = self._compiled_of(grammar)
        prototypes = compiled.prototypes
        is_slow = compiled.times.mean > SLOW_SECONDS and compiled.seconds < SHORT_SECONDS
        if is_slow and len(prototypes) < self._threads:
            prototypes.append(on_deep_stack(partial(new_matcher, self._ready().tokens, compiled.source)))
            compiled.times.at_once = len(prototypes)
        compiled.copies += 1
        state = prototypes[compiled.copies % len(prototypes)].deep_copy()
        return LLGuidanceMatcher(state, grammar.after, self._eos_ids, grammar.param, last_resort, compiled.times)

    def fill(self, matchers: Mapping[int, Any], masks: npt.NDArray[np.int32]) -> list[int]:
        """Slow ones on several threads, all others one by one: 32 of these take 0.15 to 0.45 ms, and 0.4 to 1.3 ms on
        four to sixteen threads."""
        vocabulary = self._ready()
        slow = {row: own for row, own in matchers.items() if own.times.mean > SLOW_SECONDS and not own.free}
        if len(slow) > 1 and sum(own.times.mean for own in slow.values()) > WAKING_SECONDS:
            self._fill_in_parallel(slow, masks)
        else:
            slow = {}
        failed: list[int] = []
        address, size = masks.ctypes.data, masks.strides[0]
        began = time.perf_counter()
        for row, matcher in matchers.items():
            if matcher.free:
                masks[row] = vocabulary.free
                continue
            state = matcher.state
            if row not in slow:
                state.unsafe_compute_mask_ptr(address + row * size, size)
                ended = time.perf_counter()
                if ended - began > FAST_SECONDS or matcher.times.mean:
                    matcher.times.observe(ended - began)
                began = ended
            if state.is_error():
                failed.append(row)
            elif matcher.last_resort and (left := without(matcher.last_resort, masks[row])).any():
                masks[row] = left
        return failed

    def _fill_in_parallel(self, matchers: Mapping[int, LLGuidanceMatcher], masks: npt.NDArray[np.int32]) -> None:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._threads)
        work = [(matcher.state, row) for row, matcher in matchers.items()]
        began = time.perf_counter()
        self._executor.unsafe_compute_mask_ptr(work, masks.ctypes.data, masks.strides[0], len(masks))
        seconds = time.perf_counter() - began
        at_once = sum(times.at_once for times in {matcher.times for matcher in matchers.values()})
        for matcher in matchers.values():
            matcher.times.observe(seconds * min(at_once, self._threads, len(work)) / len(work))

    def _compiled_of(self, grammar: Grammar) -> _Compiled:
        """Several that ask for a new grammar at once, as the choices of a request do, have it compiled once, and share
        the error if it is none."""
        key = grammar.kind, grammar.source
        while True:
            with self._lock:
                if (found := self._compiled.get(key)) is not None:
                    self._compiled.move_to_end(key)
                    return found
                compiling = self._compiling.get(key)
                if is_first := compiling is None:
                    compiling = self._compiling[key] = Future()
            if is_first:
                self._compile(grammar, compiling)
            try:
                return compiling.result()
            except _Refused as problem:
                raise InvalidRequest(f"{grammar.param}{problem}", param=grammar.param) from problem
            except CancelledError:  # whoever was compiling it was interrupted
                continue

    def _compile(self, grammar: Grammar, outcome: Future[_Compiled]) -> None:
        key = grammar.kind, grammar.source
        try:
            made = on_deep_stack(partial(self._make, grammar))
            with self._lock:
                self._keep(key, made)
            outcome.set_result(made)
        except _Refused as error:
            outcome.set_exception(error)
        except KeyboardInterrupt:
            outcome.cancel()
            raise
        except BaseException as error:  # a panic of the library is one; a checkpoint without a tokenizer comes here too
            problem = _Refused(f" cannot be compiled here: {error}")
            problem.__cause__ = error
            outcome.set_exception(problem)
        finally:
            with self._lock:
                del self._compiling[key]

    def _keep(self, key: tuple[str, str], made: _Compiled) -> None:
        self._compiled[key] = made
        self._bytes += len(key[1])
        while len(self._compiled) > MAX_COMPILED or self._bytes > MAX_COMPILED_BYTES:
            (_, source), _ = self._compiled.popitem(last=False)
            self._bytes -= len(source)

    def _make(self, grammar: Grammar) -> _Compiled:
        try:
            tokens = self._ready().tokens
            as_taken = llguidance_source if self._trials is None else self._trials.try_out
            source = as_taken(grammar.kind, grammar.source)
        except ImportError:
            raise _Refused(" needs llguidance: pip install 'penstock[serve]'") from None
        except ValueError as error:
            raise _Refused(f": {error}") from None
        began = time.perf_counter()
        matcher = new_matcher(tokens, source)
        seconds = time.perf_counter() - began
        if matcher.is_error():
            raise _Refused(f" cannot be enforced: {one_line(matcher.get_error())}")
        if warnings := matcher.get_grammar_warnings():
            raise _Refused(f" cannot be enforced: {'; '.join(warnings)}")
        try:
            LLGuidanceMatcher(matcher.deep_copy(), (), self._eos_ids, grammar.param).take_forced()
        except InvalidRequest as error:
            raise _Refused(f" cannot be enforced: {error}") from None
        return _Compiled(source, [matcher], seconds)

    def _ready(self) -> Vocabulary:
        with self._loading:
            if self._unreadable:
                raise UnreadableTokenizer(self._unreadable)
            if self._vocabulary is None:
                try:
                    self._vocabulary = read_vocabulary(self._load(), self._vocab_size, self._eos_ids, self.pausing)
                except UnreadableTokenizer as error:
                    self._unreadable = str(error)
                    raise
            return self._vocabulary


def grammars_of(
    limits: SchedulerLimits, model: str, tokenizer: Tokenizer | None = None, trials: Trials | None = None
) -> LLGuidance | None:
    """Of a model that an engine runs; None: it generates no text. Its tokenizer is loaded when the engine is idle, or
    with the first grammar."""
    if limits.pools:
        return None

    def load() -> Tokenizer:
        return tokenizer or load_tokenizer(resolve(model, weights=False))

    return LLGuidance(load, limits.vocab_size, limits.eos_ids, trials)
