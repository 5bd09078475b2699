// bfloat16 weights times float32 activations, accumulated in float32. Two bytes per weight from memory; in arithmetic
// a quarter of the int8 rate.
#pragma once

#include "gemm.h"

namespace PENSTOCK_ISA {

struct FloatTile {
#if defined(__AVX512F__)
    static constexpr int ROWS = 12;
#else
    static constexpr int ROWS = 2;
#endif

    template <int MR>
    static __attribute__((noinline)) void run(const Matrix& m, int panel, const Activations& x, int row,
                                              const Output& out, Ahead ahead) {
        const uint8_t* w = m.panels + size_t(panel) * m.panel_bytes();
        const float* a = x.f + row * x.stride;
        f32x16 even[MR][2] = {};
        f32x16 y[MR][2] = {};
        for (int k = 0; k < m.padded_k; k += 2) {
            const u32x16 pair0 = load<u32x16>(w), pair1 = load<u32x16>(w + 64);
            ahead.template request<MR>();
            w += 128;
#pragma GCC unroll 12
            for (int r = 0; r < MR; r++) {
                const float a0 = a[r * x.stride + k], a1 = a[r * x.stride + k + 1];
                f32x16(&first)[2] = MR <= 4 ? even[r] : y[r];  // a second chain hides latency when rows are few
                first[0] += low_bf16(pair0) * a0;
                first[1] += low_bf16(pair1) * a0;
                y[r][0] += high_bf16(pair0) * a1;
                y[r][1] += high_bf16(pair1) * a1;
            }
        }
        for (int r = 0; r < MR; r++) {
            y[r][0] += even[r][0];
            y[r][1] += even[r][1];
        }
        finish_tile<MR>(m, panel, y, row, out);
    }
};

}  // namespace PENSTOCK_ISA
