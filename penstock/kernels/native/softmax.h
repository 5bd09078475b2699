// Online softmax of attention over any cache format, 64 keys at a time.
//
// Queries come multiplied by scale * log2(e), so it works in powers of two.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace PENSTOCK_ISA {

using namespace penstock;

constexpr int CHUNK = KEY_CHUNK, MAX_ROWS = MAX_QUERY_ROWS;
constexpr int SCORE_ROWS = 8;  // rows whose scores exist at a time
constexpr float NOTHING = -__builtin_inff();

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 3, TILE_VECTORS = 2;
#else
constexpr int TILE_ROWS = 2, TILE_VECTORS = 1;
#endif

// Scratch of one task, all in floats.
struct Workspace {
    float *keys, *values, *scores, *queries, *sums, *weight, *decay, *peak, *totals, *total_weight, *total_peak;
    Workspace(float* at, int head_dim) {
        keys = at;                                // [head_dim][CHUNK]
        values = keys + CHUNK * head_dim;         // [CHUNK][head_dim]
        scores = values + CHUNK * head_dim;       // [row of the tile][CHUNK]
        queries = scores + SCORE_ROWS * CHUNK;    // [row][head_dim]
        sums = queries + MAX_ROWS * head_dim;     // [row][head_dim]
        weight = sums + MAX_ROWS * head_dim;      // [row][16]: softmax denominator, still spread over lanes
        decay = weight + MAX_ROWS * 16;
        peak = decay + MAX_ROWS;
        totals = peak + MAX_ROWS;                 // [row][head_dim]: sums of the ranges so far
        total_weight = totals + MAX_ROWS * head_dim;
        total_peak = total_weight + MAX_ROWS;
    }
};

static size_t attention_scratch(int head_dim) {
    return size_t(2) * CHUNK * head_dim + SCORE_ROWS * CHUNK + MAX_ROWS * (3 * head_dim + 20);
}

// Before a chunk is added to rows [row, row + count): put -infinity where its scores [count][CHUNK] are of keys that a
// row does not see, raise the rows' maxima to the scores, and say what their sums so far have to be multiplied by.
PENSTOCK_INLINE void raise_peaks(const Workspace& w, int row, int count, float* scores, const int (*visible)[2],
                                 int begin) {
    f32x16 highest[SCORE_ROWS];
    bool rises = false;
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
        float* s = scores + r * CHUNK;
        const int lo = visible[row + r][0] - begin, hi = visible[row + r][1] - begin;
        if (lo > 0 || hi < CHUNK) {
            for (int i = 0; i < CHUNK; i += 16) {
                const i32x16 index = lane_numbers() + i;
                store(s + i, select((index >= lo) & (index < hi), load<f32x16>(s + i), splat(NOTHING)));
            }
        }
        highest[r] = vmax(vmax(load<f32x16>(s), load<f32x16>(s + 16)), vmax(load<f32x16>(s + 32), load<f32x16>(s + 48)));
        rises |= any_above(highest[r], w.peak[row + r]);
        w.decay[row + r] = 1.f;
    }
    if (!rises) return;  // rarer with every chunk, and long chains of dependent instructions
    alignas(64) float before[16] = {}, after[16] = {}, decay[16];
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
        const float peak = maximum(highest[r]);
        before[r] = w.peak[row + r];
        after[r] = w.peak[row + r] = peak > before[r] ? peak : before[r];
    }
    store(decay, exp2(load<f32x16>(before) - load<f32x16>(after)));
    for (int r = 0; r < count; r++) w.decay[row + r] = decay[r];
}

// Turn one row of scores into softmax weights relative to its maximum, and hand them to put(i, 16 of them).
template <class Put>
PENSTOCK_INLINE void soften(const Workspace& w, int row, const float* s, Put put) {
    const float reference = w.peak[row] == NOTHING ? 0.f : w.peak[row];  // keeps -inf - -inf out
    f32x16 total = load<f32x16>(w.weight + 16 * row) * w.decay[row];
#pragma GCC unroll 4
    for (int i = 0; i < CHUNK / 16; i++) {
        const f32x16 weights = exp2(load<f32x16>(s + 16 * i) - reference);
        total += weights;
        put(i, weights);
    }
    store(w.weight + 16 * row, total);
}

// What two sums that are relative to different maxima are multiplied by to be added; one of them by 1. Where neither has
// seen a key, both sums are zero.
struct Factors {
    f32x16 before, now;
    Factors(f32x16 peak_before, f32x16 peak_now) {
        const f32x16 rise = peak_now - peak_before, smaller = exp2(-vabs(rise));
        before = select(rise > 0.f, smaller, splat(1.f));
        now = select(rise > 0.f, splat(1.f), smaller);
    }
};

// total = total * before + next * now
PENSTOCK_INLINE void add_scaled(float* total, float before, const float* next, float now, int count) {
    for (int d = 0; d < count; d += 16) store(total + d, fma(load<f32x16>(total + d), before, load<f32x16>(next + d) * now));
}

}  // namespace PENSTOCK_ISA
