// Row operations between the GEMMs: norms, quantisation, Hadamard transform, RoPE. Each touches one token and is
// bound by L1 and L2.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace PENSTOCK_ISA {

using namespace penstock;

// Widths are padded to 16 with zeros by every buffer of the model, so vectors may run past the end.

static void rms_norm(const float* x, const float* weight, float eps, int width, float* out) {
    f32x16 squares = {};
    for (int i = 0; i < width; i += 16) squares = fma(load<f32x16>(x + i), load<f32x16>(x + i), squares);
    const float inverse = 1.f / __builtin_sqrtf(sum(squares) / width + eps);
    for (int i = 0; i < width; i += 16) store(out + i, load<f32x16>(x + i) * inverse * load<f32x16>(weight + i));
}

// Round `count` values (a multiple of 32) to int8 with one scale, and sum what came out.
PENSTOCK_INLINE float quantize_span(const float* f, int8_t* q, float inverse, int count) {
    i32x16 total = {};
    for (int i = 0; i < count; i += 16) {
        const i32x16 rounded = round_product(load<f32x16>(f + i), splat(inverse));
        store_bytes(q + i, rounded);
        total += rounded;
    }
    return sum(to_float(total));
}

PENSTOCK_INLINE float peak_of(const float* f, int count) {
    f32x16 largest = {};
    for (int i = 0; i < count; i += 16) largest = vmax(largest, vabs(load<f32x16>(f + i)));
    return maximum(largest);
}

// 256 levels between the smallest and the largest of a row and 0, one of which is 0. Padding becomes q = 0: the weights
// there are no zeros.
static void quantize_affine(const Activations& x, int row, int width, int padded) {
    const float* f = x.f + row * x.stride;
    int8_t* q = x.q + row * x.stride;
    f32x16 low = {}, high = {};
    for (int i = 0; i < padded; i += 16) {
        low = vmax(low, -load<f32x16>(f + i));
        high = vmax(high, load<f32x16>(f + i));
    }
    const float scale = (maximum(high) + maximum(low)) / 255.f, inverse = scale > 0 ? 1.f / scale : 0.f;
    const float middle = 128.f - __builtin_rintf(maximum(low) * inverse);
    i32x16 total = {};
    for (int i = 0; i < padded; i += 16) {
        const f32x16 level = fma(load<f32x16>(f + i), inverse, splat(-middle));
        const i32x16 rounded = round_to_int(vmax(-vmax(-level, splat(-127.f)), splat(-128.f)));
        store_bytes(q + i, rounded);
        total += rounded;
    }
    float sum_of_row = sum(to_float(total));
    for (int i = width; i < padded; i++) {
        sum_of_row -= q[i];
        q[i] = 0;
    }
    x.scale[row] = scale;
    x.sum[row] = sum_of_row * scale;
    x.middle[row] = middle * scale;
}

// int8: one scale per row for INT8 weights, for INT4 weights symmetric with one per 32 values. For BF16 weights a row of
// bfloat16 takes the place of the first half of the floats where there are instructions for it; nothing is to do else.
static void quantize_row(const Activations& x, int row, int width, Scheme scheme) {
    const float* f = x.f + row * x.stride;
    int8_t* q = x.q + row * x.stride;
    const int padded = int(round_up(width, GROUP));
    if (scheme == F32) return;
    if (scheme == BF16) {
#if defined(__AVX512BF16__)
        uint16_t* to = reinterpret_cast<uint16_t*>(x.f + row * x.stride);
        for (size_t i = 0; i < x.stride; i += 16) store_bf16(to + i, load<f32x16>(f + i));
#endif
        return;
    }
    if (scheme == INT8) return quantize_affine(x, row, width, padded);
    GroupLevel* groups = x.groups_of(row);
    for (int i = 0; i < padded; i += GROUP) {
        const float peak = peak_of(f + i, GROUP);
        const float sum = quantize_span(f + i, q + i, peak > 0 ? 127.f / peak : 0.f, GROUP);
        groups[i / GROUP] = {peak / 127.f, sum * (peak / 127.f)};
    }
}

// The last stages of the transform below, on COUNT vectors that follow each other.
template <int COUNT>
PENSTOCK_INLINE void hadamard_vectors(float* x, float scale) {
    alignas(64) static constexpr float SIGNS[4][16] = {{1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1},
                             {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
                             {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
                             {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1}};
    f32x16 v[COUNT];
    for (int i = 0; i < COUNT; i++) v[i] = load<f32x16>(x + 16 * i) * scale;
#pragma GCC unroll 2
    for (int half = COUNT / 2; half > 0; half /= 2)
#pragma GCC unroll 4
        for (int i = 0; i < COUNT; i++) {
            if (i & half) continue;
            const f32x16 a = v[i], b = v[i + half];
            v[i] = a + b;
            v[i + half] = a - b;
        }
    for (int i = 0; i < COUNT; i++) {
        v[i] = fma(v[i], load<f32x16>(SIGNS[0]), swap_halves<8>(v[i]));
        v[i] = fma(v[i], load<f32x16>(SIGNS[1]), swap_halves<4>(v[i]));
        v[i] = fma(v[i], load<f32x16>(SIGNS[2]), swap_halves<2>(v[i]));
        v[i] = fma(v[i], load<f32x16>(SIGNS[3]), swap_halves<1>(v[i]));
        store(x + 16 * i, v[i]);
    }
}

// In place, on each run of `block` values (a power of two from 16): the orthonormal Walsh-Hadamard transform. It spreads
// a lone outlier over its block, which is what keeps int8 activations precise.
static void hadamard(float* x, int width, int block) {
    const float scale = 1.f / __builtin_sqrtf(float(block));
    for (float* run = x; run < x + width; run += block)
        for (int half = block / 2; half >= 64; half /= 2)
            for (int i = 0; i < block; i += 2 * half)
                for (int j = i; j < i + half; j += 16) {
                    const f32x16 a = load<f32x16>(run + j), b = load<f32x16>(run + j + half);
                    store(run + j, a + b);
                    store(run + j + half, a - b);
                }
    if (block == 16) {
        for (int i = 0; i < width; i += 16) hadamard_vectors<1>(x + i, scale);
    } else if (block == 32) {
        for (int i = 0; i < width; i += 32) hadamard_vectors<2>(x + i, scale);
    } else {
        for (int i = 0; i < width; i += 64) hadamard_vectors<4>(x + i, scale);
    }
}

// Rotary embedding, half-split pairs (i, i + head_dim/2). cos_sin: head_dim/2 cosines, then as many sines.
static void rotate(float* head, const float* cos_sin, int head_dim, float scale) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i += 16) {
        const int lanes = half - i < 16 ? half - i : 16;
        if (lanes == 16) {
            const f32x16 a = load<f32x16>(head + i), b = load<f32x16>(head + half + i);
            const f32x16 c = load<f32x16>(cos_sin + i) * scale, s = load<f32x16>(cos_sin + half + i) * scale;
            store(head + i, fma(a, c, -(b * s)));
            store(head + half + i, fma(b, c, a * s));
        } else {
            for (int j = i; j < half; j++) {
                const float a = head[j], b = head[half + j], c = cos_sin[j] * scale, s = cos_sin[half + j] * scale;
                head[j] = a * c - b * s;
                head[half + j] = b * c + a * s;
            }
        }
    }
}

static float dot_bf16(const float* x, const uint16_t* w, int width) {
    f32x16 total = {};
    int i = 0;
    for (; i + 16 <= width; i += 16) total = fma(load<f32x16>(x + i), from_bf16(w + i), total);
    float rest = 0;
    for (; i < width; i++) rest += x[i] * bf16_to_float(w[i]);
    return sum(total) + rest;
}

}  // namespace PENSTOCK_ISA
