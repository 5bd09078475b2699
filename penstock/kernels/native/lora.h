// LoRA adapters: y += B (A x) for rows that use the same adapter. Both factors are small and read once per step, so their
// bytes are what a step with many adapters pays for.
//
// A row's sums run in one order whatever rows are computed beside it, so its numbers do not depend on them.
#pragma once

#include <algorithm>

#include "ops.h"

namespace PENSTOCK_ISA {

using namespace penstock;

constexpr int REQUESTED_AHEAD = 2048;  // bytes. Each factor is one stream, and too short for the hardware to follow it

// Sums of ROWS rows for one panel of 16 outputs. Weights are w / scale + 128 as unsigned bytes. Eight sums at a time, so that
// none waits for the one before it.
template <int ROWS>
PENSTOCK_INLINE void factor_int8(const uint8_t* w, const int8_t* x, size_t stride, int inputs, i32x16 (&acc)[ROWS]) {
    constexpr int CHAINS = ROWS > 2 ? 2 : 8 / ROWS;
    i32x16 sums[CHAINS][ROWS] = {};
    int k = 0;
    for (; k + 4 * CHAINS <= inputs; k += 4 * CHAINS) {
#pragma GCC unroll 8
        for (int c = 0; c < CHAINS; c++, w += 64) {
            prefetch(w + REQUESTED_AHEAD);
            const u8x64 four = load<u8x64>(w);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) sums[c][r] = dot4(sums[c][r], four, x + r * stride + k + 4 * c);
        }
    }
    for (; k < inputs; k += 4, w += 64) {
        const u8x64 four = load<u8x64>(w);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) sums[0][r] = dot4(sums[0][r], four, x + r * stride + k);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
        acc[r] = sums[0][r];
#pragma GCC unroll 8
        for (int c = 1; c < CHAINS; c++) acc[r] += sums[c][r];
    }
}

template <int ROWS, class Value>
PENSTOCK_INLINE void factor_bf16(const uint8_t* w, int inputs, f32x16 (&acc)[ROWS], const Value& value) {
    for (int k = 0; k < inputs; k += 2, w += 64) {
        const u32x16 pair = load<u32x16>(w);
        const f32x16 first = low_bf16(pair), second = high_bf16(pair);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) acc[r] = fma(second, value(r, k + 1), fma(first, value(r, k), acc[r]));
    }
}

// Of rows from `row` on, into those of h with the same number. `rank` is what B takes.
template <int ROWS>
static void shrink_rows(const Factor& a, int rank, const Activations& x, Scheme scheme, int row, const LowRank& h) {
    for (int p = 0; p < a.num_panels; p++) {
        const uint8_t* w = a.panels + p * a.panel_bytes;
        if (a.format == INT8) {
            i32x16 acc[ROWS];
            factor_int8<ROWS>(w, x.q + row * x.stride, x.stride, a.inputs, acc);
            const f32x16 scale = load<f32x16>(w + 16 * a.inputs), total = load<f32x16>(w + 16 * a.inputs + 64);
            for (int r = 0; r < ROWS; r++) {
                const f32x16 product = fma(to_float(acc[r]), x.scale[row + r], splat(-128.f * x.sum[row + r]));
                store(h.f + (row + r) * h.stride + 16 * p, fma(total, x.middle[row + r], product * scale));
            }
            continue;
        }
        f32x16 acc[ROWS] = {};
        const float* f = x.f + row * x.stride;
#if defined(__AVX512BF16__)
        if (scheme == BF16)
            factor_bf16<ROWS>(w, a.inputs, acc, [&](int r, int k) {
                return bf16_to_float(reinterpret_cast<const uint16_t*>(f + r * x.stride)[k]);
            });
        else
#endif
            factor_bf16<ROWS>(w, a.inputs, acc, [&](int r, int k) { return f[r * x.stride + k]; });
        for (int r = 0; r < ROWS; r++) store(h.f + (row + r) * h.stride + 16 * p, acc[r]);
    }
    for (int r = row; a.format == INT8 && r < row + ROWS; r++)
        for (int m = 0; m * rank < 16 * a.num_panels; m++) {
            const float* f = h.f + r * h.stride + m * rank;
            const float peak = peak_of(f, rank);
            const float total = quantize_span(f, h.q + r * h.stride + m * rank, peak > 0 ? 127.f / peak : 0.f, rank);
            h.scale[MODULES * r + m] = peak / 127.f;
            h.offset[MODULES * r + m] = -128 * int32_t(total);
        }
}

// A x of `count` rows of x from `row` on, into the same rows of h. `scheme` is what x was prepared for.
static void shrink(const AdapterStage& factors, const Activations& x, Scheme scheme, int row, int count,
                   const LowRank& h) {
    const Factor& a = factors.a;
    const int rank = factors.b.inputs;
    for (; count >= 4; count -= 4, row += 4) shrink_rows<4>(a, rank, x, scheme, row, h);
    if (count == 3) shrink_rows<3>(a, rank, x, scheme, row, h);
    if (count == 2) shrink_rows<2>(a, rank, x, scheme, row, h);
    if (count == 1) shrink_rows<1>(a, rank, x, scheme, row, h);
}

// y += B h for rows of one adapter from `row` on, and COUNT times 16 outputs of the adapter's panels from `panel` on. A row
// of y is 32 outputs, of which these are a part.
template <int ROWS, int COUNT>
PENSTOCK_INLINE void expand_panels(const Expansion& e, const Factor& b, int row, int panel, f32x16* y) {
    const uint8_t* w = b.panels + panel * b.panel_bytes;
    const LowRank& h = e.h;
    if (b.format == BF16) {
        for (int p = 0; p < COUNT; p++) {
            const float* f = h.f + row * h.stride + e.modules[panel + p] * b.inputs;
            f32x16 sums[ROWS];
            for (int r = 0; r < ROWS; r++) sums[r] = y[2 * r + p];
            factor_bf16<ROWS>(w + p * b.panel_bytes, b.inputs, sums, [&](int r, int k) { return f[r * h.stride + k]; });
            for (int r = 0; r < ROWS; r++) y[2 * r + p] = sums[r];
        }
        return;
    }
    const int8_t* q[COUNT];
    int level[COUNT];
    i32x16 acc[COUNT][ROWS];
#pragma GCC unroll 2
    for (int p = 0; p < COUNT; p++) {
        q[p] = h.q + row * h.stride + e.modules[panel + p] * b.inputs;
        level[p] = MODULES * row + e.modules[panel + p];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) acc[p][r] = i32x16{} + h.offset[level[p] + MODULES * r];
    }
    for (int k = 0; k < b.inputs; k += 16) {  // ranks are padded to it
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4) {
#pragma GCC unroll 2
            for (int p = 0; p < COUNT; p++) {
                const u8x64 four = load<u8x64>(w + p * b.panel_bytes + 16 * (k + i));
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++) acc[p][r] = dot4(acc[p][r], four, q[p] + r * h.stride + k + i);
            }
        }
    }
#pragma GCC unroll 2
    for (int p = 0; p < COUNT; p++) {
        const f32x16 scales = load<f32x16>(w + p * b.panel_bytes + 16 * b.inputs);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
            y[2 * r + p] = fma(to_float(acc[p][r]), scales * h.scale[level[p] + MODULES * r], y[2 * r + p]);
    }
}

// The 32 outputs of a panel of the GEMM: side by side where there are registers for it.
template <int ROWS>
PENSTOCK_INLINE void expand_rows(const Expansion& e, const Factor& b, int row, int panel, f32x16 (*y)[2]) {
    const bool both = 2 * panel + 1 < b.num_panels;
#if defined(__AVX512F__)
    if (both) return expand_panels<ROWS, 2>(e, b, row, 2 * panel, y[0]);
#endif
    expand_panels<ROWS, 1>(e, b, row, 2 * panel, y[0]);
    if (both) expand_panels<ROWS, 1>(e, b, row, 2 * panel + 1, y[0] + 1);
}

// y += B h for `count` rows from `row` on and the 32 outputs of a panel of the GEMM.
static __attribute__((noinline)) void expand(const Expansion& e, int row, int count, int panel, f32x16 (*y)[2]) {
    for (int run; count > 0; row += run, y += run, count -= run) {
        const AdapterStage* adapter = e.adapters[row];
        for (run = 1; run < 4 && run < count && e.adapters[row + run] == adapter;) run++;
        if (!adapter || !adapter[e.stage].used) continue;
        const Factor& b = adapter[e.stage].b;
        if (run == 4) expand_rows<4>(e, b, row, panel, y);
        if (run == 3) expand_rows<3>(e, b, row, panel, y);
        if (run == 2) expand_rows<2>(e, b, row, panel, y);
        if (run == 1) expand_rows<1>(e, b, row, panel, y);
    }
}

// The share of tile `tile` of `tiles` in all lines, for `count` panels of the GEMM from `panel` on.
static __attribute__((noinline)) void request_lines(const Expansion& e, int panel, int count, int tile, int tiles) {
    for (int i = 0; i < e.num_streams; i++) {
        const Expansion::Stream& s = e.streams[i];
        for (int p = panel; p < panel + count; p++)
            for (int line = s.lines * tile / tiles; line < s.lines * (tile + 1) / tiles; line++)
                prefetch_l2(s.at + p * s.step + 64 * line);
    }
}

// The lines of one panel, one by one, while tiles compute. Asked for at once they would hold up a tile for as long as they
// take.
class Requests {
  public:
    Requests(const Expansion& e, int panel) : next_(e.streams), end_(e.streams + e.num_streams), panel_(panel) {}
    bool done() const { return next_ == end_; }

    // Of those that follow one another at most `most`, which the caller asks for.
    struct Lines {
        const uint8_t* at;
        int count;
    };
    Lines take(int most) {
        const Lines taken{next_->at + panel_ * next_->step + 64 * used_, std::min(most, next_->lines - used_)};
        used_ += taken.count;
        if (used_ == next_->lines) next_++, used_ = 0;
        return taken;
    }

  private:
    const Expansion::Stream *next_, *end_;
    const size_t panel_;
    int used_ = 0;  // lines of the next stream
};

}  // namespace PENSTOCK_ISA
