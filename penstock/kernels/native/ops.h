// Row operations between the matrix products. Each touches one token and is bound by L1 and L2.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace PENSTOCK_ISA {

using namespace penstock;

// Widths are padded to 16 with zeros by every buffer of the model, so vectors may run past the end.

static void rms_norm(const float* x, const float* weight, float eps, int width, float* out) {
    f32x16 squares = {};
    for (int i = 0; i < width; i += 16) squares += load<f32x16>(x + i) * load<f32x16>(x + i);
    const float inverse = 1.f / __builtin_sqrtf(sum(squares) / width + eps);
    for (int i = 0; i < width; i += 16) store(out + i, load<f32x16>(x + i) * inverse * load<f32x16>(weight + i));
}

// Round `count` values (a multiple of 32) to int8 with one scale, and sum what came out.
PENSTOCK_INLINE float quantize_span(const float* f, int8_t* q, float inverse, int count) {
    i32x16 total = {};
    for (int i = 0; i < count; i += 16) {
        const i32x16 rounded = round_to_int(load<f32x16>(f + i) * inverse);
        store(q + i, __builtin_convertvector(rounded, i8x16));
        total += rounded;
    }
    return sum(to_float(total));
}

PENSTOCK_INLINE float peak_of(const float* f, int count) {
    f32x16 largest = {};
    for (int i = 0; i < count; i += 16) largest = vmax(largest, vabs(load<f32x16>(f + i)));
    return maximum(largest);
}

// Symmetric int8: one scale per row for INT8 weights, one per 32 values for INT4 weights. For BF16 weights a row of
// bfloat16 takes the place of the first half of the floats where there are instructions for it, and nothing is to do else.
// With AMX, INT4 weights get both: few rows are multiplied in int8, many in bfloat16.
static void quantize_row(const Activations& x, int row, int width, Scheme scheme) {
    const float* f = x.f + row * x.stride;
    int8_t* q = x.q + row * x.stride;
    const int padded = int(round_up(width, GROUP));
    if (scheme == BF16) {
#if defined(__AVX512BF16__)
        uint16_t* to = reinterpret_cast<uint16_t*>(x.f + row * x.stride);
        for (size_t i = 0; i < x.stride; i += 16) store_bf16(to + i, load<f32x16>(f + i));
#endif
        return;
    }
    if (scheme == INT8) {
        const float peak = peak_of(f, padded);
        x.scale[row] = peak / 127.f;
        x.sum[row] = quantize_span(f, q, peak > 0 ? 127.f / peak : 0.f, padded);
        return;
    }
    float* scale = x.group_scale + row * (x.stride / GROUP);
    float* group_sum = x.group_sum + row * (x.stride / GROUP);
    for (int i = 0; i < padded; i += GROUP) {
        const float peak = peak_of(f + i, GROUP);
        scale[i / GROUP] = peak / 127.f;
        group_sum[i / GROUP] = quantize_span(f + i, q + i, peak > 0 ? 127.f / peak : 0.f, GROUP) * (peak / 127.f);
#if defined(__AMX_BF16__)
        uint16_t* to = reinterpret_cast<uint16_t*>(x.f + row * x.stride);
        for (int j = i; j < i + GROUP; j += 16) store_bf16(to + j, load<f32x16>(f + j));
#endif
    }
}

// In place, on each run of `block` values (a power of two from 16): the orthonormal Walsh-Hadamard transform. It spreads
// a lone outlier over its block, which is what keeps int8 activations precise.
static void hadamard(float* x, int width, int block) {
    const f32x16 signs[4] = {{1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1},
                             {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
                             {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
                             {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1}};
    const float scale = 1.f / __builtin_sqrtf(float(block));
    for (float* run = x; run < x + width; run += block) {
        for (int half = block / 2; half >= 16; half /= 2)
            for (int i = 0; i < block; i += 2 * half)
                for (int j = i; j < i + half; j += 16) {
                    const f32x16 a = load<f32x16>(run + j), b = load<f32x16>(run + j + half);
                    store(run + j, a + b);
                    store(run + j + half, a - b);
                }
        for (int i = 0; i < block; i += 16) {
            f32x16 v = load<f32x16>(run + i) * scale;
            v = swap_halves(v, 8) + v * signs[0];
            v = swap_halves(v, 4) + v * signs[1];
            v = swap_halves(v, 2) + v * signs[2];
            v = swap_halves(v, 1) + v * signs[3];
            store(run + i, v);
        }
    }
}

// x R in place, as in quantization/rotation.py: signs, the transform within blocks, then a rotation across the blocks.
// `spare` holds width floats.
static void turn(float* x, int width, int block, const float* signs, const float* mix, float* spare) {
    const int blocks = width / block;
    for (int i = 0; i < width; i++) x[i] *= signs[i];
    if (block > 1) hadamard(x, width, block);
    memset(spare, 0, width * sizeof(float));
    for (int i = 0; i < blocks; i++)
        for (int j = 0; j < blocks; j++)
            for (int k = 0; k < block; k++) spare[i * block + k] += mix[i * blocks + j] * x[j * block + k];
    memcpy(x, spare, width * sizeof(float));
}

// Rotary embedding, half-split pairs (i, i + head_dim/2). cos_sin: head_dim/2 cosines, then as many sines.
static void rotate(float* head, const float* cos_sin, int head_dim, float scale) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i += 16) {
        const int lanes = half - i < 16 ? half - i : 16;
        if (lanes == 16) {
            const f32x16 a = load<f32x16>(head + i), b = load<f32x16>(head + half + i);
            const f32x16 c = load<f32x16>(cos_sin + i) * scale, s = load<f32x16>(cos_sin + half + i) * scale;
            store(head + i, a * c - b * s);
            store(head + half + i, b * c + a * s);
        } else {
            for (int j = i; j < half; j++) {
                const float a = head[j], b = head[half + j], c = cos_sin[j] * scale, s = cos_sin[half + j] * scale;
                head[j] = a * c - b * s;
                head[half + j] = b * c + a * s;
            }
        }
    }
}

// The column of the largest value among what several threads kept of a row.
static int32_t best_column(const Best* parts, size_t step, int count) {
    f32x16 best = load<f32x16>(parts->value);
    i32x16 column = load<i32x16>(parts->column);
    for (int i = 1; i < count; i++) {
        const f32x16 value = load<f32x16>(parts[i * step].value);
        const i32x16 other = load<i32x16>(parts[i * step].column);
        const i32x16 better = (value > best) | ((value == best) & (other < column));
        best = better ? value : best;
        column = better ? other : column;
    }
    return index_of_best(best, column);
}

}  // namespace PENSTOCK_ISA
