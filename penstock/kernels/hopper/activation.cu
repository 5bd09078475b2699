// Quantisation of rows, or of SwiGLU of rows, to e4m3 with one scale per row. A row stays in registers between finding its
// largest value and quantising it, and all of its loads are in flight at once: Triton, which pads rows to a power of two,
// reaches half of the bandwidth.
//
// WIDTH: of the result, a multiple of 8. GATED: SiLU(gate) * up, and then SCALED: the GEMM before has left the scales of
// rows and channels to this kernel.
#include "common.cuh"

constexpr int THREADS = 256, VECTORS = (WIDTH / 8 + THREADS - 1) / THREADS;
constexpr float LARGEST = 448.0f;

DEVICE void load_floats(float (&out)[8], const float* from) {
    const float4 low = *reinterpret_cast<const float4*>(from), high = *reinterpret_cast<const float4*>(from + 4);
    out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
    out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
}
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    rows_to_e4m3(e4m3* out, float* scales, const bf16* x, const float* of_rows, const float* of_channels) {
    SHARED_MEMORY(shared);
    float* largest_of_warp = reinterpret_cast<float*>(shared);
    const i64 row = blockIdx.x;
    const uint4* gates = reinterpret_cast<const uint4*>(x + row * (GATED ? 2 : 1) * WIDTH);
    const uint4* ups = gates + WIDTH / 8;
    let_next_start();
    wait_for_previous();

    uint4 gate[VECTORS], up[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int at = v * THREADS + threadIdx.x;
        gate[v] = at < WIDTH / 8 ? gates[at] : make_uint4(0, 0, 0, 0);
        up[v] = GATED && at < WIDTH / 8 ? ups[at] : make_uint4(0, 0, 0, 0);
    }
    const float of_row = SCALED ? of_rows[row] : 1.0f;
    float values[VECTORS][8], largest = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int at = min(v * THREADS + static_cast<int>(threadIdx.x), WIDTH / 8 - 1);
        const u32 gate_words[4] = {gate[v].x, gate[v].y, gate[v].z, gate[v].w};
        const u32 up_words[4] = {up[v].x, up[v].y, up[v].z, up[v].w};
        float of_gates[8], of_ups[8];
        if (SCALED) {
            load_floats(of_gates, of_channels + at * 8);
            load_floats(of_ups, of_channels + WIDTH + at * 8);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float g = i % 2 ? high_bf16(gate_words[i / 2]) : low_bf16(gate_words[i / 2]);
            float u = i % 2 ? high_bf16(up_words[i / 2]) : low_bf16(up_words[i / 2]);
            if (SCALED) {
                g *= of_row * of_gates[i];
                u *= of_row * of_ups[i];
            }
            values[v][i] = GATED ? silu_times(g, u) : g;
            largest = fmaxf(largest, fabsf(values[v][i]));
        }
    }

    for (int lanes = 16; lanes > 0; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, lanes));
    if (threadIdx.x % 32 == 0) largest_of_warp[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int warp = 0; warp < THREADS / 32; warp++) largest = fmaxf(largest, largest_of_warp[warp]);
    const float scale = fmaxf(largest, 1e-12f) / LARGEST;
    const float inverse = 1.0f / scale;
    if (threadIdx.x == 0) scales[row] = scale;
    uint2* into = reinterpret_cast<uint2*>(out + row * WIDTH);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int at = v * THREADS + threadIdx.x;
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[i] = pack_e4m3(values[v][2 * i] * inverse, values[v][2 * i + 1] * inverse);
        if (at < WIDTH / 8) into[at] = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
    }
}
