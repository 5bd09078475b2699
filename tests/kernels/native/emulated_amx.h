// AMX on any CPU, for tests: included before everything else, it replaces the tile intrinsics that gemm_amx.h uses by
// functions over memory. Sanitizers see what these read and write, and shapes that would be an invalid instruction end
// the program.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace emulated_amx {

struct Configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(Configuration) == 64);

inline thread_local Configuration configuration;  // of palette 0 after a release: no tile may be used
inline thread_local uint8_t tiles[8][16][64];

inline void require(bool valid, const char* what) {
    if (valid) return;
    std::fprintf(stderr, "emulated AMX: %s\n", what);
    std::abort();
}

inline void load_configuration(const void* from) {
    std::memcpy(&configuration, from, sizeof configuration);
    require(configuration.palette == 1 && configuration.start_row == 0, "unknown palette");
    for (int i = 0; i < 16; i++) {
        require(configuration.row_bytes[i] <= 64 && configuration.rows[i] <= 16, "tile too large");
        require(i < 8 || (configuration.row_bytes[i] == 0 && configuration.rows[i] == 0), "there are 8 tiles");
    }
    std::memset(tiles, 0, sizeof tiles);
}

inline void release() { configuration = {}; }

inline void zero(int tile) {
    require(configuration.palette == 1, "no tiles are configured");
    std::memset(tiles[tile], 0, sizeof tiles[tile]);
}

inline void load(int tile, const void* from, size_t stride) {
    zero(tile);  // what lies beyond the tile's shape
    for (int row = 0; row < configuration.rows[tile]; row++)
        std::memcpy(tiles[tile][row], static_cast<const uint8_t*>(from) + row * stride, configuration.row_bytes[tile]);
}

inline void store(int tile, void* to, size_t stride) {
    require(configuration.palette == 1, "no tiles are configured");
    for (int row = 0; row < configuration.rows[tile]; row++)
        std::memcpy(static_cast<uint8_t*>(to) + row * stride, tiles[tile][row], configuration.row_bytes[tile]);
}

extern "C" __attribute__((visibility("default"))) long emulated_tile_matmuls;
long emulated_tile_matmuls = 0;

// sums[m][n] += dot(four bytes of left[m][k], four bytes of right[k][n]) over k
template <class Sum, class Dot>
void multiply(int sums, int left, int right, Dot dot) {
    const Configuration& c = configuration;
    require(c.palette == 1, "no tiles are configured");
    require(c.rows[sums] == c.rows[left] && c.row_bytes[sums] == c.row_bytes[right], "shapes of sums");
    require(c.row_bytes[left] == 4 * c.rows[right] && c.row_bytes[right] % 4 == 0, "shapes of factors");
    __atomic_fetch_add(&emulated_tile_matmuls, 1, __ATOMIC_RELAXED);
    for (int m = 0; m < c.rows[sums]; m++)
        for (int n = 0; n < c.row_bytes[sums] / 4; n++) {
            Sum sum;
            std::memcpy(&sum, tiles[sums][m] + 4 * n, 4);
            for (int k = 0; k < c.rows[right]; k++) sum += dot(tiles[left][m] + 4 * k, tiles[right][k] + 4 * n);
            std::memcpy(tiles[sums][m] + 4 * n, &sum, 4);
        }
}

inline void multiply_signed_unsigned(int sums, int left, int right) {
    multiply<int32_t>(sums, left, right, [](const uint8_t* a, const uint8_t* b) {
        int32_t dot = 0;
        for (int i = 0; i < 4; i++) dot += int8_t(a[i]) * b[i];
        return dot;
    });
}

inline float bfloat16(const uint8_t* at) {
    const uint32_t bits = uint32_t(at[0]) << 16 | uint32_t(at[1]) << 24;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline void multiply_bfloat16(int sums, int left, int right) {
    multiply<float>(sums, left, right, [](const uint8_t* a, const uint8_t* b) {
        return bfloat16(a) * bfloat16(b) + bfloat16(a + 2) * bfloat16(b + 2);
    });
}

}  // namespace emulated_amx

#define __AMX_TILE__ 1
#define __AMX_INT8__ 1
#define __AMX_BF16__ 1

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_amx::load_configuration
#define _tile_release emulated_amx::release
#define _tile_loadd emulated_amx::load
#define _tile_stored emulated_amx::store
#define _tile_zero emulated_amx::zero
#define _tile_dpbsud emulated_amx::multiply_signed_unsigned
#define _tile_dpbf16ps emulated_amx::multiply_bfloat16
