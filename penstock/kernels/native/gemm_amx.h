// Matrix products of 16 rows and more in AMX tiles, from the panels that the other levels read.
//
// A tile is 16 rows of 64 bytes. 64 bytes of depth of a panel are two tiles whose rows lie 128 bytes apart, and rows of
// activations are tiles as they are. Two of each, and the four tiles of sums they add to, fill the eight registers:
// 32 x 32 outputs take 4 products of 16 cycles for what takes VNNI or bfloat16 vectors about 8 times as long.
#pragma once

#include "gemm_float.h"
#include "gemm_int8.h"

namespace PENSTOCK_ISA {

constexpr int TILE = 16;    // rows
constexpr int DEPTH = 64;   // bytes

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
    if constexpr (SCHEME == BF16) {
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
        const float offset = 128.f * x.sum[row], scale = x.scale[row];
        for (int j = 0; j < 2; j++)
            y[0][j] = (to_float(acc[j]) - offset) * load<f32x16>(m.scale + panel * PANEL + 16 * j) * scale;
    }
}

// One panel times the 16 rows at `first` and, with two tiles, the 16 at `second`; the last tile's first `done` rows have
// been finished already.
template <Scheme SCHEME, int TILES>
static __attribute__((noinline)) void run_tiles(const Matrix& m, int panel, const Activations& x, int first, int second,
                                                int done, const Output& out, const uint8_t* ahead, size_t ahead_step) {
    const int rows[2] = {first, second};
    const size_t stride = SCHEME == INT8 ? x.stride : x.stride * sizeof(float);
    const uint8_t* left = SCHEME == INT8 ? reinterpret_cast<const uint8_t*>(x.q) : reinterpret_cast<const uint8_t*>(x.f);
    const uint8_t* w = m.panels + size_t(panel) * m.panel_bytes();
    const int depth = (SCHEME == INT8 ? m.padded_k : 2 * m.padded_k) / DEPTH * DEPTH;
    alignas(64) uint8_t sums[2 * TILE][2 * DEPTH];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < depth; k += DEPTH, w += TILE * 2 * DEPTH, ahead += ahead_step) {
        multiply_tiles<SCHEME, TILES>(w, left + first * stride + k, left + second * stride + k, stride);
        for (size_t i = 0; i < ahead_step; i += 64) prefetch(ahead + i);
    }
    _tile_stored(0, sums, 2 * DEPTH);
    _tile_stored(1, sums[0] + DEPTH, 2 * DEPTH);
    if constexpr (TILES == 2) {
        _tile_stored(2, sums[TILE], 2 * DEPTH);
        _tile_stored(3, sums[TILE] + DEPTH, 2 * DEPTH);
    }
    for (int tile = 0; tile < TILES; tile++)
        for (int r = tile == TILES - 1 ? done : 0; r < TILE; r++) {
            f32x16 y[1][2];
            finish_sums<SCHEME>(sums[tile * TILE + r], m, panel, x, rows[tile] + r, y);
            finish_tile<1>(m, panel, y, rows[tile] + r, out);
        }
}

// The last tile of a run ends with it, and so may hold rows of the one before.
template <Scheme SCHEME, class Narrow>
static void run_panels_amx(const Matrix& w, const Activations& x, Range rows, Range panels, const Output& out) {
    const int height = rows.end - rows.begin, last = rows.end - TILE;
    if (height < TILE) return run_panels<Narrow>(w, x, rows, panels, out);
    const int blocks = (height + 2 * TILE - 1) / (2 * TILE);
    const size_t share = round_up(TILE * 2 * DEPTH / blocks, 64);  // of the next panel, brought in by each block
    _tile_loadconfig(&TILE_SHAPES);
    for (int panel = panels.begin; panel < panels.end; panel++) {
        const uint8_t* next = w.panels + size_t(panel + 1) * w.panel_bytes();
        for (int row = rows.begin; row < rows.end; row += 2 * TILE, next += w.panel_bytes() / blocks) {
            const int second = row + TILE < last ? row + TILE : last;
            if (second > row) {
                run_tiles<SCHEME, 2>(w, panel, x, row, second, row + TILE - second, out, next, share);
            } else {
                run_tiles<SCHEME, 1>(w, panel, x, last, last, row - last, out, next, share);
            }
        }
    }
    _tile_release();  // the system need not save the tiles of a thread that sleeps
}

}  // namespace PENSTOCK_ISA
