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

    template <int MR>
    static __attribute__((noinline)) void run(const Matrix& m, int panel, const Activations& x, int row,
                                              const Output& out, Ahead ahead) {
        constexpr int CHAINS = MR == 1 ? 4 : MR <= 3 ? 2 : 1;  // enough independent sums to hide the latency
        constexpr int STEPS = MR == 1 ? 4 : 2;
        const uint8_t* w = m.panels + size_t(panel) * m.panel_bytes();
        const int8_t* a = x.q + row * x.stride;
        i32x16 acc[CHAINS][MR][2] = {};
        for (int k = 0; k < m.padded_k; k += 4 * STEPS) {
#pragma GCC unroll 4
            for (int step = 0; step < STEPS; step++) {
                const u8x64 w0 = load<u8x64>(w), w1 = load<u8x64>(w + 64);
                ahead.template request<MR>();
                w += 128;
#pragma GCC unroll 12
                for (int r = 0; r < MR; r++) {
                    const int8_t* four = a + r * x.stride + k + 4 * step;
                    acc[step % CHAINS][r][0] = dot4(acc[step % CHAINS][r][0], w0, four);
                    acc[step % CHAINS][r][1] = dot4(acc[step % CHAINS][r][1], w1, four);
                }
            }
        }
        const f32x16 scale0 = load<f32x16>(m.scale + panel * PANEL), scale1 = load<f32x16>(m.scale + panel * PANEL + 16);
        f32x16 y[MR][2];
        for (int r = 0; r < MR; r++) {
            for (int c = 1; c < CHAINS; c++) {
                acc[0][r][0] += acc[c][r][0];
                acc[0][r][1] += acc[c][r][1];
            }
            const float offset = 128.f * x.sum[row + r], scale = x.scale[row + r];
            y[r][0] = (to_float(acc[0][r][0]) - offset) * scale0 * scale;
            y[r][1] = (to_float(acc[0][r][1]) - offset) * scale1 * scale;
        }
        finish_tile<MR>(m, panel, y, row, out);
    }
};

}  // namespace PENSTOCK_ISA
