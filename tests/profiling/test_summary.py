"""The table of a step: averages, shares and limits."""

from __future__ import annotations

import pytest

from penstock.profiling.summary import engine_parts, kernel_parts, limit_seconds, successive, totals


def test_the_limit_is_that_of_bytes_or_of_flops_whichever_takes_longer() -> None:
    assert limit_seconds((100.0, 10.0), 50.0, 10.0) == 2.0
    assert limit_seconds((100.0, 90.0), 50.0, 10.0) == 9.0
    assert limit_seconds((100.0, 90.0), 50.0, None) == 2.0
    assert limit_seconds((100.0, 90.0), None, None) is None


def test_kernels_come_with_the_longest_first_and_their_sum_last() -> None:
    work = {"gemm": (800.0, 40.0), "attention": (200.0, 360.0)}
    parts = kernel_parts({"attention": 1.0, "norm": 0.5, "gemm": 2.5}, work, (200.0, 80.0), 4, 2.0)
    assert [part.name for part in parts] == ["gemm", "attention", "norm", "all kernels"]
    gemm, attention, norm, everything = parts
    assert (gemm.seconds, gemm.share, gemm.bytes, gemm.flops) == (0.625, 0.3125, 200.0, 10.0)
    assert (gemm.limit_seconds, attention.limit_seconds, norm.limit_seconds) == (1.0, 1.125, None)
    assert norm.bytes is None
    assert everything.seconds == pytest.approx(1.0)
    assert everything.limit_seconds == 1.25  # bytes of one kernel and FLOPs of another can be moved at the same time


def test_without_kernels_there_is_no_sum() -> None:
    assert kernel_parts({}, {"gemm": (1.0, 1.0)}, (1.0, 1.0), 3, 1.0) == []


def test_parts_of_the_engine_make_up_the_step() -> None:
    parts = engine_parts({"schedule": 1.0, "collect": 0.5}, total=10.0, kernels=8.0, steps=2)
    assert {part.name: part.seconds for part in parts} == {"schedule": 0.5, "collect": 0.25, "other": 0.25}
    assert sum(part.share for part in parts) == pytest.approx(0.2)


def test_totals_keep_the_order_they_are_given() -> None:
    spans = [("collect", 5, 10), ("schedule", 0, 4), ("turn", 0, 10), ("schedule", 10, 11)]
    assert list(totals(spans, ["schedule", "launch", "collect"]).items()) == [
        ("schedule", 5e-9),
        ("collect", 5e-9),
        ("turn", 1e-8),
    ]


def test_kernels_that_overlap_add_up_to_the_time_the_device_was_busy() -> None:
    spans = [("gemm", 8, 20), ("norm", 0, 10), ("inside", 12, 15), ("gemm", 30, 31)]
    assert list(successive(spans)) == [("norm", 0, 10), ("gemm", 10, 20), ("gemm", 30, 31)]
