// int8 weights times int8 activations, exact in int32: y = (sum (w+128) a - 128 sum a) * scale_w * scale_a.
//
// The offset of 128 makes weights the unsigned operand of vpdpbusd and leaves the broadcast activations signed.
// 12 rows x 32 columns keep 24 accumulators in registers; per 4 inputs they need 2 weight loads and 12 broadcasts.
#pragma once

#include "gemm.h"

namespace PENSTOCK_ISA {

struct Int8Tile {
#if defined(__AVX512VNNI__)
    static constexpr int ROWS = 12;
#else
    static constexpr int ROWS = 2;
#endif

    template <int MR, int NP>
    static __attribute__((noinline)) void run(const Matrix& m, int panel, const Activations& x, int row,
                                              const Output& out, Ahead ahead) {
        constexpr int CHAINS = MR * NP == 1 ? 4 : MR * NP <= 3 ? 2 : 1;  // enough independent sums to hide the latency
        constexpr int STEPS = MR == 1 ? 4 : 2;
        const size_t stream = m.panel_bytes();
        const uint8_t* w = m.panels + size_t(panel) * stream;
        const int8_t* a = x.q + row * x.stride;
        i32x16 acc[CHAINS][NP][MR][2] = {};
        for (int k = 0; k < m.padded_k; k += 4 * STEPS) {
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
        for (int p = 0; p < NP; p++) {
            const float* scales = m.scale + (panel + p) * PANEL;
            const f32x16 scale0 = load<f32x16>(scales), scale1 = load<f32x16>(scales + 16);
            f32x16 y[MR][2];
            for (int r = 0; r < MR; r++) {
                for (int c = 1; c < CHAINS; c++) {
                    acc[0][p][r][0] += acc[c][p][r][0];
                    acc[0][p][r][1] += acc[c][p][r][1];
                }
                const float offset = 128.f * x.sum[row + r], scale = x.scale[row + r];
                y[r][0] = (to_float(acc[0][p][r][0]) - offset) * scale0 * scale;
                y[r][1] = (to_float(acc[0][p][r][1]) - offset) * scale1 * scale;
            }
            finish_tile<MR>(m, panel + p, y, row, out);
        }
    }
};

}  // namespace PENSTOCK_ISA
