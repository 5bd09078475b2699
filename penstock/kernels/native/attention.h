// Attention over the paged cache with an online softmax, 64 keys at a time, in float32 over bfloat16 keys and values.
//
// Rows are (token, head) pairs that share a key/value head. Up to 4 rows (a decoding sequence) read the cache straight
// into registers: the limit is bandwidth, 4 * head_dim bytes per key. More rows (prefill) unpack each chunk once to
// float32 scratch in L1 and run two small matrix products on it: the limit is the float multiply rate.
// Queries come multiplied by scale * log2(e), so the softmax uses 2^x.
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
            for (int v = 0; v < NV; v++) acc[r][v] += left * right[v];
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

// Scratch of one task, all in floats.
struct Workspace {
    float *keys, *values, *scores, *queries, *sums, *weight, *decay, *peak;
    Workspace(float* at, int head_dim) {
        keys = at;                                // [head_dim][CHUNK]
        values = keys + CHUNK * head_dim;         // [CHUNK][head_dim]
        scores = values + CHUNK * head_dim;       // [row of the tile][CHUNK]
        queries = scores + SCORE_ROWS * CHUNK;    // [row][head_dim]
        sums = queries + MAX_ROWS * head_dim;     // [row][head_dim]
        weight = sums + MAX_ROWS * head_dim;      // [row][16]: softmax denominator, still spread over lanes
        decay = weight + MAX_ROWS * 16;
        peak = decay + MAX_ROWS;
    }
};

static size_t attention_scratch(int head_dim) {
    return size_t(2) * CHUNK * head_dim + SCORE_ROWS * CHUNK + MAX_ROWS * (2 * head_dim + 18);
}

// Turn one row of scores into softmax weights relative to the running maximum; only [lo, hi) of the chunk is visible.
PENSTOCK_INLINE void soften(const Workspace& w, int row, float* s, int lo, int hi) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f32x16 v[CHUNK / 16];
#pragma GCC unroll 4
    for (int i = 0; i < CHUNK / 16; i++) v[i] = load<f32x16>(s + 16 * i);
    if (lo > 0 || hi < CHUNK) {
        for (int i = 0; i < CHUNK / 16; i++) {
            const i32x16 index = lanes + 16 * i;
            v[i] = (index >= lo) & (index < hi) ? v[i] : splat(NOTHING);
        }
    }
    const float before = w.peak[row];
    const float highest = maximum(vmax(vmax(v[0], v[1]), vmax(v[2], v[3])));
    const float peak = highest > before ? highest : before;
    const float reference = peak == NOTHING ? 0.f : peak;  // keeps -inf - -inf out
    w.decay[row] = exp2(splat(before - reference))[0];
    w.peak[row] = peak;
    f32x16 total = load<f32x16>(w.weight + 16 * row) * w.decay[row];
#pragma GCC unroll 4
    for (int i = 0; i < CHUNK / 16; i++) {
        v[i] = exp2(v[i] - reference);
        total += v[i];
        store(s + 16 * i, v[i]);
    }
    store(w.weight + 16 * row, total);
}

// Unpack keys [begin, begin + count) and their values to float32.
static void unpack_chunk(const Cache& cache, int head, const int32_t* table, int begin, int count, const Workspace& w) {
    for (int i = 0; i < count; i += 16) {
        const int32_t block = table[(begin + i) / cache.block_size];
        const int offset = (begin + i) % cache.block_size;
        const uint16_t* k = cache.keys(block, head) + 2 * offset;
        for (int d = 0; d < cache.head_dim; d += 2) {
            const u32x16 pair = load<u32x16>(k + size_t(d) * cache.block_size);
            store(w.keys + d * CHUNK + i, low_bf16(pair));
            store(w.keys + (d + 1) * CHUNK + i, high_bf16(pair));
        }
        const uint16_t* v = cache.values(block, head) + size_t(offset) * cache.head_dim;
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
        k[i] = cache.keys(table[key / cache.block_size], head) + 2 * (key % cache.block_size);
    }
    f32x16 acc[R][CHUNK / 16] = {};
    for (int d = 0; d < cache.head_dim; d += 2) {
#pragma GCC unroll 4
        for (int i = 0; i < CHUNK / 16; i++) {
            const u32x16 pair = load<u32x16>(k[i] + size_t(d) * cache.block_size);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const float* q = w.queries + r * cache.head_dim + d;
                acc[r][i] += low_bf16(pair) * q[0];
                acc[r][i] += high_bf16(pair) * q[1];
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
        const uint16_t* from = cache.values(table[key / cache.block_size], head) +
                               size_t(key % cache.block_size) * cache.head_dim + 2 * d;
        const bool both = i + 1 < count;  // an unwritten slot may hold anything, even NaN
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            const u32x16 pair = load<u32x16>(from + 32 * v);
            const f32x16 second = both ? high_bf16(pair) : f32x16{};
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                acc[r][v] += low_bf16(pair) * w.scores[r * CHUNK + i];
                acc[r][v] += second * w.scores[r * CHUNK + i + 1];
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < NV; v++) store(w.sums + r * cache.head_dim + d + 16 * v, acc[r][v]);
}

template <int R>
static __attribute__((noinline)) void attend_few(const Cache& cache, int head, const AttentionTask& task,
                                                 const int (*visible)[2], const Workspace& w) {
    for (int begin = task.key_begin; begin < task.key_end; begin += CHUNK) {
        const int count = task.key_end - begin < CHUNK ? task.key_end - begin : CHUNK;
        score_few<R>(cache, head, task.table, begin, count, w);
        for (int r = 0; r < R; r++) soften(w, r, w.scores + r * CHUNK, visible[r][0] - begin, visible[r][1] - begin);
        int d = 0;
        for (; d + 64 <= cache.head_dim; d += 64) blend_few<R, 4>(cache, head, task.table, begin, count, d, w);
        for (; d < cache.head_dim; d += 16) blend_few<R, 1>(cache, head, task.table, begin, count, d, w);
    }
}

static void attend_many(const Cache& cache, int head, const AttentionTask& task, int rows, const int (*visible)[2],
                        const Workspace& w) {
    const int dim = cache.head_dim;
    for (int begin = task.key_begin; begin < task.key_end; begin += CHUNK) {
        const int count = task.key_end - begin < CHUNK ? task.key_end - begin : CHUNK;
        const int columns = int(round_up(count, 16));
        unpack_chunk(cache, head, task.table, begin, count, w);
        for (int first = 0; first < rows; first += TILE_ROWS) {
            const int height = rows - first < TILE_ROWS ? rows - first : TILE_ROWS;
            float* sums = w.sums + first * dim;
            multiply_rows<TILE_ROWS>(height, w.queries + first * dim, dim, w.keys, CHUNK, dim, columns, w.scores, CHUNK,
                                     nullptr);
            for (int r = first; r < first + height; r++)
                soften(w, r, w.scores + (r - first) * CHUNK, visible[r][0] - begin, visible[r][1] - begin);
            multiply_rows<TILE_ROWS>(height, w.scores, CHUNK, w.values, dim, count, dim, sums, dim, w.decay + first);
        }
    }
}

static void attend(const Cache& cache, int kv_head, const AttentionTask& task, const AttentionBuffers& buffers) {
    const int dim = cache.head_dim, group = buffers.heads / cache.kv_heads, rows = task.num_tokens * group;
    const Workspace w(buffers.scratch, dim);
    int visible[MAX_ROWS][2];
    for (int r = 0; r < rows; r++) {
        const int position = task.first_position + r / group;
        const int oldest = task.window > 0 ? position - task.window + 1 : 0;
        visible[r][0] = oldest > task.key_begin ? oldest : task.key_begin;
        visible[r][1] = position + 1 < task.key_end ? position + 1 : task.key_end;
        memcpy(w.queries + r * dim,
               buffers.q + (task.first_token + r / group) * buffers.q_stride + (kv_head * group + r % group) * dim,
               dim * sizeof(float));
        w.peak[r] = NOTHING;
        store(w.weight + 16 * r, f32x16{});
    }
    memset(w.sums, 0, size_t(rows) * dim * sizeof(float));
    switch (rows) {
        case 1: attend_few<1>(cache, kv_head, task, visible, w); break;
        case 2: attend_few<2>(cache, kv_head, task, visible, w); break;
        case 3: attend_few<3>(cache, kv_head, task, visible, w); break;
        case 4: attend_few<4>(cache, kv_head, task, visible, w); break;
        default: attend_many(cache, kv_head, task, rows, visible, w);
    }
    for (int r = 0; r < rows; r++) {
        const int h = kv_head * group + r % group;
        const float weight = sum(load<f32x16>(w.weight + 16 * r));
        const bool whole = task.partial < 0;
        float* to = whole ? buffers.out + (task.first_token + r / group) * buffers.out_stride + h * dim
                          : buffers.partials + (size_t(task.partial + r / group * task.partial_step) * buffers.heads + h) * (dim + 2);
        const float factor = whole ? 1.f / weight : 1.f;
        for (int d = 0; d < dim; d += 16) store(to + d, load<f32x16>(w.sums + r * dim + d) * factor);
        if (!whole) {
            to[dim] = w.peak[r];
            to[dim + 1] = weight;
        }
    }
}

// Combine `count` consecutive partial results of one token into its output row.
static void merge_partials(const float* partials, int count, int heads, int head_dim, float* out) {
    const size_t step = size_t(heads) * (head_dim + 2);
    for (int h = 0; h < heads; h++) {
        const float* part = partials + size_t(h) * (head_dim + 2);
        float peak = NOTHING, total = 0;
        for (int i = 0; i < count; i++) peak = part[i * step + head_dim] > peak ? part[i * step + head_dim] : peak;
        float* to = out + size_t(h) * head_dim;
        memset(to, 0, head_dim * sizeof(float));
        for (int i = 0; i < count; i++) {
            const float* p = part + i * step;
            const float factor = exp2(splat(p[head_dim] - peak))[0];
            total += factor * p[head_dim + 1];
            for (int d = 0; d < head_dim; d += 16) store(to + d, load<f32x16>(to + d) + load<f32x16>(p + d) * factor);
        }
        for (int d = 0; d < head_dim; d += 16) store(to + d, load<f32x16>(to + d) / total);
    }
}

}  // namespace PENSTOCK_ISA
