// GEMM of int8 weights and int8 activations, with sums that are exact in int32. Both spread the range from their
// smallest to their largest value over all 256 levels: w = scale_w (u - zero) and a = scale_a q + middle, so
//   y = scale_w (scale_a (sum u q - zero sum q) + middle sum (u - zero))
//
// Weights are the unsigned operand of vpdpbusd, the broadcast activations the signed one.
// 12 rows x 32 columns keep 24 accumulators in registers; per 4 inputs they need 2 weight loads and 12 broadcasts.
#pragma once

#include <type_traits>
#include <utility>

#include "gemm.h"

namespace PENSTOCK_ISA {

// What the integer sums of 16 outputs of a panel are, in units of the output; `levels` are of the first of these.
PENSTOCK_INLINE f32x16 finish_int8(const uint8_t* levels, const Activations& x, int row, i32x16 acc) {
    const i32x16 both = load<i32x16>(levels + 4 * PANEL);
    const f32x16 zero = to_float(both & 255), total = to_float(both >> 8);
    const f32x16 offset = fma(total, x.middle[row], -(zero * x.sum[row]));
    return fma(to_float(acc), x.scale[row], offset) * load<f32x16>(levels);
}

struct Int8Tile {
#if defined(__AVX512VNNI__)
    static constexpr int ROWS = 12;
    static constexpr int TALL = 7;  // rows of tiles that ask for factors of adapters while they compute
#else
    static constexpr int ROWS = 3;
#endif

    template <int MR, int NP, class A>
    static __attribute__((noinline)) void run(const Matrix& m, int panel, const Activations& x, int row,
                                              const Output& out, A ahead) {
        constexpr int CHAINS = MR * NP == 1 ? 4 : MR * NP <= 3 ? 2 : 1;  // enough independent sums to hide the latency
        constexpr int STEPS = MR == 1 ? 4 : 2;
        constexpr bool WITH_FACTORS = std::is_same_v<A, AheadWithFactors>;
        const size_t stream = m.panel_bytes();
        const uint8_t* w = m.panels + size_t(panel) * stream;
        const int8_t* a = x.q + row * x.stride;
        i32x16 acc[CHAINS][NP][MR][2] = {};
        for (int k = 0, end = m.padded_k; k < m.padded_k; end = m.padded_k) {
            const uint8_t* lines = w;  // that are here already
            if constexpr (WITH_FACTORS)
                if (!ahead.factors->done()) {
                    const auto [at, count] = ahead.factors->take((m.padded_k - k) / (4 * STEPS));
                    lines = at, end = k + 4 * STEPS * count;
                }
            for (; k < end; k += 4 * STEPS) {
                if constexpr (WITH_FACTORS) prefetch_l2(std::exchange(lines, lines + 64));
#pragma GCC unroll 4
                for (int step = 0; step < STEPS; step++) {
#pragma GCC unroll 8
                    for (int p = 0; p < NP; p++) {
                        ahead.template request<MR>(p * stream);
                        const u8x64 w0 = load<u8x64>(w + p * stream), w1 = load<u8x64>(w + p * stream + 64);
#pragma GCC unroll 12
                        for (int r = 0; r < MR; r++) {
                            const int8_t* four = a + r * x.stride + k + 4 * step;
                            i32x16(&to)[2] = acc[step % CHAINS][p][r];
                            to[0] = dot4(to[0], w0, four);
                            to[1] = dot4(to[1], w1, four);
                        }
                    }
                    w += 128;
                    ahead.at += ahead.step;
                }
            }
        }
        for (int p = 0; p < NP; p++) {
            if constexpr (MR <= 8)  // which use up what was asked for: for the next levels too
                for (int line = 0; line < 8 * PANEL; line += 64) prefetch(ahead.at + p * stream + line);
            const uint8_t* levels = m.levels(panel + p);
            f32x16 y[MR][2];
#pragma GCC unroll 12
            for (int r = 0; r < MR; r++) {  // else the sums live in memory, which has to be cleared
                for (int c = 1; c < CHAINS; c++) {
                    acc[0][p][r][0] += acc[c][p][r][0];
                    acc[0][p][r][1] += acc[c][p][r][1];
                }
                y[r][0] = finish_int8(levels, x, row + r, acc[0][p][r][0]);
                y[r][1] = finish_int8(levels + 64, x, row + r, acc[0][p][r][1]);
            }
            finish_tile<MR>(m, panel + p, y, row, out);
        }
    }
};

}  // namespace PENSTOCK_ISA
