// GEMMs of 16 rows and more in AMX tiles, from the panels that the other levels read: int8, and bfloat16 whose sums are
// rounded in another order than those of vectors. int4 has a scale per 32 inputs, which tiles cannot apply.
//
// A tile is 16 rows of 64 bytes. 64 bytes of depth of a panel are two tiles whose rows lie 128 bytes apart, and rows of
// activations are tiles as they are. Two of each, and the four tiles of sums they add to, fill the eight registers:
// 32 x 32 outputs take 4 tile matmuls of 16 cycles for what takes VNNI or bfloat16 vectors about 8 times as long.
#pragma once

#include "gemm_float.h"
#include "gemm_int8.h"

namespace PENSTOCK_ISA {

constexpr int TILE = 16;                // rows
constexpr int DEPTH = 64;               // bytes
constexpr int STEP = 2 * TILE * DEPTH;  // bytes of a panel that are multiplied at once
constexpr int CHUNK_STEPS = 10;         // of a panel stay in L1 (48 KiB) beside those of 32 rows and their sums
constexpr int PASS_TILES = 16;          // tiles of rows that pass a chunk

typedef uint8_t TileSums[TILE][2 * DEPTH];

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {DEPTH, DEPTH, DEPTH, DEPTH, DEPTH, DEPTH, DEPTH, DEPTH};
    uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
};

static const TileShapes TILE_SHAPES;  // in memory: the intrinsic does not tell the compiler that it reads 64 bytes

// Tiles 0 to 3 are sums, 4 and 5 weights, 6 and 7 activations. These are signed, int8 weights are not.
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
                                 f32x16 (&y)[1][2]) {
    if constexpr (SCHEME != INT8) {
        y[0][0] = load<f32x16>(sums);
        y[0][1] = load<f32x16>(sums + 64);
    } else {
        i32x16 acc[2] = {load<i32x16>(sums), load<i32x16>(sums + 64)};
        const uint8_t* w = m.panels + size_t(panel) * m.panel_bytes();
        for (int k = m.padded_k / DEPTH * DEPTH; k < m.padded_k; k += 4) {
            const int8_t* four = x.q + row * x.stride + k;
            acc[0] = dot4(acc[0], load<u8x64>(w + size_t(k) * PANEL), four);
            acc[1] = dot4(acc[1], load<u8x64>(w + size_t(k) * PANEL + 64), four);
        }
        for (int j = 0; j < 2; j++) y[0][j] = finish_int8(m.levels(panel) + 64 * j, x, row, acc[j]);
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

// One panel times `tiles` tiles of rows from `begin` on. The last tile of a run ends with it, and so may hold rows of the
// one before.
template <Scheme SCHEME>
static __attribute__((noinline)) void run_pass(const Matrix& m, int panel, const Activations& x, int begin, int end,
                                               int tiles, const Output& out) {
    const uint8_t* left = SCHEME == INT8 ? reinterpret_cast<const uint8_t*>(x.q) : reinterpret_cast<const uint8_t*>(x.f);
    const size_t stride = SCHEME == INT8 ? x.stride : x.stride * sizeof(float);
    const int steps = (SCHEME == INT8 ? m.padded_k : 2 * m.padded_k) / DEPTH, chunks = (steps + CHUNK_STEPS - 1) / CHUNK_STEPS;
    const int blocks = (tiles + 1) / 2;  // each asks for its part of the next panel
    alignas(64) TileSums sums[PASS_TILES];
    const auto row_of = [&](int tile) { return begin + tile * TILE < end - TILE ? begin + tile * TILE : end - TILE; };
    for (int chunk = 0; chunk < chunks; chunk++) {
        const int from = steps * chunk / chunks, count = steps * (chunk + 1) / chunks - from;
        const uint8_t* w = m.panels + size_t(panel) * m.panel_bytes() + from * STEP;
        TilesAhead ahead{w + m.panel_bytes(), round_up(STEP / blocks, 64)};
        for (int tile = 0; tile < tiles; tile += 2, ahead.at += count * STEP / blocks) {
            const uint8_t* first = left + row_of(tile) * stride + from * DEPTH;
            const uint8_t* second = left + row_of(tile + 1) * stride + from * DEPTH;
            const auto run = tile + 1 < tiles ? run_tiles<SCHEME, 2> : run_tiles<SCHEME, 1>;
            run(w, count, first, second, stride, chunk == 0, sums + tile, ahead);
        }
    }
    for (int tile = 0; tile < tiles; tile++)
        for (int r = begin + tile * TILE - row_of(tile); r < TILE; r++) {
            f32x16 y[1][2];
            finish_sums<SCHEME>(sums[tile][r], m, panel, x, row_of(tile) + r, y);
            finish_tile<1>(m, panel, y, row_of(tile) + r, out);
        }
}

template <Scheme SCHEME, class Narrow>
static void run_panels_amx(const Matrix& w, const Activations& x, Range rows, Range panels, const Output& out) {
    const int height = rows.end - rows.begin;
    if (height < TILE) return run_panels<Narrow>(w, x, rows, panels, out);
    const int tiles = (height + TILE - 1) / TILE, passes = (tiles + PASS_TILES - 1) / PASS_TILES;
    _tile_loadconfig(&TILE_SHAPES);
    for (int panel = panels.begin; panel < panels.end; panel++)
        for (int pass = 0; pass < passes; pass++) {
            const int first = tiles * pass / passes, count = tiles * (pass + 1) / passes - first;
            run_pass<SCHEME>(w, panel, x, rows.begin + first * TILE, rows.end, count, out);
        }
    _tile_release();  // the system need not save the tiles of a thread that sleeps
}

}  // namespace PENSTOCK_ISA
