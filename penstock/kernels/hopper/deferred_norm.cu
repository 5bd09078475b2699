// Defers the RMSNorm of rows of the residual stream to the GEMM that reads them, where the GEMM before did not: for many rows.
// A CTA takes one row and adds up its slots.
#include "deferred_norm.cuh"

extern "C" __global__ void __launch_bounds__(256)
defer_norms(const bf16* __restrict__ x, const bf16* __restrict__ gain, bf16* deferred, float* sums, int width,
            int padded) {
    SHARED_MEMORY(memory);
    float* squares = reinterpret_cast<float*>(memory);
    const int lane = threadIdx.x % SLOT_LANES;
    let_next_start();
    wait_for_previous();
    const i64 first = i64(blockIdx.x) * width;
    for (int column = threadIdx.x * 4; column < padded; column += blockDim.x * 4) {
        float square = 0.0f;
        if (column < width) {
            const uint2 values = *reinterpret_cast<const uint2*>(x + first + column);
            square = defer_norm(deferred + first + column, values, gain + column);
        }
        square = sum_of_slot(square);
        if (lane == 0) squares[column / SLOT] = square;
    }
    __syncthreads();
    if (threadIdx.x == 0) sums[blockIdx.x] = sum_of_slots(squares, 1, (width + SLOT - 1) / SLOT);
}
