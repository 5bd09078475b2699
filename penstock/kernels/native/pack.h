// Quantise and pack weights, one output row at a time.
#pragma once

#include "kernels.h"

namespace penstock {

// Packs `width` floats as output `column` of the matrix; the padding up to padded_k must be zeroed beforehand.
void pack_row(const Matrix& m, int column, const float* row, int width);

// Fills `m` with a weight of zero everywhere (the padding of panels and inputs stays so).
void clear(const Matrix& m);

uint16_t round_to_bf16(float x);
float bf16_value(uint16_t x);

}  // namespace penstock
