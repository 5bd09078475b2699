"""Scheduling for encoders: prompts are computed whole, and as many at once as a step holds."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ContextTooLong
from penstock.core.request import Chunk, GenerateRequest, Objective, SamplingParams
from penstock.engine.executor import Step, StepResult, TokenMask
from penstock.engine.limits import SchedulerLimits
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler

WINDOW, STEP_TOKENS, MAX_SEQS = 16, 24, 4


class Recorder:
    """An executor whose vectors are the tokens themselves, and which keeps all its steps."""

    runs_ahead = False
    verifies_drafts = False
    num_blocks = MAX_SEQS
    idle_seconds: float | None = None
    mask_memory: TokenMask | None = None

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def padded_tokens(self, tokens: int) -> int:
        return tokens

    def launch(self, step: Step) -> Step:
        return step

    def resample(self, step: Step, masks: Mapping[int, TokenMask]) -> list[int]:
        raise AssertionError("nothing is sampled")

    def constrain(self, step: Step, masks: TokenMask) -> None:
        raise AssertionError("nothing is sampled")

    def collect(self, step: Step) -> StepResult:
        self.steps.append(step)
        vectors, begin = {}, 0
        for index, count in enumerate(step.counts):
            vectors[index] = bytes(step.tokens[begin : begin + count])
            begin += count
        return StepResult([[] for _ in step.rows], vectors=vectors)


def run(prompts: list[list[int]], objectives: list[Objective] | None = None) -> tuple[dict[str, Chunk], list[Step]]:
    limits = SchedulerLimits(
        num_blocks=MAX_SEQS,
        block_size=WINDOW,
        max_seqs=MAX_SEQS,
        max_step_tokens=STEP_TOKENS,
        max_model_len=WINDOW,
        vocab_size=256,
        prefix_caching=False,
        pools=True,
        whole_prompts=True,
    )
    recorder, chunks = Recorder(), dict[str, Chunk]()
    scheduler = Scheduler(limits)
    loop = EngineLoop(scheduler, recorder, lambda new: chunks.update({chunk.request_id: chunk for chunk in new}))
    for number, prompt in enumerate(prompts):
        objective = objectives[number] if objectives else Objective()
        loop.submit(GenerateRequest(str(number), prompt, SamplingParams(max_tokens=0), objective=objective))
    while loop.step():
        scheduler.check_integrity()
    return chunks, recorder.steps


@given(st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=WINDOW), min_size=1, max_size=20))
def test_every_prompt_is_computed_once_whole_and_within_the_budget(prompts: list[list[int]]) -> None:
    chunks, steps = run(prompts)
    assert [chunks[str(number)].vector for number in range(len(prompts))] == [bytes(prompt) for prompt in prompts]
    assert all(chunk.finish_reason == "length" for chunk in chunks.values())
    assert sum(len(step.rows) for step in steps) == len(prompts)
    for step in steps:
        assert set(step.starts) == {0}
        assert set(step.samples) == {0}
        assert len(step.tokens) <= STEP_TOKENS
        assert len(step.rows) <= MAX_SEQS


def test_a_class_with_an_objective_goes_first() -> None:
    batch, urgent = Objective("batch", rank=2), Objective("interactive", ttft=1.0)
    prompts = [[number] * WINDOW for number in range(6)]
    _, steps = run(prompts, [batch, batch, batch, batch, batch, urgent])
    assert steps[0].tokens[0] == 5


def test_a_prompt_may_fill_the_window_and_no_more() -> None:
    run([[1] * WINDOW])
    with pytest.raises(
        ContextTooLong, match=r"is 16 tokens\. However, there are 17 tokens in the prompt; shorten the prompt$"
    ):
        run([[1] * (WINDOW + 1)])
