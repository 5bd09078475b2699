"""Times of the kernels inside native steps."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.kernels.native import bindings
from penstock.kernels.native.timers import KERNELS, gemm_speed, kernel_times, read_bandwidth, set_timed
from tests.kernels.native.random_models import VOCAB, build, reference, step

pytestmark = pytest.mark.skipif(not bindings.available(), reason=str(bindings.unavailable_reason()))


@pytest.mark.parametrize(
    ("tokens", "prepared"),
    [(2, set()), (40, {"norm", "quantize"})],  # of a few rows each thread makes the operands of its GEMMs itself
)
def test_kernels_of_a_timed_step_follow_one_another(tokens: int, prepared: set[str]) -> None:
    source = reference("llama")
    model, ids = build(source, "int8"), np.random.default_rng(5).integers(0, VOCAB, tokens)
    asked = step([(ids, 0, [2, 5, 8])])
    model.forward(*asked)
    assert len(kernel_times(model).ends) == 0  # it was not timed
    set_timed(model, True)
    plain, _ = model.forward(*asked)
    times = kernel_times(model)
    assert times.began == model.call_began
    assert (np.diff(times.ends, prepend=0) >= 0).all()
    assert times.ends[-1] <= (model.call_ended - model.call_began) * 1e9
    names = [KERNELS[kernel] for kernel in times.kernels.tolist()]
    assert names[:2] == ["plan", "embedding"]
    assert names[-2:] == ["lm_head", "sampling"]
    found = {name for name, layer in zip(names, times.layers.tolist(), strict=True) if layer == 1}
    assert found == {"qkv", "rope", "attention", "out", "gate_up", "down"} | prepared
    set_timed(model, False)
    again, _ = model.forward(*asked)
    assert len(kernel_times(model).ends) == 0
    assert (again == plain).all()


def test_the_machine_has_limits() -> None:
    model = build(reference("llama"), "int8")
    assert read_bandwidth(model) > 0
    assert gemm_speed(model) > 0
