"""The readings of several engines as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from operator import is_not

from penstock.core.engine import EngineInfo, EngineStats

_LARGEST = (
    "seconds_since_step",
    "step_time_error",
    "decode_step_seconds",
    "loaded_step_seconds",
    "usual_prompt_seconds",
)
_MEANS = ("fixed_step_seconds", "stream_step_seconds", "context_token_seconds")
_GAUGES = (
    *("running", "waiting", "kv_blocks", "kv_blocks_used", "kv_slots", "kv_slots_empty"),
    *("prefill_tokens", "prefill_tokens_per_second"),
    *_LARGEST,
    *_MEANS,
)


def combined(readings: Sequence[EngineStats]) -> EngineStats:
    """What is counted adds up. Speeds are those of the slowest, since a request runs on one engine alone; what a step
    consists of is the mean, by which the capacity of all is counted."""
    known = [stats for stats in readings if stats.prefill_tokens_per_second]
    values = {
        field.name: sum(getattr(stats, field.name) for stats in readings)
        for field in fields(EngineStats)
        if field.name not in (*_LARGEST, *_MEANS)
    }
    values["prefill_tokens_per_second"] = min((stats.prefill_tokens_per_second for stats in known), default=0.0)
    for name in _LARGEST:
        values[name] = max(getattr(stats, name) for stats in readings)
    for name in _MEANS:
        values[name] = sum(getattr(stats, name) for stats in known) / len(known) if known else 0.0
    return EngineStats(**values)


def counters(stats: EngineStats) -> EngineStats:
    """What stays of an engine that has gone: counters must not shrink."""
    return replace(stats, **dict.fromkeys(_GAUGES, 0))


def combined_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """The longest context of any replica, since long requests go where they fit. While replicas have different weights,
    as during a replacement, the revision names all of them: answers of one are not stored for another."""
    return replace(
        infos[-1],
        max_model_len=max(info.max_model_len for info in infos),
        revision="+".join(sorted({info.revision for info in infos})),
    )


class Readings:
    """Of the replicas of a model as one, also of those that have gone."""

    def __init__(self) -> None:
        self._read: list[EngineStats] = []  # the latest, and what they come to
        self._combined = EngineStats()
        self._retired = EngineStats()  # counters of instances that have gone

    def of(self, read: list[EngineStats]) -> EngineStats:
        """Asked for with every request, and changed by heartbeats only."""
        if len(read) != len(self._read) or any(map(is_not, read, self._read)):
            self._read, self._combined = read, combined([self._retired, *read])
        return self._combined

    def retire(self, stats: EngineStats) -> None:
        """Nothing more is read of that instance."""
        self._retired = combined([self._retired, counters(stats)])
        self._read, self._combined = [], self._retired
