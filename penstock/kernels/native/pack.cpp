#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace penstock {

uint16_t round_to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float bf16_value(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

namespace {

// Round half to even for |x| < 2^22, without a library call.
int nearest(float x) {
    const float shifted = x + 12582912.f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    return bits - 0x4b400000;
}

void pack_int8(const Matrix& m, int column, const float* row, int width) {
    float low = 0, high = 0;
    for (int k = 0; k < width; k++) low = std::min(low, row[k]), high = std::max(high, row[k]);
    const float scale = (high - low) / 255.f, inverse = scale > 0 ? 1.f / scale : 0.f;
    const int zero = nearest(-low * inverse);
    uint8_t* to = m.panels + column / PANEL * m.panel_bytes() + column % PANEL * 4;
    int64_t total = 0;
    for (int k = 0; k < width; k++) {
        const int q = std::clamp(nearest(row[k] * inverse) + zero, 0, 255);
        to[k / 4 * (PANEL * 4) + k % 4] = uint8_t(q);
        total += q - zero;
    }
    const int32_t both = zero | int32_t(std::clamp<int64_t>(total, -(1 << 23), (1 << 23) - 1)) << 8;
    uint8_t* levels = m.levels(column / PANEL) + column % PANEL * 4;
    std::memcpy(levels, &scale, 4);
    std::memcpy(levels + 4 * PANEL, &both, 4);
}

void pack_int4(const Matrix& m, int column, const float* row, int width) {
    constexpr size_t group_bytes = PANEL * 4 + PANEL * GROUP / 2;
    uint8_t* panel = m.panels + column / PANEL * m.panel_bytes();
    for (int begin = 0; begin < width; begin += GROUP, panel += group_bytes) {
        const int count = std::min(GROUP, width - begin);
        const float* w = row + begin;
        const auto [low, high] = std::minmax_element(w, w + count);
        const uint16_t pair[2] = {round_to_bf16((*high - *low) / 15.f), round_to_bf16(*low)};
        const float scale = bf16_value(pair[0]), minimum = bf16_value(pair[1]);
        const float inverse = scale > 0 ? 1.f / scale : 0.f;
        std::memcpy(panel + column % PANEL * 4, pair, 4);
        uint8_t* to = panel + PANEL * 4 + column % PANEL * 4;
        for (int k = 0; k < count; k++) {
            const int q = std::clamp(nearest((w[k] - minimum) * inverse), 0, 15);
            uint8_t& byte = to[k / 8 * (PANEL * 4) + k % 4];
            byte = k % 8 < 4 ? uint8_t((byte & 0xf0) | q) : uint8_t((byte & 0x0f) | q << 4);
        }
    }
}

void pack_bf16(const Matrix& m, int column, const float* row, int width) {
    uint8_t* to = m.panels + column / PANEL * m.panel_bytes() + column % PANEL * 4;
    for (int k = 0; k < width; k++) {
        const uint16_t value = round_to_bf16(row[k]);
        std::memcpy(to + k / 2 * (PANEL * 4) + k % 2 * 2, &value, 2);
    }
}

void pack_f32(const Matrix& m, int column, const float* row, int width) {
    uint8_t* to = m.panels + column / PANEL * m.panel_bytes() + column % PANEL * 4;
    for (int k = 0; k < width; k++) std::memcpy(to + k * (PANEL * 4), row + k, 4);
}

}  // namespace

void pack_row(const Matrix& m, int column, const float* row, int width) {
    switch (m.scheme) {
        case INT8: return pack_int8(m, column, row, width);
        case INT4: return pack_int4(m, column, row, width);
        case BF16: return pack_bf16(m, column, row, width);
        case F32: return pack_f32(m, column, row, width);
    }
}

void clear(const Matrix& m) {
    std::memset(m.panels, 0, m.num_panels() * m.panel_bytes());
    if (m.bias) std::memset(m.bias, 0, m.num_panels() * PANEL * sizeof(float));
}

}  // namespace penstock
