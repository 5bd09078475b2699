// LoRA adapters: y += B (A x) for rows that use the same adapter. Both factors are small and read once per step, so their
// bytes are what a step with many adapters pays for.
//
// A row's sums run in one order whatever rows are computed beside it, so its numbers do not depend on them.
#pragma once

#include "gemm.h"
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

template <int ROWS>
static void shrink_rows(const Factor& a, const Activations& x, Scheme scheme, int row, const LowRank& h, int to) {
    for (int p = 0; p < a.num_panels; p++) {
        const uint8_t* w = a.panels + p * a.panel_bytes;
        if (a.format == INT8) {
            i32x16 acc[ROWS] = {};
            factor_int8<ROWS>(w, x.q + row * x.stride, x.stride, a.inputs, acc);
            const f32x16 scale = load<f32x16>(w + 16 * a.inputs), total = load<f32x16>(w + 16 * a.inputs + 64);
            for (int r = 0; r < ROWS; r++) {
                const f32x16 product = fma(to_float(acc[r]), x.scale[row + r], splat(-128.f * x.sum[row + r]));
                store(h.f + (to + r) * h.stride + 16 * p, fma(total, x.middle[row + r], product * scale));
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
        for (int r = 0; r < ROWS; r++) store(h.f + (to + r) * h.stride + 16 * p, acc[r]);
    }
    for (int r = to; a.format == INT8 && r < to + ROWS; r++)
        for (int m = 0; m * h.rank < 16 * a.num_panels; m++) {
            const float* f = h.f + r * h.stride + m * h.rank;
            const float peak = peak_of(f, h.rank);
            const float total = quantize_span(f, h.q + r * h.stride + m * h.rank, peak > 0 ? 127.f / peak : 0.f, h.rank);
            h.scale[MODULES * r + m] = peak / 127.f;
            h.offset[MODULES * r + m] = -128 * int32_t(total);
        }
}

template <int ROWS>
PENSTOCK_INLINE void expand_panel(const Factor& b, const LowRank& h, int from, int panel, int module, f32x16 (&y)[ROWS]) {
    const uint8_t* w = b.panels + panel * b.panel_bytes;
    const size_t at = from * h.stride + module * h.rank;
    if (b.format == INT8) {
        const int32_t* offset = h.offset + MODULES * from + module;
        const float* scale = h.scale + MODULES * from + module;
        i32x16 acc[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) acc[r] = i32x16{} + offset[MODULES * r];
        factor_int8<ROWS>(w, h.q + at, h.stride, h.rank, acc);
        prefetch(w + 16 * h.rank + REQUESTED_AHEAD);
        const f32x16 scales = load<f32x16>(w + 16 * h.rank);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) y[r] = fma(to_float(acc[r]), scales * scale[MODULES * r], y[r]);
    } else {
        factor_bf16<ROWS>(w, h.rank, y, [&](int r, int k) { return h.f[at + r * h.stride + k]; });
    }
}

template <int ROWS>
static void expand_rows(const Factor& b, const LowRank& h, int from, const uint8_t* modules, int columns, float* out,
                        size_t stride) {
    const int whole = columns / 16;
    for (int p = 0; p < whole; p++) {
        f32x16 y[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) y[r] = load<f32x16>(out + r * stride + 16 * p);
        expand_panel<ROWS>(b, h, from, p, modules[p], y);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) store(out + r * stride + 16 * p, y[r]);
    }
    if (16 * whole == columns) return;
    f32x16 y[ROWS] = {};
    expand_panel<ROWS>(b, h, from, whole, modules[whole], y);
    for (int r = 0; r < ROWS; r++) put(out + r * stride + 16 * whole, y[r], columns - 16 * whole, true);
}

// A x of `count` rows of x from `row` on, into rows of h from `to` on. `scheme` is what x was prepared for.
static void shrink(const Factor& a, const Activations& x, Scheme scheme, int row, int count, const LowRank& h, int to) {
    for (; count >= 4; count -= 4, row += 4, to += 4) shrink_rows<4>(a, x, scheme, row, h, to);
    if (count == 3) shrink_rows<3>(a, x, scheme, row, h, to);
    if (count == 2) shrink_rows<2>(a, x, scheme, row, h, to);
    if (count == 1) shrink_rows<1>(a, x, scheme, row, h, to);
}

// out += B h for `count` rows of h from `from` on, and columns of which `b` and `modules` describe the first panel.
static void expand(const Factor& b, const LowRank& h, int from, int count, const uint8_t* modules, int columns,
                   float* out, size_t stride) {
    for (; count >= 4; count -= 4, from += 4, out += 4 * stride) expand_rows<4>(b, h, from, modules, columns, out, stride);
    if (count == 3) expand_rows<3>(b, h, from, modules, columns, out, stride);
    if (count == 2) expand_rows<2>(b, h, from, modules, columns, out, stride);
    if (count == 1) expand_rows<1>(b, h, from, modules, columns, out, stride);
}

// The epilogue SILU_MUL by itself, for a row of whole panels.
static void silu_mul(const float* pairs, int width, float* out) {
    for (int i = 0; i < width; i += 16)
        put(out + i, silu(load<f32x16>(pairs + 2 * i)) * load<f32x16>(pairs + 2 * i + 16), width - i, false);
}

}  // namespace PENSTOCK_ISA
