// What an encoder computes between its GEMMs: LayerNorm, and attention of all tokens of a sequence to all of them.
//
// A row's numbers do not depend on the rows beside it: each has sums of its own, in the same order.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace PENSTOCK_ISA {

using namespace penstock;

#if defined(__AVX512F__)
constexpr int QUERY_ROWS = 8;  // whose sums stay in registers
#else
constexpr int QUERY_ROWS = 4;
#endif

static void layer_norm(const float* x, const float* weight, const float* bias, float eps, int width, float* out) {
    f32x16 total = {}, squares = {};
    for (int i = 0; i < width; i += 16) total += load<f32x16>(x + i);
    const float mean = sum(total) / width;
    for (int i = 0; i < width; i += 16) {
        const f32x16 centred = load<f32x16>(x + i) - mean;
        squares = fma(centred, centred, squares);
    }
    const float inverse = 1.f / __builtin_sqrtf(sum(squares) / width + eps);
    for (int i = 0; i < width; i += 16)
        store(out + i, fma((load<f32x16>(x + i) - mean) * inverse, load<f32x16>(weight + i), load<f32x16>(bias + i)));
}

// Keys, transposed [head_dim][keys], and queries and scores of a few rows.
static size_t dense_scratch(int tokens, int head_dim) {
    return round_up(tokens, 16) * (head_dim + QUERY_ROWS) + QUERY_ROWS * head_dim;
}

static void attend_dense(const DenseAttention& head) {
    const int tokens = head.tokens, dim = head.head_dim, keys = int(round_up(tokens, 16));
    const float scale = 1.44269504f / __builtin_sqrtf(float(dim));  // the softmax works in powers of two
    float *transposed = head.scratch, *scores = transposed + size_t(keys) * dim, *queries = scores + QUERY_ROWS * keys;
    for (int t = 0; t < keys; t++)
        for (int d = 0; d < dim; d++) transposed[size_t(d) * keys + t] = t < tokens ? head.k[t * head.stride + d] : 0.f;
    for (int first = 0; first < tokens; first += QUERY_ROWS) {
        const int rows = tokens - first < QUERY_ROWS ? tokens - first : QUERY_ROWS;
        for (int r = 0; r < QUERY_ROWS; r++)  // the last one stands in for those that do not exist
            memcpy(queries + r * dim, head.q + (first + (r < rows ? r : rows - 1)) * head.stride, dim * sizeof(float));
        f32x16 peak[QUERY_ROWS];
        for (int r = 0; r < QUERY_ROWS; r++) peak[r] = splat(-__builtin_inff());
        for (int t = 0; t < keys; t += 16) {
            f32x16 acc[QUERY_ROWS] = {};
            for (int d = 0; d < dim; d++) {
                const f32x16 key = load<f32x16>(transposed + size_t(d) * keys + t);
#pragma GCC unroll 8
                for (int r = 0; r < QUERY_ROWS; r++) acc[r] = fma(key, queries[r * dim + d], acc[r]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < QUERY_ROWS; r++) {
                const f32x16 score = select(lane_numbers() < tokens - t, acc[r] * scale, splat(-__builtin_inff()));
                peak[r] = vmax(peak[r], score);
                store(scores + r * keys + t, score);
            }
        }
        float weight[QUERY_ROWS];
        for (int r = 0; r < QUERY_ROWS; r++) {
            const float highest = maximum(peak[r]);
            f32x16 total = {};
            for (int t = 0; t < keys; t += 16) {
                const f32x16 part = exp2(load<f32x16>(scores + r * keys + t) - highest);
                total += part;
                store(scores + r * keys + t, part);
            }
            weight[r] = 1.f / sum(total);
        }
        for (int d = 0; d < dim; d += 16) {
            f32x16 acc[QUERY_ROWS] = {};
            for (int t = 0; t < tokens; t++) {
                const f32x16 value = load<f32x16>(head.v + t * head.stride + d);
#pragma GCC unroll 8
                for (int r = 0; r < QUERY_ROWS; r++) acc[r] = fma(value, scores[r * keys + t], acc[r]);
            }
            for (int r = 0; r < rows; r++) store(head.out + (first + r) * head.out_stride + d, acc[r] * weight[r]);
        }
    }
}

}  // namespace PENSTOCK_ISA
