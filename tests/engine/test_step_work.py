"""What steps must read and compute at least."""

from __future__ import annotations

from penstock.engine.executor import Step
from penstock.engine.step_work import Gemm, ModelWork

MODEL = ModelWork({"mlp": Gemm(1000, 2000)}, Gemm(500, 1000), kv_token_bytes=10, attention_width=8)


def step(*sequences: tuple[int, int, int]) -> Step:
    """Of sequences with a first position, a number of tokens and of samples."""
    starts, counts, samples = (list(each) for each in zip(*sequences, strict=True))
    return Step(rows=list(range(len(starts))), starts=starts, counts=counts, samples=samples, tokens=[1] * sum(counts))


def test_weights_are_read_once_whatever_the_batch() -> None:
    one, three = MODEL.of(step((9, 1, 1))), MODEL.of(step(*[(9, 1, 1)] * 3))
    assert one["mlp"] == (2000, 2000)
    assert three["mlp"] == (2000, 6000)
    assert three["lm_head"] == (1000, 3000)


def test_a_chunk_of_a_prompt_attends_causally_and_needs_no_logits() -> None:
    work = MODEL.of(step((4, 3, 0)))
    assert work["lm_head"] == (0, 0)
    pairs = 5 + 6 + 7
    assert work["attention"] == ((7 + 3) * 10, 4 * pairs * 8)  # reads seven tokens, writes three


def test_experts_are_read_as_far_as_tokens_choose_them() -> None:
    experts = Gemm(8000, 16000, share=2 / 8)
    assert experts.work(1) == (4000, 4000)
    assert experts.work(3) == (12000, 12000)
    assert experts.work(100) == (16000, 400_000)
