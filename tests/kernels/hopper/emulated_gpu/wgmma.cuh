#pragma once
#include "device.cuh"

inline void wgmma(float (&sums)[ROWS / 2], u64 a, u64 b) {
    wgmma_by_warpgroup<ROWS, FP8 ? Number::E4M3 : Number::BF16, true>(sums, nullptr, a, b, true);
}
