// Attention over bfloat16 keys and values in float32, or in bfloat16 where that is faster (attention_dot2.h).
//
// Up to 4 rows (a decoding sequence) read the cache straight into registers: the limit is bandwidth, 4 * head_dim bytes
// per key. More rows (prefill) unpack each chunk once to float32 scratch in L1 and run two small GEMMs on it:
// the limit is the float multiply rate.
#pragma once

#include "keys_ahead.h"
#include "softmax.h"

namespace PENSTOCK_ISA {

PENSTOCK_INLINE uint16_t* keys_at(const Cache& cache, int head, int32_t block, int offset) {
    return reinterpret_cast<uint16_t*>(cache.keys(block, head)) + 2 * offset;
}

// Of an even offset.
PENSTOCK_INLINE uint16_t* values_at(const Cache& cache, int head, int32_t block, int offset) {
    return reinterpret_cast<uint16_t*>(cache.values(block, head)) + size_t(offset) * cache.head_dim;
}

static void write_bf16(const Cache& cache, int head, int32_t block, int offset, const float* key, const float* value) {
    uint16_t* k = keys_at(cache, head, block, offset);
    uint16_t* v = values_at(cache, head, block, offset / 2 * 2) + offset % 2;
    for (int d = 0; d < cache.head_dim; d += 2) {
        uint16_t* pair = k + size_t(d) * cache.block_size;
        pair[0] = to_bf16(key[d]);
        pair[1] = to_bf16(key[d + 1]);
    }
    for (int d = 0; d < cache.head_dim; d++) v[2 * d] = to_bf16(value[d]);
}

}  // namespace PENSTOCK_ISA

#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)  // CPUs with tiles are Intel's, see api.cpp
#include "attention_dot2.h"
#else

namespace PENSTOCK_ISA {

// C[MR][16 NV] = C * decay + A[MR][depth] B[depth][16 NV]; without decay C starts at zero.
template <int MR, int NV>
PENSTOCK_INLINE void multiply_tile(const float* a, int lda, const float* b, int ldb, int depth, float* c, int ldc,
                                   const float* decay) {
    f32x16 acc[MR][NV];
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[r][v] = decay ? load<f32x16>(c + r * ldc + 16 * v) * decay[r] : f32x16{};
    for (int k = 0; k < depth; k++) {
        f32x16 right[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) right[v] = load<f32x16>(b + size_t(k) * ldb + 16 * v);
#pragma GCC unroll 6
        for (int r = 0; r < MR; r++) {
            const f32x16 left = splat(a[r * lda + k]);
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[r][v] = fma(left, right[v], acc[r][v]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) store(c + r * ldc + 16 * v, acc[r][v]);
}

template <int MR>
PENSTOCK_INLINE void multiply_rows(int rows, const float* a, int lda, const float* b, int ldb, int depth, int columns,
                                   float* c, int ldc, const float* decay) {
    if constexpr (MR > 1) {
        if (rows < MR) return multiply_rows<MR - 1>(rows, a, lda, b, ldb, depth, columns, c, ldc, decay);
    }
    int n = 0;
    for (; n + 16 * TILE_VECTORS <= columns; n += 16 * TILE_VECTORS)
        multiply_tile<MR, TILE_VECTORS>(a, lda, b + n, ldb, depth, c + n, ldc, decay);
    for (; n < columns; n += 16) multiply_tile<MR, 1>(a, lda, b + n, ldb, depth, c + n, ldc, decay);
}

// Unpack keys [begin, begin + count) and their values to float32.
static void unpack_chunk(const Cache& cache, int head, const int32_t* table, int begin, int count, const Workspace& w) {
    for (int i = 0; i < count; i += 16) {
        const int32_t block = table[(begin + i) / cache.block_size];
        const int offset = (begin + i) % cache.block_size;
        const uint16_t* k = keys_at(cache, head, block, offset);
        for (int d = 0; d < cache.head_dim; d += 2) {
            const u32x16 pair = load<u32x16>(k + size_t(d) * cache.block_size);
            store(w.keys + d * CHUNK + i, low_bf16(pair));
            store(w.keys + (d + 1) * CHUNK + i, high_bf16(pair));
        }
        const uint16_t* v = values_at(cache, head, block, offset);
        for (int j = 0; j < 16; j += 2, v += 2 * cache.head_dim) {
            for (int d = 0; d < cache.head_dim; d += 16) {
                const u32x16 pair = load<u32x16>(v + 2 * d);
                store(w.values + (i + j) * cache.head_dim + d, low_bf16(pair));
                store(w.values + (i + j + 1) * cache.head_dim + d, high_bf16(pair));
            }
        }
    }
}

// Scores of R rows against up to 64 keys, straight from the cache.
template <int R>
PENSTOCK_INLINE void score_few(const Cache& cache, int head, const int32_t* table, int begin, int count,
                               const Workspace& w) {
    const uint16_t* k[CHUNK / 16];
    for (int i = 0; i < CHUNK / 16; i++) {
        const int key = 16 * i < count ? begin + 16 * i : begin;  // beyond the end: any readable keys, masked later
        k[i] = keys_at(cache, head, table[key / cache.block_size], key % cache.block_size);
    }
    f32x16 acc[R][CHUNK / 16] = {};
    for (int d = 0; d < cache.head_dim; d += 2) {
#pragma GCC unroll 4
        for (int i = 0; i < CHUNK / 16; i++) {
            const u32x16 pair = load<u32x16>(k[i] + size_t(d) * cache.block_size);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const float* q = w.queries + r * cache.head_dim + d;
                acc[r][i] = fma(high_bf16(pair), q[1], fma(low_bf16(pair), q[0], acc[r][i]));
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < CHUNK / 16; i++) store(w.scores + r * CHUNK + 16 * i, acc[r][i]);
}

// sums = sums * decay + weights x values for columns [d, d + 16 NV).
template <int R, int NV>
PENSTOCK_INLINE void blend_few(const Cache& cache, int head, const int32_t* table, int begin, int count, int d,
                               const Workspace& w) {
    f32x16 acc[R][NV];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < NV; v++) acc[r][v] = load<f32x16>(w.sums + r * cache.head_dim + d + 16 * v) * w.decay[r];
    for (int i = 0; i < count; i += 2) {
        const int key = begin + i;
        const uint16_t* from =
            values_at(cache, head, table[key / cache.block_size], key % cache.block_size) + 2 * d;
        const bool both = i + 1 < count;  // an unwritten slot may hold anything, even NaN
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            const u32x16 pair = load<u32x16>(from + 32 * v);
            const f32x16 second = both ? high_bf16(pair) : f32x16{};
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const float* weights = w.scores + r * CHUNK + i;
                acc[r][v] = fma(second, weights[1], fma(low_bf16(pair), weights[0], acc[r][v]));
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < NV; v++) store(w.sums + r * cache.head_dim + d + 16 * v, acc[r][v]);
}

PENSTOCK_INLINE void soften_in_place(const Workspace& w, int row, int count, const int (*visible)[2], int begin) {
    raise_peaks(w, row, count, w.scores, visible, begin);
    for (int r = 0; r < count; r++) {
        float* s = w.scores + r * CHUNK;
        soften(w, row + r, s, [&](int i, f32x16 p) { store(s + 16 * i, p); });
    }
}

template <int R>
static __attribute__((noinline)) void attend_bf16_few(const Cache& cache, int head, const int32_t* table, Range keys,
                                                      const int (*visible)[2], const Workspace& w) {
    for (int begin = keys.begin; begin < keys.end; begin += CHUNK) {
        const int count = keys.end - begin < CHUNK ? keys.end - begin : CHUNK;
        score_few<R>(cache, head, table, begin, count, w);
        soften_in_place(w, 0, R, visible, begin);
        int d = 0;
        for (; d + 64 <= cache.head_dim; d += 64) blend_few<R, 4>(cache, head, table, begin, count, d, w);
        for (; d < cache.head_dim; d += 16) blend_few<R, 1>(cache, head, table, begin, count, d, w);
    }
}

static void attend_bf16_many(const Cache& cache, int head, const int32_t* table, Range keys, int rows,
                             const int (*visible)[2], const Workspace& w) {
    const int dim = cache.head_dim;
    for (int begin = keys.begin; begin < keys.end; begin += CHUNK) {
        const int count = keys.end - begin < CHUNK ? keys.end - begin : CHUNK;
        const int columns = int(round_up(count, 16));
        unpack_chunk(cache, head, table, begin, count, w);
        for (int first = 0; first < rows; first += TILE_ROWS) {
            const int height = rows - first < TILE_ROWS ? rows - first : TILE_ROWS;
            float* sums = w.sums + first * dim;
            multiply_rows<TILE_ROWS>(height, w.queries + first * dim, dim, w.keys, CHUNK, dim, columns, w.scores, CHUNK,
                                     nullptr);
            soften_in_place(w, first, height, visible, begin);
            multiply_rows<TILE_ROWS>(height, w.scores, CHUNK, w.values, dim, count, dim, sums, dim, w.decay + first);
        }
    }
}

static void prepare_bf16(const Workspace&, int, int) {}  // queries are multiplied as they are

static void attend_bf16(const Cache& cache, int head, const int32_t* table, Range keys, int rows,
                        const int (*visible)[2], const Workspace& w, const KeysAhead&) {
    switch (rows) {
        case 1: return attend_bf16_few<1>(cache, head, table, keys, visible, w);
        case 2: return attend_bf16_few<2>(cache, head, table, keys, visible, w);
        case 3: return attend_bf16_few<3>(cache, head, table, keys, visible, w);
        case 4: return attend_bf16_few<4>(cache, head, table, keys, visible, w);
        default: return attend_bf16_many(cache, head, table, keys, rows, visible, w);
    }
}

}  // namespace PENSTOCK_ISA

#endif
