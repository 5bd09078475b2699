// Vectors of 16 lanes, written once in GCC/Clang vector extensions and compiled once per instruction set.
//
// Every kernel header lives in `namespace PENSTOCK_ISA`, a macro the build sets together with the matching -m flags,
// so one binary holds a copy per instruction set and picks one at run time (api.cpp).
// Kernel headers use no standard library templates: an inline function instantiated with AVX-512 flags could be the
// copy the linker keeps for everyone.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace PENSTOCK_ISA {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef int8_t i8x64 __attribute__((vector_size(64)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

#define PENSTOCK_INLINE static inline __attribute__((always_inline))

template <class V>
PENSTOCK_INLINE V load(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

template <class V>
PENSTOCK_INLINE void store(void* p, V v) {
    memcpy(p, &v, sizeof v);
}

PENSTOCK_INLINE f32x16 splat(float x) { return x - f32x16{}; }  // unlike x + 0, x - 0 is always x: no instruction

PENSTOCK_INLINE f32x16 to_float(i32x16 v) { return __builtin_convertvector(v, f32x16); }

PENSTOCK_INLINE f32x16 vmax(f32x16 a, f32x16 b) { return a > b ? a : b; }

PENSTOCK_INLINE f32x16 vabs(f32x16 v) { return (f32x16)((u32x16)v & 0x7fffffffu); }

PENSTOCK_INLINE f32x16 swap_halves(f32x16 v, int width) {
    switch (width) {
        case 8: return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
        case 4: return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
        case 2: return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
        default: return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    }
}

PENSTOCK_INLINE float sum(f32x16 v) {
#pragma GCC unroll 4
    for (int width = 8; width > 0; width /= 2) v += swap_halves(v, width);
    return v[0];
}

PENSTOCK_INLINE float maximum(f32x16 v) {
#pragma GCC unroll 4
    for (int width = 8; width > 0; width /= 2) v = vmax(v, swap_halves(v, width));
    return v[0];
}

// The index that stands beside the largest value; of equal values the lowest index.
PENSTOCK_INLINE int32_t index_of_best(f32x16 best, i32x16 index) {
    const float peak = maximum(best);
    int32_t found = INT32_MAX;
    for (int i = 0; i < 16; i++)
        if (best[i] == peak && index[i] < found) found = index[i];
    return found == INT32_MAX ? 0 : found;  // only when there is NaN among them
}

// Round to nearest for |v| < 2^22, by letting the addition drop the fraction bits.
PENSTOCK_INLINE i32x16 round_to_int(f32x16 v) {
    const f32x16 magic = splat(12582912.f);
    return (i32x16)(v + magic) - (i32x16)magic;
}

// 2^v, relative error below 3e-7; anything under 2^-126 (also -inf) gives 0.
PENSTOCK_INLINE f32x16 exp2(f32x16 v) {
    const f32x16 clamped = vmax(v, splat(-126.f));
    const i32x16 whole = round_to_int(clamped);
    const f32x16 f = clamped - to_float(whole);  // in [-0.5, 0.5]
    f32x16 p = splat(1.535336188319500e-4f);
    p = p * f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.f;
    const f32x16 scaled = (f32x16)((i32x16)p + (whole << 23));
    return v < -126.f ? f32x16{} : scaled;
}

PENSTOCK_INLINE f32x16 silu(f32x16 v) {
    const f32x16 bounded = vmax(v, splat(-87.f));
    return v / (1.f + exp2(bounded * -1.44269504f));
}

// A lane of 32 bits holds two bfloat16 numbers; a bfloat16 is the upper half of a float32.
PENSTOCK_INLINE f32x16 low_bf16(u32x16 pair) { return (f32x16)(pair << 16); }
PENSTOCK_INLINE f32x16 high_bf16(u32x16 pair) { return (f32x16)(pair & 0xffff0000u); }

PENSTOCK_INLINE f32x16 from_bf16(const uint16_t* p) {
    return (f32x16)(__builtin_convertvector(load<u16x16>(p), u32x16) << 16);
}

PENSTOCK_INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

PENSTOCK_INLINE void store_bf16(uint16_t* p, f32x16 v) {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &rounded, sizeof rounded);
#else
    for (int i = 0; i < 16; i++) p[i] = to_bf16(v[i]);
#endif
}

#if defined(__AVX512BF16__)
// acc[i] += the dot product of the two bfloat16 numbers in lane i with the two at `a`.
PENSTOCK_INLINE f32x16 dot2(f32x16 acc, u32x16 pairs, const uint16_t* a) {
    int32_t two;
    memcpy(&two, a, 4);
    const __m512i repeated = _mm512_set1_epi32(two);
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)pairs, (__m512bh)repeated);
}
#endif

PENSTOCK_INLINE float bf16_to_float(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

PENSTOCK_INLINE bool any_above(f32x16 v, float limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
    bool any = false;
    for (int i = 0; i < 16; i++) any |= v[i] > limit;
    return any;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
// acc + the sums of 4 adjacent products. maddubs would saturate on 255 * 127 * 2, so bytes come widened to 16 bits, the
// even and the odd ones apart: those of the vector by the functions, the 4 repeated ones by the caller.
template <class Even, class Odd>
PENSTOCK_INLINE i32x16 dot4_widened(i32x16 acc, const void* vector, Even even, Odd odd, __m256i a_even, __m256i a_odd) {
    __m256i half[2], sums[2];
    memcpy(half, vector, 64);
    memcpy(sums, &acc, 64);
    for (int h = 0; h < 2; h++) {
        const __m256i e = _mm256_madd_epi16(even(half[h]), a_even), o = _mm256_madd_epi16(odd(half[h]), a_odd);
        sums[h] = _mm256_add_epi32(sums[h], _mm256_add_epi32(e, o));
    }
    memcpy(&acc, sums, 64);
    return acc;
}

PENSTOCK_INLINE __m256i even_unsigned(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi16(0xff)); }
PENSTOCK_INLINE __m256i odd_unsigned(__m256i v) { return _mm256_srli_epi16(v, 8); }
PENSTOCK_INLINE __m256i even_signed(__m256i v) { return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8); }
PENSTOCK_INLINE __m256i odd_signed(__m256i v) { return _mm256_srai_epi16(v, 8); }
#endif

PENSTOCK_INLINE int32_t four_bytes(const void* p) {
    int32_t four;
    memcpy(&four, p, 4);
    return four;
}

// acc[i] += the dot product of four unsigned weights w[4i..4i+3] with the four signed activations at `a`.
PENSTOCK_INLINE i32x16 dot4(i32x16 acc, u8x64 w, const int8_t* a) {
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(four_bytes(a)));
#elif defined(__AVX2__)
    const __m256i four = _mm256_set1_epi32(four_bytes(a));
    return dot4_widened(acc, &w, even_unsigned, odd_unsigned, even_signed(four), odd_signed(four));
#else
    for (int i = 0; i < 16; i++)
        acc[i] += w[4 * i] * a[0] + w[4 * i + 1] * a[1] + w[4 * i + 2] * a[2] + w[4 * i + 3] * a[3];
    return acc;
#endif
}

// The same with the signs the other way round.
PENSTOCK_INLINE i32x16 dot4(i32x16 acc, i8x64 w, const uint8_t* a) {
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32(four_bytes(a)), (__m512i)w);
#elif defined(__AVX2__)
    const __m256i four = _mm256_set1_epi32(four_bytes(a));
    return dot4_widened(acc, &w, even_signed, odd_signed, even_unsigned(four), odd_unsigned(four));
#else
    for (int i = 0; i < 16; i++)
        acc[i] += w[4 * i] * a[0] + w[4 * i + 1] * a[1] + w[4 * i + 2] * a[2] + w[4 * i + 3] * a[3];
    return acc;
#endif
}

PENSTOCK_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
PENSTOCK_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace PENSTOCK_ISA
