// GEMM of 4-bit weights w = minimum + scale * q (q in 0..15, per 32 inputs) times int8 activations:
//   y = sum over groups of scale_a * (scale_g * sum q a + minimum_g * sum a), the inner sums exact in int32.
//
// 5 bits per weight. The float work per group (2 multiply-adds and a conversion per 8 integer dots) makes this kernel
// about 1.4 times slower than int8 once it is bound by arithmetic, and 1.6 times faster while bound by memory.
#pragma once

#include "gemm.h"

namespace PENSTOCK_ISA {

struct Int4Tile {
    static constexpr size_t GROUP_BYTES = PANEL * 4 + PANEL * GROUP / 2;
#if defined(__AVX512VNNI__)
    static constexpr int ROWS = 6;
#else
    static constexpr int ROWS = 2;
#endif

    template <int MR, int NP>
    static __attribute__((noinline)) void run(const Matrix& m, int panel, const Activations& x, int row,
                                              const Output& out, Ahead ahead) {
        const size_t stream = m.panel_bytes();
        const uint8_t* group_at = m.panels + size_t(panel) * stream;
        const int8_t* a = x.q + row * x.stride;
        const size_t groups = x.stride / GROUP;
        const float* scales = x.group_scale + row * groups;
        const float* sums = x.group_sum + row * groups;
        f32x16 y[NP][MR][2] = {};
        for (int group = 0; group < m.padded_k / GROUP; group++) {
#pragma GCC unroll 8
            for (int p = 0; p < NP; p++) {
                const uint8_t* w = group_at + p * stream;
                ahead.template request<MR>(p * stream);
                const u32x16 pair0 = load<u32x16>(w), pair1 = load<u32x16>(w + 64);
                i32x16 acc[MR][2] = {};
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    w += 128;
                    const u8x64 packed0 = load<u8x64>(w), packed1 = load<u8x64>(w + 64);
                    ahead.template request<MR>(p * stream + (j + 1) * ahead.step);
#pragma GCC unroll 6
                    for (int r = 0; r < MR; r++) {
                        const int8_t* eight = a + r * x.stride + group * GROUP + 8 * j;
                        acc[r][0] = dot4_small(acc[r][0], packed0 & 15, eight);
                        acc[r][1] = dot4_small(acc[r][1], packed1 & 15, eight);
                        acc[r][0] = dot4_small(acc[r][0], packed0 >> 4, eight + 4);
                        acc[r][1] = dot4_small(acc[r][1], packed1 >> 4, eight + 4);
                    }
                }
#pragma GCC unroll 6
                for (int r = 0; r < MR; r++) {
                    const float scale_a = scales[r * groups + group], sum_a = sums[r * groups + group];
                    f32x16(&to)[2] = y[p][r];
                    to[0] = fma(to_float(acc[r][0]), low_bf16(pair0) * scale_a, fma(high_bf16(pair0), sum_a, to[0]));
                    to[1] = fma(to_float(acc[r][1]), low_bf16(pair1) * scale_a, fma(high_bf16(pair1), sum_a, to[1]));
                }
            }
            group_at += GROUP_BYTES;
            ahead.at += GROUP_BYTES / 128 * ahead.step;
        }
        for (int p = 0; p < NP; p++) finish_tile<MR>(m, panel + p, y[p], row, out);
    }
};

}  // namespace PENSTOCK_ISA
