// Attention over bfloat16 keys and values with bfloat16 dot products, straight from the cache, for one row or many.
//
// Queries and softmax weights are rounded to bfloat16; sums are float32.
#pragma once

#include "keys_ahead.h"
#include "softmax.h"

namespace PENSTOCK_ISA {

// Up to 64 keys, 16 by 16 where their bytes lie together.
struct PairChunk {
    int begin, count;
    const uint16_t *keys[CHUNK / 16], *values[CHUNK / 16];
};

// Scratch that the float32 path would unpack to.
struct PairWorkspace {
    uint16_t *queries, *weights;  // [row][head_dim], [row of the tile][CHUNK]
    explicit PairWorkspace(const Workspace& w)
        : queries(reinterpret_cast<uint16_t*>(w.keys)), weights(reinterpret_cast<uint16_t*>(w.values)) {}
};

// Scores of R rows.
template <int R>
PENSTOCK_INLINE void score_pairs(const Cache& cache, const PairChunk& c, const uint16_t* q, float* scores) {
    f32x16 acc[R][CHUNK / 16] = {};
    for (int d = 0; d < cache.head_dim; d += 2) {
        u32x16 keys[CHUNK / 16];
#pragma GCC unroll 4
        for (int i = 0; i < CHUNK / 16; i++) keys[i] = load<u32x16>(c.keys[i] + size_t(d) * cache.block_size);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int i = 0; i < CHUNK / 16; i++) acc[r][i] = dot2(acc[r][i], keys[i], q + r * cache.head_dim + d);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int i = 0; i < CHUNK / 16; i++) store(scores + r * CHUNK + 16 * i, acc[r][i]);
}

// sums = sums * decay + weights x values for columns [d, d + 16 NV).
template <int R, int NV>
PENSTOCK_INLINE void blend_pairs(const Cache& cache, const PairChunk& c, int d, const uint16_t* weights, float* sums,
                                 const float* decay) {
    const int dim = cache.head_dim;
    f32x16 acc[R][NV];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[r][v] = load<f32x16>(sums + r * dim + d + 16 * v) * decay[r];
    for (int key = 0; key < c.count; key += 2) {
        const uint16_t* from = c.values[key / 16] + (key % 16) * dim + 2 * d;
        const uint32_t written = key + 1 < c.count ? 0xffffffffu : 0xffffu;  // an unwritten slot may hold a NaN
        u32x16 values[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) values[v] = load<u32x16>(from + 32 * v) & written;
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[r][v] = dot2(acc[r][v], values[v], weights + r * CHUNK + key);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) store(sums + r * dim + d + 16 * v, acc[r][v]);
}

// One chunk for rows [row, row + R).
template <int R>
static __attribute__((noinline)) void attend_pairs(const Cache& cache, const PairChunk& c, int row,
                                                   const int (*visible)[2], const Workspace& w,
                                                   const PairWorkspace& p) {
    const int dim = cache.head_dim;
    score_pairs<R>(cache, c, p.queries + row * dim, w.scores);
    raise_peaks(w, row, R, w.scores, visible, c.begin);
    for (int r = 0; r < R; r++) {
        uint16_t* weights = p.weights + r * CHUNK;
        soften(w, row + r, w.scores + r * CHUNK, [&](int i, f32x16 v) { store_bf16(weights + 16 * i, v); });
    }
    float *sums = w.sums + row * dim, *decay = w.decay + row;
    int d = 0;
    for (; d + 64 <= dim; d += 64) blend_pairs<R, 4>(cache, c, d, p.weights, sums, decay);
    for (; d < dim; d += 16) blend_pairs<R, 1>(cache, c, d, p.weights, sums, decay);
}

template <int R>
PENSTOCK_INLINE void attend_pair_rows(int rows, const Cache& cache, const PairChunk& c, int row,
                                      const int (*visible)[2], const Workspace& w, const PairWorkspace& p) {
    if constexpr (R > 1) {
        if (rows < R) return attend_pair_rows<R - 1>(rows, cache, c, row, visible, w, p);
    }
    attend_pairs<R>(cache, c, row, visible, w, p);
}

static void prepare_bf16(const Workspace& w, int rows, int dim) {
    for (int i = 0; i < rows * dim; i += 16) store_bf16(PairWorkspace(w).queries + i, load<f32x16>(w.queries + i));
}

static void attend_bf16(const Cache& cache, int head, const int32_t* table, Range keys, int rows,
                        const int (*visible)[2], const Workspace& w, const KeysAhead&) {
    const PairWorkspace p(w);
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int begin = keys.begin; begin < keys.end; begin += CHUNK) {
        PairChunk chunk;
        chunk.begin = begin;
        chunk.count = keys.end - begin < CHUNK ? keys.end - begin : CHUNK;
        for (int i = 0; i < CHUNK / 16; i++) {
            const int key = 16 * i < chunk.count ? begin + 16 * i : begin;  // beyond the end: any readable keys
            chunk.keys[i] = keys_at(cache, head, table[key / cache.block_size], key % cache.block_size);
            chunk.values[i] = values_at(cache, head, table[key / cache.block_size], key % cache.block_size);
        }
        for (int t = 0; t < tiles; t++) {
            const int first = rows * t / tiles, last = rows * (t + 1) / tiles;
            attend_pair_rows<TILE_ROWS>(last - first, cache, chunk, first, visible, w, p);
        }
    }
}

}  // namespace PENSTOCK_ISA
