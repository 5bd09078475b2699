// A deferred RMSNorm of the residual stream: its rows times the gain, and the sums of their squares in slots of 64 channels.
// The GEMM that reads the rows divides by their root mean square. All kernels that defer or apply it use these functions,
// in which every operation and its order are written down, so that a row has the same bits in all of them.
#pragma once
#include "device.cuh"

constexpr int SLOT = 64, SLOT_LANES = SLOT / 4;  // a lane has four channels

// Stores four channels of a row times the gain; returns the sum of their squares before that.
DEVICE float defer_norm(bf16* deferred, uint2 values, const bf16* gain) {
    const uint2 gains = *reinterpret_cast<const uint2*>(gain);
    const float4 v = {low_bf16(values.x), high_bf16(values.x), low_bf16(values.y), high_bf16(values.y)};
    *reinterpret_cast<uint2*>(deferred) = {pack_bf16(v.x * low_bf16(gains.x), v.y * high_bf16(gains.x)),
                                           pack_bf16(v.z * low_bf16(gains.y), v.w * high_bf16(gains.y))};
    return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, rounded_product(v.x, v.x))));
}
DEVICE float sum_of_slot(float square) {
#pragma unroll
    for (int other = 1; other < SLOT_LANES; other *= 2) square += __shfl_xor_sync(0xffffffffu, square, other);
    return square;
}
// Slots are so many floats apart. The sum of one slot is that slot: kernels may add them up ahead.
DEVICE float sum_of_slots(const float* squares, int apart, int slots) {
    float total = 0.0f;
#pragma unroll 16
    for (int slot = 0; slot < slots; slot++) total += squares[slot * apart];
    return total;
}
// What a row is multiplied by.
DEVICE float inverse_root(const float* squares, int apart, int slots, float per_channel, float eps) {
    return rsqrtf(fmaf(sum_of_slots(squares, apart, slots), per_channel, eps));
}
