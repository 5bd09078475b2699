// The vector part of sampling. The noise of a token is word token % 4 of Philox4x32-10 with the seed as key and
// (token / 4, position, 0, 0) as counter; word x gives u = (x / 512 + 0.5) / 2^23 and the noise -log(-log(u)).
#pragma once

#include "kernels.h"
#include "simd.h"

namespace PENSTOCK_ISA {

using namespace penstock;

// Natural logarithm of positive normal numbers, relative error below 2e-7 also near 1.
PENSTOCK_INLINE f32x16 log(f32x16 v) {
    const i32x16 bits = (i32x16)v;
    const i32x16 shifted = bits - 0x3f3504f3;  // the mantissa ends up in [sqrt(1/2), sqrt(2))
    const i32x16 exponent = shifted >> 23;
    const f32x16 x = (f32x16)((shifted & 0x007fffff) + 0x3f3504f3) - 1.f, z = x * x;
    f32x16 p = splat(7.0376836292e-2f);
    p = fma(p, x, splat(-1.1514610310e-1f));
    p = fma(p, x, splat(1.1676998740e-1f));
    p = fma(p, x, splat(-1.2420140846e-1f));
    p = fma(p, x, splat(1.4249322787e-1f));
    p = fma(p, x, splat(-1.6668057665e-1f));
    p = fma(p, x, splat(2.0000714765e-1f));
    p = fma(p, x, splat(-2.4999993993e-1f));
    p = fma(p, x, splat(3.3333331174e-1f));
    const f32x16 e = to_float(exponent);
    const f32x16 low = fma(z, -0.5f, fma(e, -2.12194440e-4f, p * x * z));
    return fma(e, 0.693359375f, x + low);
}

// Products of the low 32 bits of each 64-bit lane.
PENSTOCK_INLINE u64xr multiply_low(u64xr a, uint64_t b) {
#if defined(__AVX512F__)
    return (u64xr)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(int64_t(b)));
#elif defined(__AVX2__)
    return (u64xr)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(int64_t(b)));
#else
    return (a & 0xffffffffu) * b;
#endif
}

template <class H>
PENSTOCK_INLINE Halves<H> multiply_low(const Halves<H>& a, uint64_t b) {
    return {multiply_low(a.lo, b), multiply_low(a.hi, b)};
}

// The lanes of a and b interleaved: those of their lower halves, or of their upper halves.
template <bool UPPER, class V>
PENSTOCK_INLINE V interleave(V a, V b) {
    if constexpr (sizeof(V) > REGISTER) {
        const auto &x = UPPER ? a.hi : a.lo, &y = UPPER ? b.hi : b.lo;
        return {interleave<false>(x, y), interleave<true>(x, y)};
    } else {
        constexpr int N = sizeof(V) / 8, O = UPPER ? N / 2 : 0;
        if constexpr (N == 8)
            return __builtin_shufflevector(a, b, O, O + N, O + 1, O + 1 + N, O + 2, O + 2 + N, O + 3, O + 3 + N);
        else if constexpr (N == 4)
            return __builtin_shufflevector(a, b, O, O + N, O + 1, O + 1 + N);
        else
            return __builtin_shufflevector(a, b, O, O + N);
    }
}

// The noise of tokens 32 g … 32 g + 31.
PENSTOCK_INLINE void gumbel(uint64_t seed, uint32_t position, int g, f32x16 (&noise)[2]) {
    alignas(64) static constexpr uint64_t NUMBERS[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    u64x8 c0 = load<u64x8>(NUMBERS) + uint64_t(8 * g), c1 = u64x8{} + uint64_t(position), c2 = {}, c3 = {};
    uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        const u64x8 product0 = multiply_low(c0, 0xD2511F53u), product1 = multiply_low(c2, 0xCD9E8D57u);
        c0 = (product1 >> 32) ^ c1 ^ uint64_t(key0);
        c1 = product1 & 0xffffffffu;
        c2 = (product0 >> 32) ^ c3 ^ uint64_t(key1);
        c3 = product0 & 0xffffffffu;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    const u64x8 first = c0 | c1 << 32, second = c2 | c3 << 32;
    const u64x8 words[2] = {interleave<false>(first, second), interleave<true>(first, second)};
    for (int half = 0; half < 2; half++) {
        const f32x16 uniform = (to_float((i32x16)((u32x16)words[half] >> 9)) + 0.5f) * 0x1p-23f;
        noise[half] = -log(-log(uniform));
    }
}

// out = logits / temperature; returns the largest.
static float scale_logits(const float* logits, int n, float temperature, float* out) {
    f32x16 top = splat(-__builtin_inff());
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        const f32x16 v = load<f32x16>(logits + i) / temperature;
        store(out + i, v);
        top = vmax(top, v);
    }
    float peak = maximum(top);
    for (; i < n; i++) {
        out[i] = logits[i] / temperature;
        if (out[i] > peak) peak = out[i];
    }
    return peak;
}

// The sum of e^(v - peak).
static float total_mass(const float* v, int n, float peak) {
    constexpr float LOG2_E = 1.44269504f;
    f32x16 total = {};
    int i = 0;
    for (; i + 16 <= n; i += 16) total += exp2((load<f32x16>(v + i) - peak) * LOG2_E);
    float sums = sum(total);
    for (; i < n; i++) sums += exp2(splat((v[i] - peak) * LOG2_E))[0];
    return sums;
}

// Indices of the values that reach a threshold, in order; returns how many.
static int at_least(const float* v, int n, float threshold, int32_t* out) {
    int count = 0, i = 0;
    for (; i + 16 <= n; i += 16) {
        if (maximum(load<f32x16>(v + i)) < threshold) continue;
        for (int j = i; j < i + 16; j++)
            if (v[j] >= threshold) out[count++] = j;
    }
    for (; i < n; i++)
        if (v[i] >= threshold) out[count++] = i;
    return count;
}

// The token of the largest v + noise.
static int32_t draw(const float* v, int n, uint64_t seed, uint32_t position) {
    const i32x16 lanes = lane_numbers();
    f32x16 best = splat(-__builtin_inff());
    i32x16 index = {};
    for (int i = 0; i < n; i += 32) {
        f32x16 noise[2];
        gumbel(seed, position, i / 32, noise);
        for (int half = 0; half < 2; half++) {
            const int first = i + 16 * half, left = n - first;
            f32x16 score = splat(-__builtin_inff());
            if (left >= 16) {
                score = load<f32x16>(v + first) + noise[half];
            } else {
                float scores[16];
                store(scores, score);
                for (int j = 0; j < left; j++) scores[j] = v[first + j] + noise[half][j];
                score = load<f32x16>(scores);
            }
            const i32x16 better = score > best;
            best = select(better, score, best);
            index = select(better, lanes + first, index);
        }
    }
    return index_of_best(best, index);
}

}  // namespace PENSTOCK_ISA
