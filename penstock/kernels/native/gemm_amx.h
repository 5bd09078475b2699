// GEMMs of many rows in AMX tiles, from the panels that the other levels read: int8 and int4 with the same results as in
// vectors, and bfloat16 whose sums are rounded in another order.
//
// A tile is 16 rows of 64 bytes. 64 bytes of depth of a panel are two tiles whose rows lie 128 bytes apart, and rows of
// activations are tiles as they are. Two of each, and the four tiles of sums they add to, fill the eight registers:
// 32 x 32 outputs take 4 tile matmuls of 16 cycles for what takes VNNI or bfloat16 vectors about 8 times as long.
//
// int4 has scales per 32 inputs, which tiles cannot apply. Half as deep, a tile holds the sums of one such group for 16
// rows and 16 outputs, and goes through memory into vectors that scale them. That takes 32 cycles, the tile as long, and
// the two do not overlap (Emerald Rapids): two thirds of the time of VNNI, before weights are unpacked and outputs stored.
#pragma once

#include "gemm_float.h"
#include "gemm_int4.h"
#include "gemm_int8.h"

namespace PENSTOCK_ISA {

constexpr int TILE = 16;                // rows
constexpr int DEPTH = 64;               // bytes
constexpr int STEP = 2 * TILE * DEPTH;  // bytes of a panel that are multiplied at once
constexpr int CHUNK_STEPS = 10;         // of a panel stay in L1 (48 KiB) beside those of 32 rows and their sums
constexpr int CHUNK_GROUPS = 20;        // likewise, of int4 weights as bytes
constexpr int PASS_TILES = 16;          // tiles of rows that pass a chunk
constexpr int LEAST_INT4_ROWS = 64;     // for fewer, unpacking takes what tiles gain

typedef uint8_t TileSums[TILE][2 * DEPTH];

// Tiles 0 to 3 are sums, 4 and 5 weights, 6 and 7 activations of DEEP bytes.
template <int DEEP>
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {DEPTH, DEPTH, DEPTH, DEPTH, DEPTH, DEPTH, DEEP, DEEP};
    uint8_t rows[16] = {TILE, TILE, TILE, TILE, DEEP / 4, DEEP / 4, TILE, TILE};
};

// In memory: the intrinsic does not tell the compiler that it reads 64 bytes.
static const TileShapes<DEPTH> TILE_SHAPES;
static const TileShapes<GROUP> GROUP_SHAPES;

// Activations are signed, int8 weights are not.
template <Scheme SCHEME, int TILES>
PENSTOCK_INLINE void multiply_tiles(const uint8_t* w, const uint8_t* first, const uint8_t* second, size_t stride) {
    _tile_loadd(4, w, 2 * DEPTH);
    _tile_loadd(5, w + DEPTH, 2 * DEPTH);
    _tile_loadd(6, first, stride);
    if constexpr (TILES == 2) _tile_loadd(7, second, stride);
    if constexpr (SCHEME == INT8) {
        _tile_dpbsud(0, 6, 4);
        _tile_dpbsud(1, 6, 5);
        if constexpr (TILES == 2) {
            _tile_dpbsud(2, 7, 4);
            _tile_dpbsud(3, 7, 5);
        }
    } else {
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(1, 6, 5);
        if constexpr (TILES == 2) {
            _tile_dpbf16ps(2, 7, 4);
            _tile_dpbf16ps(3, 7, 5);
        }
    }
}

// What the tiles have summed of one row, in units of the output; int8 adds the last 32 inputs where there are such.
template <Scheme SCHEME>
PENSTOCK_INLINE void finish_sums(const uint8_t* sums, const Matrix& m, int panel, const Activations& x, int row,
                                 f32x16 (&y)[2]) {
    if constexpr (SCHEME != INT8) {
        y[0] = load<f32x16>(sums);
        y[1] = load<f32x16>(sums + 64);
    } else {
        i32x16 acc[2] = {load<i32x16>(sums), load<i32x16>(sums + 64)};
        const uint8_t* w = m.panels + size_t(panel) * m.panel_bytes();
        for (int k = m.padded_k / DEPTH * DEPTH; k < m.padded_k; k += 4) {
            const int8_t* four = x.q + row * x.stride + k;
            acc[0] = dot4(acc[0], load<u8x64>(w + size_t(k) * PANEL), four);
            acc[1] = dot4(acc[1], load<u8x64>(w + size_t(k) * PANEL + 64), four);
        }
        for (int j = 0; j < 2; j++) y[j] = finish_int8(m.levels(panel) + 64 * j, x, row, acc[j]);
    }
}

// What memory is asked for while tiles are multiplied: `step` bytes further each time. Into L2: L1 is full.
struct TilesAhead {
    const uint8_t* at;
    size_t step;
};

// `steps` steps of a panel times the 16 rows at `first` and, with two tiles, the 16 at `second`; from zero or on top of
// the sums so far.
template <Scheme SCHEME, int TILES>
static __attribute__((noinline)) void run_tiles(const uint8_t* w, int steps, const uint8_t* first, const uint8_t* second,
                                                size_t stride, bool from_zero, TileSums* sums, TilesAhead ahead) {
    if (from_zero) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums[0][0], 2 * DEPTH);
        _tile_loadd(1, sums[0][0] + DEPTH, 2 * DEPTH);
        if constexpr (TILES == 2) {
            _tile_loadd(2, sums[1][0], 2 * DEPTH);
            _tile_loadd(3, sums[1][0] + DEPTH, 2 * DEPTH);
        }
    }
    for (int i = 0; i < steps; i++, w += STEP, first += DEPTH, second += DEPTH, ahead.at += ahead.step) {
        multiply_tiles<SCHEME, TILES>(w, first, second, stride);
        for (size_t j = 0; j < ahead.step; j += 64) prefetch_l2(ahead.at + j);
    }
    _tile_stored(0, sums[0][0], 2 * DEPTH);
    _tile_stored(1, sums[0][0] + DEPTH, 2 * DEPTH);
    if constexpr (TILES == 2) {
        _tile_stored(2, sums[1][0], 2 * DEPTH);
        _tile_stored(3, sums[1][0] + DEPTH, 2 * DEPTH);
    }
}

// Groups of 32 inputs of a panel of int4 weights: as they lie there, and their weights as bytes, 16 outputs at a time.
struct GroupChunk {
    const uint8_t* packed;
    int first, count;
    alignas(64) uint8_t bytes[CHUNK_GROUPS][2][GROUP / 4][DEPTH];
};

PENSTOCK_INLINE void unpack_groups(GroupChunk& to) {
    for (int group = 0; group < to.count; group++)
        for (int j = 0; j < GROUP / 8; j++)
            for (int half = 0; half < 2; half++) {
                const u8x64 both = load<u8x64>(to.packed + group * Int4Tile::GROUP_BYTES + 4 * PANEL * (j + 1) + 64 * half);
                store(to.bytes[group][half][2 * j], both & 15);
                store(to.bytes[group][half][2 * j + 1], both >> 4);
            }
}

// Adds the groups of a chunk for 16 rows from `row` on and one half of the panel's outputs. Tiles are multiplied LAG groups
// before vectors read what they have summed: it is in L1 by then.
static __attribute__((noinline)) void run_groups(const GroupChunk& w, int half, const Activations& x, int row,
                                                 TileSums& sums, TilesAhead ahead) {
    constexpr int LAG = 2, WAITING = 4;
    alignas(64) uint8_t totals[WAITING][TILE][DEPTH];
    const size_t groups = x.stride / GROUP;
    const int8_t* a = x.q + row * x.stride + w.first * GROUP;
    const GroupLevel* levels[4];  // of every fourth row
    for (int i = 0; i < 4; i++) levels[i] = x.groups_of(row + 4 * i) + w.first;
    f32x16 y[TILE] = {};
    if (w.first > 0)
#pragma GCC unroll 16
        for (int r = 0; r < TILE; r++) y[r] = load<f32x16>(sums[r] + DEPTH * half);
    for (int group = 0; group < w.count + LAG; group++, ahead.at += ahead.step) {
        if (group < w.count) {
            _tile_loadd(6, a + group * GROUP, x.stride);
            _tile_loadd(4, w.bytes[group][half], DEPTH);
            _tile_zero(0);
            _tile_dpbsud(0, 6, 4);
            _tile_stored(0, totals[group % WAITING], DEPTH);
            for (size_t j = 0; j < ahead.step; j += 64) prefetch_l2(ahead.at + j);
        }
        const int summed = group - LAG;
        if (summed < 0) continue;
        const u32x16 pairs = load<u32x16>(w.packed + summed * Int4Tile::GROUP_BYTES + 64 * half);
        const f32x16 scale = low_bf16(pairs), minimum = high_bf16(pairs);
#pragma GCC unroll 16
        for (int r = 0; r < TILE; r++) {
            const auto [scale_a, sum_a] = levels[r / 4][r % 4 * groups];
            const f32x16 total = to_float(load<i32x16>(totals[summed % WAITING][r]));
            y[r] = fma(total, scale * scale_a, fma(minimum, sum_a, y[r]));
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            levels[i]++;
            __asm__("" : "+r"(levels[i]));  // else the compiler keeps 16 pointers, more than there are registers
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < TILE; r++) store(sums[r] + DEPTH * half, y[r]);
}

// Where the tiles of rows of a pass begin. The last one of a run ends with it, and so may hold rows of the one before.
struct TileRows {
    int begin, end, tiles;
    int operator[](int tile) const { return begin + tile * TILE < end - TILE ? begin + tile * TILE : end - TILE; }
    int repeated(int tile) const { return begin + tile * TILE - (*this)[tile]; }
};

template <Scheme SCHEME>
static void finish_rows(const Matrix& m, int panel, const Activations& x, TileRows rows, int tile, const TileSums& sums,
                        const Output& out) {
    const int first = rows.repeated(tile);
    f32x16 y[TILE][2];
    for (int r = first; r < TILE; r++) {
        finish_sums<SCHEME>(sums[r], m, panel, x, rows[tile] + r, y[r]);
        if (!out.expansion) finish_row(m, panel, y[r][0], y[r][1], rows[tile] + r, out);
    }
    if (out.expansion) finish_expanded(m, panel, y + first, TILE - first, rows[tile] + first, out);
}

// One panel times the rows of a pass. What is asked for of the memory behind a chunk is shared by all that pass it.
template <Scheme SCHEME>
static __attribute__((noinline)) void run_pass(const Matrix& m, int panel, const Activations& x, TileRows rows,
                                               const Output& out) {
    const uint8_t* left = SCHEME == INT8 ? reinterpret_cast<const uint8_t*>(x.q) : reinterpret_cast<const uint8_t*>(x.f);
    const size_t stride = SCHEME == INT8 ? x.stride : x.stride * sizeof(float);
    const int steps = (SCHEME == INT8 ? m.padded_k : 2 * m.padded_k) / DEPTH, chunks = (steps + CHUNK_STEPS - 1) / CHUNK_STEPS;
    const int blocks = (rows.tiles + 1) / 2;  // each asks for its part of the next panel
    alignas(64) TileSums sums[PASS_TILES];
    for (int chunk = 0; chunk < chunks; chunk++) {
        const int from = steps * chunk / chunks, count = steps * (chunk + 1) / chunks - from;
        const uint8_t* w = m.panels + size_t(panel) * m.panel_bytes() + from * STEP;
        TilesAhead ahead{w + m.panel_bytes(), round_up(STEP / blocks, 64)};
        for (int tile = 0; tile < rows.tiles; tile += 2, ahead.at += count * STEP / blocks) {
            const int together = tile + 1 < rows.tiles ? 2 : 1;
            const uint8_t* first = left + rows[tile] * stride + from * DEPTH;
            const uint8_t* second = left + rows[tile + 1] * stride + from * DEPTH;
            const auto run = together == 2 ? run_tiles<SCHEME, 2> : run_tiles<SCHEME, 1>;
            if (chunk + 1 == chunks && out.data) request_outputs(out, rows[tile], rows[tile] + together * TILE, panel, 1);
            run(w, count, first, second, stride, chunk == 0, sums + tile, ahead);
            for (int i = tile; chunk + 1 == chunks && i < tile + together; i++)
                finish_rows<SCHEME>(m, panel, x, rows, i, sums[i], out);
        }
    }
}

template <>
__attribute__((noinline)) void run_pass<INT4>(const Matrix& m, int panel, const Activations& x, TileRows rows,
                                              const Output& out) {
    const int groups = m.padded_k / GROUP, chunks = (groups + CHUNK_GROUPS - 1) / CHUNK_GROUPS, blocks = 2 * rows.tiles;
    alignas(64) TileSums sums[PASS_TILES];
    GroupChunk w;
    for (int chunk = 0; chunk < chunks; chunk++) {
        w.first = groups * chunk / chunks;
        w.count = groups * (chunk + 1) / chunks - w.first;
        w.packed = m.panels + size_t(panel) * m.panel_bytes() + w.first * Int4Tile::GROUP_BYTES;
        unpack_groups(w);
        const size_t bytes = w.count * Int4Tile::GROUP_BYTES;
        TilesAhead ahead{w.packed + bytes, round_up(Int4Tile::GROUP_BYTES / blocks, 64)};
        for (int tile = 0; tile < rows.tiles; tile++) {
            if (chunk + 1 == chunks && out.data) request_outputs(out, rows[tile], rows[tile] + TILE, panel, 1);
            for (int half = 0; half < 2; half++, ahead.at += bytes / blocks)
                run_groups(w, half, x, rows[tile], sums[tile], ahead);
            if (chunk + 1 == chunks) finish_rows<INT4>(m, panel, x, rows, tile, sums[tile], out);
        }
    }
}

template <Scheme SCHEME, class Narrow>
static void run_panels_amx(const Matrix& w, const Activations& x, Range rows, Range panels, const Output& out) {
    const int height = rows.end - rows.begin;
    if (height < (SCHEME == INT4 ? LEAST_INT4_ROWS : TILE)) return run_panels<Narrow>(w, x, rows, panels, out);
    const int tiles = (height + TILE - 1) / TILE, passes = (tiles + PASS_TILES - 1) / PASS_TILES;
    if constexpr (SCHEME == INT4)
        _tile_loadconfig(&GROUP_SHAPES);
    else
        _tile_loadconfig(&TILE_SHAPES);
    for (int panel = panels.begin; panel < panels.end; panel++)
        for (int pass = 0; pass < passes; pass++) {
            const int first = tiles * pass / passes, count = tiles * (pass + 1) / passes - first;
            if (out.expansion) request_lines(*out.expansion, panel, 1, pass, passes);
            run_pass<SCHEME>(w, panel, x, {rows.begin + first * TILE, rows.end, count}, out);
        }
    _tile_release();  // the system need not save the tiles of a thread that sleeps
}

}  // namespace PENSTOCK_ISA
