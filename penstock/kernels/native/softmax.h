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

// Turn one row of scores into softmax weights relative to the running maximum, and hand them to put(i, 16 of them); only
// [lo, hi) of the chunk is visible.
template <class Put>
PENSTOCK_INLINE void soften(const Workspace& w, int row, const float* s, int lo, int hi, Put put) {
    f32x16 v[CHUNK / 16];
#pragma GCC unroll 4
    for (int i = 0; i < CHUNK / 16; i++) v[i] = load<f32x16>(s + 16 * i);
    if (lo > 0 || hi < CHUNK) {
#pragma GCC unroll 4
        for (int i = 0; i < CHUNK / 16; i++) {
            const i32x16 index = lane_numbers() + 16 * i;
            v[i] = select((index >= lo) & (index < hi), v[i], splat(NOTHING));
        }
    }
    const f32x16 highest = vmax(vmax(v[0], v[1]), vmax(v[2], v[3]));
    w.decay[row] = 1.f;
    if (any_above(highest, w.peak[row])) {  // rarer with every chunk, and long chains of dependent instructions
        const float peak = maximum(highest);
        if (w.peak[row] != NOTHING) w.decay[row] = exp2(splat(w.peak[row] - peak))[0];  // else there are no sums yet
        w.peak[row] = peak;
    }
    const float reference = w.peak[row] == NOTHING ? 0.f : w.peak[row];  // keeps -inf - -inf out
    f32x16 total = load<f32x16>(w.weight + 16 * row) * w.decay[row];
#pragma GCC unroll 4
    for (int i = 0; i < CHUNK / 16; i++) {
        const f32x16 weights = exp2(v[i] - reference);
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
