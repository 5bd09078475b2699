// GEMM of bfloat16 weights and float32 activations, accumulated in float32. Two bytes per weight from memory; in
// arithmetic a quarter of the int8 rate. With bfloat16 instructions activations are rounded to bfloat16 too.
#pragma once

#include "gemm.h"

namespace PENSTOCK_ISA {

struct FloatTile {
#if defined(__AVX512F__)
    static constexpr int ROWS = 12;
#else
    static constexpr int ROWS = 3;
#endif

    template <int MR, int NP>
    static __attribute__((noinline)) void run(const Matrix& m, int panel, const Activations& x, int row,
                                              const Output& out, Ahead ahead) {
        const size_t stream = m.panel_bytes();
        const uint8_t* w = m.panels + size_t(panel) * stream;
        const float* a = x.f + row * x.stride;
        f32x16 y[NP][MR][2] = {};
        for (int k = 0; k < m.padded_k; k += 2) {
#pragma GCC unroll 8
            for (int p = 0; p < NP; p++) {
                ahead.template request<MR>(p * stream);
                const u32x16 pair0 = load<u32x16>(w + p * stream), pair1 = load<u32x16>(w + p * stream + 64);
#pragma GCC unroll 12
                for (int r = 0; r < MR; r++) {
#if defined(__AVX512BF16__)
                    const uint16_t* two = reinterpret_cast<const uint16_t*>(a + r * x.stride) + k;
                    y[p][r][0] = dot2(y[p][r][0], pair0, two);
                    y[p][r][1] = dot2(y[p][r][1], pair1, two);
#else
                    const float a0 = a[r * x.stride + k], a1 = a[r * x.stride + k + 1];
                    y[p][r][0] = fma(low_bf16(pair0), a0, y[p][r][0]);
                    y[p][r][1] = fma(low_bf16(pair1), a0, y[p][r][1]);
                    y[p][r][0] = fma(high_bf16(pair0), a1, y[p][r][0]);
                    y[p][r][1] = fma(high_bf16(pair1), a1, y[p][r][1]);
#endif
                }
            }
            w += 128;
            ahead.at += ahead.step;
        }
        for (int p = 0; p < NP; p++) finish_tile<MR>(m, panel + p, y[p], row, out);
    }
};

// float32 weights and activations: four bytes per weight from memory, at the arithmetic rate of bfloat16 weights.
struct Float32Tile {
    static constexpr int ROWS = FloatTile::ROWS;

    template <int MR, int NP>
    static __attribute__((noinline)) void run(const Matrix& m, int panel, const Activations& x, int row,
                                              const Output& out, Ahead ahead) {
        const size_t stream = m.panel_bytes();
        const uint8_t* w = m.panels + size_t(panel) * stream;
        const float* a = x.f + row * x.stride;
        f32x16 y[NP][MR][2] = {};
        for (int k = 0; k < m.padded_k; k++) {
#pragma GCC unroll 8
            for (int p = 0; p < NP; p++) {
                ahead.template request<MR>(p * stream);
                const f32x16 w0 = load<f32x16>(w + p * stream), w1 = load<f32x16>(w + p * stream + 64);
#pragma GCC unroll 12
                for (int r = 0; r < MR; r++) {
                    const float value = a[r * x.stride + k];
                    y[p][r][0] = fma(w0, value, y[p][r][0]);
                    y[p][r][1] = fma(w1, value, y[p][r][1]);
                }
            }
            w += 128;
            ahead.at += ahead.step;
        }
        for (int p = 0; p < NP; p++) finish_tile<MR>(m, panel + p, y[p], row, out);
    }
};

}  // namespace PENSTOCK_ISA
