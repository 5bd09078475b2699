// LoRA adapters: y += B (A x) for rows that use the same adapter. Both factors are small and read once per step, so their
// bytes are what a step with many adapters pays for.
//
// A row's sums run in one order whatever rows are computed beside it, so its numbers do not depend on them.
#pragma once

#include "ops.h"

namespace PENSTOCK_ISA {

using namespace penstock;

constexpr int REQUESTED_AHEAD = 2048;  // bytes. Each factor is one stream, and too short for the hardware to follow it

// Sums of ROWS rows for one panel of 16 outputs. Weights are w / scale + 128 as unsigned bytes.
template <int ROWS>
PENSTOCK_INLINE void factor_int8(const uint8_t* w, const int8_t* x, size_t stride, int inputs, i32x16 (&acc)[ROWS]) {
    for (int k = 0; k < inputs; k += 4, w += 64) {
        prefetch(w + REQUESTED_AHEAD);
        const u8x64 four = load<u8x64>(w);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) acc[r] = dot4(acc[r], four, x + r * stride + k);
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
            i32x16 acc[ROWS] = {};
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

// y += B h for rows of one adapter from `row` on, and the 16 outputs of `panel`.
template <int ROWS>
PENSTOCK_INLINE void expand_panel(const Expansion& e, const Factor& b, int row, int panel, f32x16 (&y)[ROWS]) {
    const uint8_t* w = b.panels + panel * b.panel_bytes;
    const LowRank& h = e.h;
    const int module = e.modules[panel];
    const size_t at = row * h.stride + module * b.inputs;
    if (b.format == BF16)
        return factor_bf16<ROWS>(w, b.inputs, y, [&](int r, int k) { return h.f[at + r * h.stride + k]; });
    const int32_t* offset = h.offset + MODULES * row + module;
    const float* scale = h.scale + MODULES * row + module;
    i32x16 acc[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) acc[r] = i32x16{} + offset[MODULES * r];
    for (int k = 0; k < b.inputs; k += 4) {
        const u8x64 four = load<u8x64>(w + 16 * k);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) acc[r] = dot4(acc[r], four, h.q + at + r * h.stride + k);
    }
    const f32x16 scales = load<f32x16>(w + 16 * b.inputs);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) y[r] = fma(to_float(acc[r]), scales * scale[MODULES * r], y[r]);
}

template <int ROWS>
PENSTOCK_INLINE void expand_rows(const Expansion& e, const Factor& b, int row, int panel, f32x16 (*y)[2]) {
    for (int half = 0; half < 2 && 2 * panel + half < b.num_panels; half++) {
        f32x16 sums[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) sums[r] = y[r][half];
        expand_panel<ROWS>(e, b, row, 2 * panel + half, sums);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) y[r][half] = sums[r];
    }
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

// All lines of the streams that are due with tile `tile` of `tiles`, in `count` panels of the GEMM from `panel` on.
static __attribute__((noinline)) void request_lines(const Expansion& e, int panel, int count, int tile, int tiles) {
    for (int i = e.num_streams * tile / tiles; i < e.num_streams * (tile + 1) / tiles; i++) {
        const uint8_t* from = e.streams[i].panels + panel * e.streams[i].panel_bytes;
        for (size_t at = 0; at < count * e.streams[i].panel_bytes; at += 64) prefetch_l2(from + at);
    }
}

// The same lines one by one, while tiles compute. Asked for at once they would hold up a tile for as long as they take.
class Requests {
  public:
    Requests(const Expansion& e, int panel) {
        for (int i = 0; i < e.num_streams; i++)
            for (size_t at = 0; at < e.streams[i].panel_bytes && count_ < MOST; at += 64)
                lines_[count_++] = {e.streams[i].panels + panel * e.streams[i].panel_bytes + at, e.streams[i].panel_bytes};
    }
    void begin_panel() { next_ = 0; }
    inline __attribute__((always_inline)) void request() {
        if (next_ == count_) return;
        Line& line = lines_[next_++];
        prefetch_l2(line.at);
        line.at += line.step;  // of the next panel
    }

  private:
    static constexpr int MOST = 256;  // the others come when they are needed
    struct Line {
        const uint8_t* at;
        size_t step;
    };
    Line lines_[MOST];
    int count_ = 0, next_ = 0;
};

}  // namespace PENSTOCK_ISA
