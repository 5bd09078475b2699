// Attention over int8 keys and values: integer dot products straight from the cache, for one row or many.
//
// Queries become one plane of int8 and softmax weights two of uint8, 256 * high + low, which are two passes over a
// chunk that lies in L1.
#pragma once

#include "keys_ahead.h"
#include "ops.h"
#include "softmax.h"

namespace PENSTOCK_ISA {

constexpr float TOO_SMALL = 1e-30f;  // whose reciprocal is out of range; counts as zero
constexpr float LARGEST_WEIGHT = 65535;

// Scratch that the bfloat16 path would unpack to.
struct Int8Workspace {
    int8_t* queries;   // [row][head_dim]
    uint8_t* weights;  // [row of the tile][2][CHUNK]
    float* query_scale;
    int32_t* query_offset;  // 128 * sum: undoes the + 128 of keys
    float* weight_scale;    // of softmax weights in the present chunk
    Int8Workspace(const Workspace& w, int head_dim) {
        queries = reinterpret_cast<int8_t*>(w.keys);
        weights = reinterpret_cast<uint8_t*>(queries + MAX_ROWS * head_dim);
        query_scale = w.values;
        query_offset = reinterpret_cast<int32_t*>(query_scale + MAX_ROWS);
        weight_scale = query_scale + 2 * MAX_ROWS;
    }
};

// Softmax weights, each times the scale of its value, as integers of 16 bits: a weight is at most 1, so they reach at
// most as far as the largest of the scales.
struct WeightScale {
    float scale, inverse;
    explicit WeightScale(float largest_scale = 0)
        : scale(largest_scale / LARGEST_WEIGHT),
          inverse(largest_scale > TOO_SMALL ? LARGEST_WEIGHT / largest_scale : 0.f) {}
};

// Up to 64 keys, 16 by 16 where their bytes lie together.
struct Chunk {
    int begin, count;
    const uint8_t* keys[CHUNK / 16];
    const int8_t* values[CHUNK / 16];
    f32x16 key_scale[CHUNK / 16], value_scale[CHUNK / 16];
    WeightScale weights;  // of a row that sees all of it

    // Of a row that sees [lo, hi): keys it may not see must not decide how its weights are rounded, or a text would get
    // other probabilities when it is scored than when it was generated.
    WeightScale weights_of(int lo, int hi) const {
        return lo <= 0 && hi >= count ? weights : weights_of_part(lo, hi);
    }
    __attribute__((noinline)) WeightScale weights_of_part(int lo, int hi) const {
        f32x16 largest = {};
        for (int i = 0; i < CHUNK / 16; i++) {
            const i32x16 index = lane_numbers() + 16 * i;
            largest = vmax(largest, select((index >= lo) & (index < hi), value_scale[i], f32x16{}));
        }
        return WeightScale(maximum(largest));
    }
};

// The smallest bfloat16 not below peak / 127 goes to `stored`; its reciprocal is the result.
PENSTOCK_INLINE float byte_scale(float peak, uint16_t* stored) {
    const float scale = peak > TOO_SMALL ? peak / 127.f : 0.f;
    uint32_t bits;
    memcpy(&bits, &scale, 4);
    *stored = uint16_t((bits + 0xffff) >> 16);
    return scale > 0 ? 1.f / bf16_to_float(*stored) : 0.f;
}

static void write_int8(const Cache& cache, int head, int32_t block, int offset, const float* key, const float* value) {
    const int dim = cache.head_dim;
    const float key_inverse = byte_scale(peak_of(key, dim), cache.key_scales(block, head) + offset);
    const float value_inverse = byte_scale(peak_of(value, dim), cache.value_scales(block, head) + offset);
    uint8_t* k = cache.keys(block, head) + 4 * offset;
    uint8_t* v = cache.values(block, head) + size_t(offset / 4) * dim * 4 + offset % 4;
    for (int d = 0; d < dim; d += 16) {
        const i32x16 keys = round_product(load<f32x16>(key + d), splat(key_inverse)) + 128;
        const i32x16 values = round_product(load<f32x16>(value + d), splat(value_inverse));
        uint8_t bytes[16];
        store_bytes(bytes, keys);
        for (int i = 0; i < 16; i += 4) memcpy(k + size_t(d + i) * cache.block_size, bytes + i, 4);
        store_bytes(bytes, values);
        for (int i = 0; i < 16; i++) v[4 * (d + i)] = bytes[i];
    }
}

PENSTOCK_INLINE Chunk chunk_at(const Cache& cache, int head, const int32_t* table, int begin, int end) {
    Chunk c;
    c.begin = begin;
    c.count = end - begin < CHUNK ? end - begin : CHUNK;
    f32x16 largest = {};
    for (int i = 0; i < CHUNK / 16; i++) {
        const int key = 16 * i < c.count ? begin + 16 * i : begin;  // beyond the end: any readable keys, masked later
        const int32_t block = table[key / cache.block_size];
        const int offset = key % cache.block_size;
        c.keys[i] = cache.keys(block, head) + 4 * offset;
        c.values[i] = reinterpret_cast<const int8_t*>(cache.values(block, head)) + size_t(offset) * cache.head_dim;
        c.key_scale[i] = from_bf16(cache.key_scales(block, head) + offset);
        const f32x16 scale = from_bf16(cache.value_scales(block, head) + offset);
        c.value_scale[i] = select(lane_numbers() + 16 * i < c.count, scale, f32x16{});  // that of an unwritten slot may be NaN
        largest = vmax(largest, c.value_scale[i]);
    }
    c.weights = WeightScale(maximum(largest));
    return c;
}

static void quantize_query(const float* q, int dim, int row, const Int8Workspace& w) {
    const float peak = peak_of(q, dim);
    const float total = quantize_span(q, w.queries + row * dim, peak > TOO_SMALL ? 127.f / peak : 0.f, dim);
    w.query_scale[row] = peak / 127.f;
    w.query_offset[row] = 128 * int32_t(total);
}

// Scores of R rows against NV groups of 16 keys.
template <int R, int NV>
PENSTOCK_INLINE void score_int8(const Cache& cache, const Chunk& c, int group, int row, float* scores,
                                const Int8Workspace& w) {
    const int dim = cache.head_dim;
    const int8_t* q = w.queries + row * dim;
    i32x16 acc[R][NV] = {};
    for (int d = 0; d < dim; d += 4) {
        u8x64 keys[NV];
#pragma GCC unroll 4
        for (int i = 0; i < NV; i++) keys[i] = load<u8x64>(c.keys[group + i] + size_t(d) * cache.block_size);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int i = 0; i < NV; i++) acc[r][i] = dot4(acc[r][i], keys[i], q + r * dim + d);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int i = 0; i < NV; i++)
            store(scores + r * CHUNK + 16 * (group + i),
                  to_float(acc[r][i] - w.query_offset[row + r]) * (c.key_scale[group + i] * w.query_scale[row + r]));
}

template <int R, int NV>
PENSTOCK_INLINE void add_products(const Cache& cache, const Chunk& c, int d, const uint8_t* p, i32x16 (&acc)[R][NV]) {
    for (int key = 0; key < c.count; key += 4) {
        const int8_t* from = c.values[key / 16] + (key % 16) * cache.head_dim + 4 * d;
        i8x64 values[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) values[v] = load<i8x64>(from + 64 * v);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[r][v] = dot4(acc[r][v], values[v], p + r * 2 * CHUNK + key);
    }
}

// sums = sums * decay + weights x values for columns [d, d + 16 NV).
template <int R, int NV>
PENSTOCK_INLINE void blend_int8(const Cache& cache, const Chunk& c, int d, float* sums, const float* decay,
                                const float* scale, const Int8Workspace& w) {
    i32x16 acc[R][NV] = {};
    add_products<R, NV>(cache, c, d, w.weights, acc);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[r][v] = acc[r][v] << 8;
    add_products<R, NV>(cache, c, d, w.weights + CHUNK, acc);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            float* to = sums + r * cache.head_dim + d + 16 * v;
            store(to, fma(load<f32x16>(to), decay[r], to_float(acc[r][v]) * scale[r]));
        }
}

// One chunk for rows [row, row + R).
template <int R>
static __attribute__((noinline)) void attend_tile(const Cache& cache, const Chunk& c, int row, const int (*visible)[2],
                                                  const Workspace& w, const Int8Workspace& q) {
    const int dim = cache.head_dim;
    for (int i = 0; i < CHUNK / 16; i += TILE_VECTORS) score_int8<R, TILE_VECTORS>(cache, c, i, row, w.scores, q);
    raise_peaks(w, row, R, w.scores, visible, c.begin);
    for (int r = 0; r < R; r++) {
        uint8_t* high = q.weights + r * 2 * CHUNK;
        const int lo = visible[row + r][0] - c.begin, hi = visible[row + r][1] - c.begin;
        const WeightScale weights = c.weights_of(lo, hi);
        q.weight_scale[row + r] = weights.scale;
        soften(w, row + r, w.scores + r * CHUNK, [&](int i, f32x16 p) {
            const i32x16 rounded = round_product(p, c.value_scale[i] * weights.inverse);
            store_bytes(high + 16 * i, rounded >> 8);
            store_bytes(high + CHUNK + 16 * i, rounded);
        });
    }
    float *sums = w.sums + row * dim, *decay = w.decay + row, *scale = q.weight_scale + row;
    int d = 0;
    for (; d + 16 * TILE_VECTORS <= dim; d += 16 * TILE_VECTORS)
        blend_int8<R, TILE_VECTORS>(cache, c, d, sums, decay, scale, q);
    for (; d < dim; d += 16) blend_int8<R, 1>(cache, c, d, sums, decay, scale, q);
}

template <int R>
PENSTOCK_INLINE void attend_rows(int rows, const Cache& cache, const Chunk& c, int row, const int (*visible)[2],
                                 const Workspace& w, const Int8Workspace& q) {
    if constexpr (R > 1) {
        if (rows < R) return attend_rows<R - 1>(rows, cache, c, row, visible, w, q);
    }
    attend_tile<R>(cache, c, row, visible, w, q);
}

static void prepare_int8(const Workspace& w, int rows, int dim) {
    for (int r = 0; r < rows; r++) quantize_query(w.queries + r * dim, dim, r, Int8Workspace(w, dim));
}

// Have the values of a chunk come from L2 into L1 while its scores are computed.
PENSTOCK_INLINE void request_values(const Cache& cache, const Chunk& c) {
    for (int i = 0; 16 * i < c.count; i++)
        for (int at = 0; at < 16 * cache.head_dim; at += 64) prefetch(c.values[i] + at);
}

static void attend_int8(const Cache& cache, int head, const int32_t* table, Range keys, int rows,
                        const int (*visible)[2], const Workspace& w, const KeysAhead& ahead) {
    const Int8Workspace q(w, cache.head_dim);
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int begin = keys.begin; begin < keys.end; begin += CHUNK) {
        const Chunk chunk = chunk_at(cache, head, table, begin, keys.end);
        ahead.request(begin);
        request_values(cache, chunk);
        for (int t = 0; t < tiles; t++) {
            const int first = rows * t / tiles, last = rows * (t + 1) / tiles;
            attend_rows<TILE_ROWS>(last - first, cache, chunk, first, visible, w, q);
        }
    }
}

}  // namespace PENSTOCK_ISA
