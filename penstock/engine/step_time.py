"""How long a step takes, learnt from the engine's own steps.

A step's time is a sum over what it does: a constant (weights are read whatever the batch), its tokens (GEMMs;
cheaper while reading the weights hides them, hence a bend), the keys and values that decoding reads, the pairs of query
and key in prefill attention, and the depth of each chunk, for a short chunk far into a prompt cannot fill a device.
Pure decode steps take another path on a GPU: they have coefficients of their own, and so have those with drafts.
All are fitted to the recent past (`online_fit.py`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.core.machine import cache_folder
from penstock.engine.online_fit import SETTLED, OnlineFit
from penstock.engine.peak import RecentPeak

log = logging.getLogger(__name__)

_BEND = 256  # tokens a step from which on arithmetic, not reading weights, takes the time, more or less
_USUAL_CHUNK = 1024  # tokens of a prompt in one step
_SHORT_PROMPT = 96
USUAL_PROMPT = 1024  # tokens; these three: of the yardsticks
USUAL_BATCH, USUAL_CONTEXT = 32, 512
_SLOWED = 1.7  # how many times longer than otherwise a step may be planned to take beside a long prompt
_MARGINS = (0.2, 0.5)  # share of the time allowed that is kept free at least and at most, as predictions err
_FIRST_MARGIN = 0.25  # at least, until enough steps were observed to know their errors
_HEADROOM = 1.25  # over the worst overrun there was: the next one may be a little worse
_MARGIN_STEPS = (8, 128)  # windows and their size: a late step is remembered for about a thousand
# A step may take this many times what is predicted, and no less than some seconds, before it must hang: a machine that
# swaps or is shared, a kernel compiled late. What was never measured may take minutes: a large model on a slow CPU.
_PATIENCE = 10.0
_LEAST_PATIENCE_SECONDS = 10.0
_PATIENCE_WITH_UNKNOWN_SECONDS = 600.0
# Decode steps without drafts after which the times of those with drafts are no longer believed: if they were learnt
# while the machine was slow, drafts seem not to pay, and nobody would find out that they do.
_STALE_STEPS = 512
_VERSION = 7


Padding = Callable[[int], int]  # tokens of a step with prompts -> tokens that are computed for it


@dataclass(slots=True)
class StepShape:
    decodes: int = 0  # sequences that compute one token
    context: int = 0  # tokens of keys and values that those read
    prefill: int = 0  # tokens of all longer chunks
    pairs: int = 0  # of query and key in those
    depth: int = 0  # where those end, summed
    drafted: int = 0  # tokens that are computed behind those of the decodes

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values are read, if those of each sequence are read once."""
        return self.context + self.depth

    def with_chunk(self, start: int, tokens: int) -> StepShape:
        pairs = tokens * start + tokens * (tokens + 1) // 2
        depth = self.depth + start + tokens
        return StepShape(self.decodes, self.context, self.prefill + tokens, self.pairs + pairs, depth, self.drafted)

    def without_prefill(self) -> StepShape:
        return StepShape(self.decodes, self.context, drafted=self.drafted)

    def features(self, padded: Padding) -> tuple[float, ...]:
        """Of the order of 1 each, so that the fit is well conditioned."""
        tokens = self.decodes + self.drafted
        if not self.prefill:
            return (1.0, tokens * 1e-2, self.context * 1e-5)
        tokens = padded(tokens + self.prefill)
        bent = max(0, tokens - _BEND)
        return (1.0, tokens * 1e-3, bent * 1e-3, self.context * 1e-5, self.pairs * 1e-7, self.depth * 1e-4)


def kept_step_times(*machine_and_model: object, padded: Padding = int) -> StepTimes:
    """What earlier runs learnt with the same model and settings on the same machine; kept for later ones too."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", "-".join(map(str, machine_and_model))).strip("-").lower()
    return StepTimes(cache_folder() / "step_times" / f"{name}.json", padded)


@dataclass(frozen=True, slots=True)
class Yardsticks:
    """How fast this machine is, in seconds: measured once and then kept, so that what is promised in multiples of them
    stays the same from start to start, whatever requests the step-time model has learnt from since."""

    prompt: float  # to the first token of a prompt of 1,024 tokens, alone
    step: float  # of a step that decodes a usual batch


class StepTimes:
    """`path`: where what was learnt is kept between runs."""

    def __init__(self, path: Path | None = None, padded: Padding = int) -> None:
        self._path = path
        self._padded = padded
        self._decode = OnlineFit(3)
        self._drafted = OnlineFit(3)
        self._undrafted = 0  # decode steps since one with drafts
        self._latest_drafted: tuple[tuple[float, ...], float] | None = None  # and its seconds if all had been decodes
        self._mixed = OnlineFit(6)
        self._errors: deque[float] = deque(maxlen=200)
        self._overrun = RecentPeak(*_MARGIN_STEPS)  # seconds that steps took longer than predicted
        self._slowest = RecentPeak(*_MARGIN_STEPS)  # drift of steps with prompts
        self._observed = 0
        self._yardsticks: Yardsticks | None = None
        if path is not None:
            self._load(path)

    @property
    def _fits(self) -> tuple[tuple[str, OnlineFit], ...]:
        return ("decode", self._decode), ("drafted", self._drafted), ("mixed", self._mixed)

    @property
    def ready(self) -> bool:
        return self._decode.ready or self._mixed.ready

    @property
    def measured(self) -> bool:
        """Whether enough was seen to say how fast this machine is, at prompts and at decoding."""
        return self._decode.ready and self._mixed.ready

    def release(self) -> None:
        """For good: who knows how steps are padded, the executor, is not kept any longer."""
        self._padded = int

    def predict(self, shape: StepShape) -> float:
        """Seconds. 0 while nothing is known."""
        if shape.prefill:
            if self._mixed.ready:
                return self._mixed.predict(shape.features(self._padded))
            return self._decode.predict(shape.without_prefill().features(self._padded)) if self._decode.ready else 0.0
        if not shape.decodes:
            return 0.0
        known = self._drafted.ready and self._undrafted < _STALE_STEPS
        x = shape.features(self._padded)
        if shape.drafted and known:
            return self._drafted.predict(x) * self._slower_since_drafts()
        if self._decode.ready:
            return self._decode.predict(x)
        return self.base_seconds(shape) if self._mixed.ready else 0.0

    def patience(self, steps: Iterable[StepShape]) -> float:
        """Seconds after which these steps, one after the other, should have ended by any measure."""
        expected = 0.0
        for shape in steps:
            if not self._fit(shape).ready:
                return _PATIENCE_WITH_UNKNOWN_SECONDS
            expected += self.predict(shape)
        return max(_LEAST_PATIENCE_SECONDS, _PATIENCE * expected)

    def base_seconds(self, shape: StepShape) -> float:
        """What a step with prompts takes without those: reading the weights, and its streams."""
        if self._mixed.ready:
            tokens = shape.decodes + shape.drafted
            return self._mixed.predict((1.0, tokens * 1e-3, 0.0, shape.context * 1e-5, 0.0, 0.0))
        return self.predict(shape.without_prefill())

    def observe(self, shape: StepShape, seconds: float) -> None:
        if seconds <= 0:
            return
        if not shape.prefill:
            self._undrafted = 0 if shape.drafted else self._undrafted + 1
        fit, x = self._fit(shape), shape.features(self._padded)
        if fit is self._drafted:
            fit.drift *= self._slower_since_drafts()
        predicted = fit.observe(x, seconds)
        if fit is self._mixed:
            self._slowest.scale(1 / fit.moved)
        if fit is self._drafted and self._decode.observed > SETTLED:
            self._latest_drafted = x, self._decode.predict(x)
        if predicted is not None:
            error = abs(predicted - seconds) / seconds
            self._errors.append(error)
            self._observed += 1
            if self._observed > SETTLED:
                self._overrun.add(seconds - predicted)
                self._slowest.add(self._mixed.drift)

    def _fit(self, shape: StepShape) -> OnlineFit:
        return self._mixed if shape.prefill else self._drafted if shape.drafted else self._decode

    def _slower_since_drafts(self) -> float:
        """How many times slower the machine is than when a step had drafts: those are as much slower now."""
        if self._latest_drafted is None:
            return 1.0
        x, seconds = self._latest_drafted
        return self._decode.predict(x) / seconds

    def plan_within(self, limit: float) -> float:
        """How long a step may be predicted to take if it has to end within `limit` seconds, as predictions err."""
        if limit == math.inf:
            return limit
        least, most = _MARGINS
        if self._observed < math.prod(_MARGIN_STEPS):
            least = _FIRST_MARGIN
        return limit - min(most * limit, max(least * limit, _HEADROOM * self._overrun.value))

    @property
    def slowdown(self) -> float:
        """How many times slower than now this machine has been lately: it may be so again before a promise is due."""
        return max(1.0, self._slowest.value / self._mixed.drift)

    def pace(self, decodes: StepShape) -> float:
        """How long a step may take beside streams without an ITL objective.

        1.7 times as long as the slowest steps, one in a hundred, take without long prompts: as steps overrun their
        predictions, streams then wait at most twice as long as otherwise. Each stream begins with a prompt; in such a
        step two of a usual batch begin together, and more of a larger one.
        """
        if not self.measured:
            return math.inf
        decodes = decodes.without_prefill()
        tokens = int(_SHORT_PROMPT * (1 + decodes.decodes / USUAL_BATCH))
        return _SLOWED * self.predict(decodes.with_chunk(0, tokens))

    def tokens_within(self, shape: StepShape, start: int, most: int, limit: float) -> int:
        """The largest chunk from `start` on, up to `most`, with which the step still ends within `limit` seconds."""
        if limit == math.inf or not self._mixed.ready or self.predict(shape.with_chunk(start, most)) <= limit:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            if self.predict(shape.with_chunk(start, middle)) <= limit:
                low = middle
            else:
                high = middle
        return low

    def chunk_seconds(self, start: int, tokens: int) -> float:
        """What these tokens of a prompt add to steps under way anyway, in chunks of the usual size."""
        if tokens <= 0 or not self._mixed.ready:
            return 0.0
        _, per_token, beyond_bend, _, per_pair, per_depth = self._mixed.coefficients
        pairs = tokens * start + tokens * (tokens + 1) // 2
        depth = (start + tokens / 2) * max(1.0, tokens / _USUAL_CHUNK)
        gemms = (per_token + beyond_bend) * tokens * 1e-3
        return self._mixed.drift * (gemms + per_pair * pairs * 1e-7 + per_depth * depth * 1e-4)

    @property
    def median_error(self) -> float:
        """Of |predicted - measured| / measured over the latest 200 steps."""
        return statistics.median(self._errors) if self._errors else 0.0

    @property
    def yardsticks(self) -> Yardsticks | None:
        """Those set by a calibration, or else what the model said as soon as it could. None before."""
        if self._yardsticks is None and self.measured:
            prompt = self.predict(StepShape().with_chunk(0, USUAL_PROMPT))
            self._yardsticks = Yardsticks(prompt, self.predict(StepShape(USUAL_BATCH, USUAL_BATCH * USUAL_CONTEXT)))
        return self._yardsticks

    @yardsticks.setter
    def yardsticks(self, measured: Yardsticks | None) -> None:
        self._yardsticks = measured

    @property
    def prefill_tokens_per_second(self) -> float:
        seconds = self.chunk_seconds(0, 1024)
        return 1024 / seconds if seconds else 0.0

    def readings(self, running: StepShape) -> dict[str, Any]:
        """The fields of `EngineStats` that come from here. 0 while nothing is known."""
        alone, batch, deep = (self.base_seconds(StepShape(*shape)) for shape in ((1, 0), (101, 0), (1, 100_000)))
        stream, yardsticks = (batch - alone) / 100, self.yardsticks
        return {
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "decode_step_seconds": self.predict(running if running.decodes else StepShape(1, 256)),
            "fixed_step_seconds": max(0.0, alone - stream),
            "stream_step_seconds": stream,
            "context_token_seconds": (deep - alone) / 100_000,
            "step_time_error": self.median_error,
            "usual_prompt_seconds": 0.0 if yardsticks is None else yardsticks.prompt,
            "loaded_step_seconds": 0.0 if yardsticks is None else yardsticks.step,
        }

    def save(self) -> None:
        if self._path is None or not self.ready:
            return
        fits = {name: fit.state() for name, fit in self._fits}
        yardsticks = None if self.yardsticks is None else asdict(self.yardsticks)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}.tmp")  # two engines may save at once
            temporary.write_text(json.dumps({"version": _VERSION, "yardsticks": yardsticks, **fits}))
            temporary.replace(self._path)
        except OSError as error:
            log.warning("cannot keep step times in %s: %s; the next start learns them again", self._path, error)

    def _load(self, path: Path) -> None:
        try:
            stored = json.loads(path.read_text())
            if stored["version"] != _VERSION:
                return
            for name, fit in self._fits:
                fit.restore(stored[name])
            if (yardsticks := stored["yardsticks"]) is not None:
                self._yardsticks = Yardsticks(float(yardsticks["prompt"]), float(yardsticks["step"]))
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("cannot read step times from %s: %s; they are learnt again", path, error)
