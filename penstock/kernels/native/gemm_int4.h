// GEMM of 4-bit weights w = minimum + scale * q (q in 0..15, per 32 inputs) times int8 activations:
//   y = sum over groups of scale_a * (scale_g * sum q a + minimum_g * sum a), the inner sums exact in int32.
//
// 5 bits per weight. The float work per group (2 multiply-adds and a conversion per 8 integer dots) makes this kernel
// about 1.4 times slower than int8 once it is bound by arithmetic, and 1.6 times faster while bound by memory. With AVX2
// alone it is 1.4 times faster than int8 there: products of nibbles and bytes can be added in 16 bits.
#pragma once

#include "gemm.h"

namespace PENSTOCK_ISA {

struct Int4Tile {
    static constexpr size_t GROUP_BYTES = PANEL * 4 + PANEL * GROUP / 2;
#if defined(__AVX512F__)
    static constexpr int ROWS = 6, WIDTH = 2;  // runs of 16 outputs that are computed side by side
#else
    static constexpr int ROWS = 4, WIDTH = 1;  // 16 registers hold the sums of a group, or those of all groups
#endif

    template <int MR, int NP>
    static __attribute__((noinline)) void run(const Matrix& m, int panel, const Activations& x, int row,
                                              const Output& out, Ahead ahead) {
        f32x16 y[NP][MR][2] = {};
        for (int first = 0; first < 2; first += WIDTH) sum_groups<MR, NP>(m, panel, first, x, row, y, ahead);
        for (int p = 0; p < NP; p++) finish_tile<MR>(m, panel + p, y[p], row, out);
    }

    // WIDTH runs of outputs of each panel. The first of them ask for what the tile shall ask for.
    template <int MR, int NP>
    PENSTOCK_INLINE void sum_groups(const Matrix& m, int panel, int first, const Activations& x, int row,
                                    f32x16 (&y)[NP][MR][2], Ahead ahead) {
        const size_t stream = m.panel_bytes();
        const uint8_t* group_at = m.panels + size_t(panel) * stream + 64 * first;
        const int8_t* a = x.q + row * x.stride;
        const size_t groups = x.stride / GROUP;
        const GroupLevel* levels = x.groups_of(row);
        for (int group = 0; group < m.padded_k / GROUP; group++) {
#pragma GCC unroll 8
            for (int p = 0; p < NP; p++) {
                const uint8_t* w = group_at + p * stream;
                if (first == 0) ahead.template request<MR>(p * stream);
                u32x16 pairs[WIDTH];
                i32x16 acc[MR][WIDTH] = {};
#pragma GCC unroll 2
                for (int c = 0; c < WIDTH; c++) pairs[c] = load<u32x16>(w + 64 * c);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    w += 128;
                    if (first == 0) ahead.template request<MR>(p * stream + (j + 1) * ahead.step);
                    u8x64 packed[WIDTH];
#pragma GCC unroll 2
                    for (int c = 0; c < WIDTH; c++) packed[c] = load<u8x64>(w + 64 * c);
#pragma GCC unroll 6
                    for (int r = 0; r < MR; r++) {
                        const int8_t* eight = a + r * x.stride + group * GROUP + 8 * j;
#pragma GCC unroll 2
                        for (int c = 0; c < WIDTH; c++) acc[r][c] = dot4_small(acc[r][c], packed[c] & 15, eight);
#pragma GCC unroll 2
                        for (int c = 0; c < WIDTH; c++) acc[r][c] = dot4_small(acc[r][c], packed[c] >> 4, eight + 4);
                    }
                }
#pragma GCC unroll 6
                for (int r = 0; r < MR; r++) {
                    const auto [scale_a, sum_a] = levels[r * groups + group];
#pragma GCC unroll 2
                    for (int c = 0; c < WIDTH; c++) {
                        f32x16& to = y[p][r][first + c];
                        const f32x16 total = to_float(dot4_total(acc[r][c]));
                        to = fma(total, low_bf16(pairs[c]) * scale_a, fma(high_bf16(pairs[c]), sum_a, to));
                    }
                }
            }
            group_at += GROUP_BYTES;
            ahead.at += GROUP_BYTES / 128 * ahead.step;
        }
    }
};

}  // namespace PENSTOCK_ISA
