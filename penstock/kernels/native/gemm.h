// What the GEMMs of all number formats share: how rows are divided into register tiles, and the epilogue of a tile.
//
// A thread walks its own panels; a panel (18 KiB for 576 inputs in int8) stays in L1 while the rows of activations
// pass it from L2. One or a few rows read each weight once: the limit is memory bandwidth. From about a dozen
// rows on it is the rate of the multiply unit.
#pragma once

#include "kernels.h"
#include "lora.h"
#include "simd.h"

namespace PENSTOCK_ISA {

using namespace penstock;

// What a tile asks memory for while it computes: `step` bytes further for each 128 bytes of its own panels.
struct Ahead {
    const uint8_t* at;
    size_t step;

    template <int MR>
    inline __attribute__((always_inline)) void request(size_t offset) const {
        prefetch(at + offset);
        if (MR <= 8) prefetch(at + offset + 64);  // taller tiles take long enough per step for the hardware to pair lines
    }
};

// The same, and factors of LoRA adapters, for which the innermost loop lacks registers.
struct AheadWithFactors : Ahead {
    Requests* factors;
};

PENSTOCK_INLINE void put(float* to, f32x16 v, int columns, bool add) {
    if (columns >= 16) {
        store(to, add ? load<f32x16>(to) + v : v);
    } else {
        for (int i = 0; i < columns; i++) to[i] = add ? to[i] + v[i] : v[i];
    }
}

// The largest of 32 outputs, of which the first `columns` exist.
PENSTOCK_INLINE float peak_of_panel(f32x16 first, f32x16 second, int columns) {
    if (columns < PANEL) {
        first = select(lane_numbers() < columns, first, splat(-__builtin_inff()));
        second = select(lane_numbers() < columns - 16, second, splat(-__builtin_inff()));
    }
    return maximum(vmax(first, second));
}

PENSTOCK_INLINE void finish_row(const Matrix& w, int panel, f32x16 first, f32x16 second, int row, const Output& out) {
    const int column = panel * PANEL;
    float* to = out.data + row * out.stride;
    if (w.bias) {
        first += load<f32x16>(w.bias + column);
        second += load<f32x16>(w.bias + column + 16);
    }
    if (out.epilogue == SILU_MUL) return put(to + panel * 16, silu(first) * second, w.n / 2 - panel * 16, false);
    if (out.epilogue == GELU) first = gelu(first), second = gelu(second);
    if (out.epilogue == PEAKS) {
        out.peaks[size_t(row) * w.num_panels() + panel] = peak_of_panel(first, second, w.n - column);
        if (!out.data) return;
    }
    put(to + column, first, w.n - column, out.epilogue == ADD);
    put(to + column + 16, second, w.n - column - 16, out.epilogue == ADD);
}

// The same for rows that adapters add to.
static __attribute__((noinline)) void finish_expanded(const Matrix& w, int panel, f32x16 (*y)[2], int rows, int row,
                                                      const Output& out) {
    expand(*out.expansion, row, rows, panel, y);
    for (int r = 0; r < rows; r++) finish_row(w, panel, y[r][0], y[r][1], row + r, out);
}

template <int MR>
PENSTOCK_INLINE void finish_tile(const Matrix& w, int panel, const f32x16 (&y)[MR][2], int row, const Output& out) {
    if (out.expansion) {
        f32x16 copy[MR][2];  // so that y may stay in registers otherwise
        for (int r = 0; r < MR; r++) copy[r][0] = y[r][0], copy[r][1] = y[r][1];
        return finish_expanded(w, panel, copy, MR, row, out);
    }
    for (int r = 0; r < MR; r++) finish_row(w, panel, y[r][0], y[r][1], row + r, out);
}

// Panels that a tile of this height walks side by side. Reading eight runs of memory at once instead of one gives a core
// a quarter more bandwidth (the prefetcher of L2 follows each in its own page), and they share the broadcast activations.
// As many as leave their sums in registers, of which there are 32 with AVX-512 and the equivalent of 8 without.
constexpr int side_by_side(int rows) {
#if defined(__AVX512F__)
    return rows == 1 ? 8 : rows == 2 ? 4 : rows <= 6 ? 2 : 1;
#else
    return rows == 1 ? 2 : 1;
#endif
}

// Tile::run<MR, NP>(w, panel, x, row, out, ahead) computes MR rows of NP panels, for MR from LEAST up to Tile::ROWS.
template <class Tile, int LEAST, int MR, int NP, class A>
PENSTOCK_INLINE void run_tile(int rows, int count, const Matrix& w, int panel, const Activations& x, int row,
                              const Output& out, const A& ahead) {
    if (rows < MR) {
        if constexpr (MR > LEAST)
            run_tile<Tile, LEAST, MR - 1, side_by_side(MR - 1)>(rows, count, w, panel, x, row, out, ahead);
    } else if (count < NP) {
        if constexpr (NP > 1) run_tile<Tile, LEAST, MR, NP - 1>(rows, count, w, panel, x, row, out, ahead);
    } else {
        Tile::template run<MR, NP>(w, panel, x, row, out, ahead);
    }
}

// Panels read once are asked for a fixed distance ahead; several tiles share the work of bringing in the next panel.
PENSTOCK_INLINE Ahead look_ahead(const Matrix& w, int panel, int count, int tile, int tiles) {
    const uint8_t* here = w.panels + size_t(panel) * w.panel_bytes();
    if (tiles == 1) return {here + (count > 1 ? 1024 : 4096), 128};
    return {here + w.panel_bytes() + w.panel_bytes() * tile / tiles, size_t(128 / tiles)};
}

// Of many outputs, those written last have driven the others out of the caches: ask for them while the tile computes.
PENSTOCK_INLINE void request_outputs(const Output& out, int begin, int end, int panel, int count) {
    const int width = out.epilogue == SILU_MUL ? PANEL / 2 : PANEL;
    for (int row = begin; row < end; row++)
        for (int i = 0; i < count * width; i += 16)
            __builtin_prefetch(out.data + row * out.stride + panel * width + i, 1, 3);
}

// The same for tiles of many rows, which ask for factors of adapters while they compute.
template <class Tile>
static __attribute__((noinline)) void run_tall_panels(const Matrix& w, const Activations& x, Range rows, Range panels,
                                                      const Output& out) {
    const int height = rows.end - rows.begin, tiles = (height + Tile::ROWS - 1) / Tile::ROWS;
    for (int panel = panels.begin; panel < panels.end; panel++) {
        Requests factors(*out.expansion, panel);
        for (int t = 0; t < tiles; t++) {
            const int begin = height * t / tiles, end = height * (t + 1) / tiles;
            const Ahead ahead = look_ahead(w, panel, 1, t, tiles);
            if (factors.done())
                run_tile<Tile, Tile::TALL, Tile::ROWS, 1>(end - begin, 1, w, panel, x, rows.begin + begin, out, ahead);
            else
                run_tile<Tile, Tile::TALL, Tile::ROWS, 1>(end - begin, 1, w, panel, x, rows.begin + begin, out,
                                                          AheadWithFactors{ahead, &factors});
        }
    }
}

template <class Tile>
static void run_panels(const Matrix& w, const Activations& x, Range rows, Range panels, const Output& out) {
    const int height = rows.end - rows.begin, tiles = (height + Tile::ROWS - 1) / Tile::ROWS;
    if constexpr (requires { Tile::TALL; })
        if (out.expansion && height / tiles >= Tile::TALL) return run_tall_panels<Tile>(w, x, rows, panels, out);
    const int width = panels.end - panels.begin, most = side_by_side(height), runs = (width + most - 1) / most;
    for (int i = 0; i < runs; i++) {
        const int panel = panels.begin + width * i / runs, count = panels.begin + width * (i + 1) / runs - panel;
        for (int t = 0; t < tiles; t++) {  // tiles of nearly equal height: 13 rows are 7 + 6, not 12 + 1
            const int begin = height * t / tiles, end = height * (t + 1) / tiles;
            if (out.epilogue == PEAKS && out.data) request_outputs(out, rows.begin + begin, rows.begin + end, panel, count);
            if (out.expansion) request_lines(*out.expansion, panel, count, t, tiles);
            run_tile<Tile, 1, Tile::ROWS, side_by_side(Tile::ROWS)>(end - begin, count, w, panel, x, rows.begin + begin,
                                                                    out, look_ahead(w, panel, count, t, tiles));
        }
    }
}

}  // namespace PENSTOCK_ISA
