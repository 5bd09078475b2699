// Small functions that several kernels use.
#pragma once
#include "device.cuh"

// Waits without the trap of `wait`: with it the compiler does not use the registers that were taken.
DEVICE void await(u64* barrier, u32 parity) {
    while (!try_wait(barrier, parity)) {
    }
}

DEVICE float silu_times(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }
