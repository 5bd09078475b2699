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
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "halves.h"

namespace PENSTOCK_ISA {

#if defined(__AVX512F__)
constexpr int REGISTER = 64;  // bytes
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif

template <class T, int BYTES>
struct Vector {
    typedef Halves<typename Vector<T, BYTES / 2>::type> type;
};

template <class T>
struct Vector<T, REGISTER> {
    typedef T type __attribute__((vector_size(REGISTER)));
};

typedef Vector<float, 64>::type f32x16;
typedef Vector<int32_t, 64>::type i32x16;
typedef Vector<uint32_t, 64>::type u32x16;
typedef Vector<uint64_t, 64>::type u64x8;
typedef Vector<uint8_t, 64>::type u8x64;
typedef Vector<int8_t, 64>::type i8x64;

// What a register holds, for the few operations that differ between instruction sets.
typedef Vector<float, REGISTER>::type f32xr;
typedef Vector<int32_t, REGISTER>::type i32xr;
typedef Vector<uint32_t, REGISTER>::type u32xr;
typedef Vector<uint64_t, REGISTER>::type u64xr;
typedef Vector<uint8_t, REGISTER>::type u8xr;
typedef Vector<int8_t, REGISTER>::type i8xr;

template <class V>
PENSTOCK_INLINE V load(const void* p) {
    if constexpr (sizeof(V) > REGISTER) {
        typedef decltype(V{}.lo) H;
        return {load<H>(p), load<H>(static_cast<const char*>(p) + sizeof(H))};
    } else {
        V v;
        memcpy(&v, p, sizeof v);
        return v;
    }
}

template <class V>
PENSTOCK_INLINE void store(void* p, V v) {
    if constexpr (sizeof(V) > REGISTER) {
        store(p, v.lo);
        store(static_cast<char*>(p) + sizeof v.lo, v.hi);
    } else {
        memcpy(p, &v, sizeof v);
    }
}

// a * b + c, rounded once where there is an instruction for it. The build lets the compiler fuse nothing else: it would
// fuse in one copy of an inlined function and not in the next, and a row's numbers would depend on which copy it met.
PENSTOCK_INLINE f32xr fma(f32xr a, f32xr b, f32xr c) {
#if defined(__AVX512F__)
    return (f32xr)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (f32xr)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (f32xr)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

template <class H>
PENSTOCK_INLINE Halves<H> fma(const Halves<H>& a, const Halves<H>& b, const Halves<H>& c) {
    return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)};
}

PENSTOCK_INLINE f32x16 splat(float x) { return x - f32x16{}; }  // unlike x + 0, x - 0 is always x: no instruction

PENSTOCK_INLINE f32x16 fma(f32x16 a, float b, f32x16 c) { return fma(a, splat(b), c); }

// 0, 1, …, 15
PENSTOCK_INLINE i32x16 lane_numbers() {
    alignas(64) static constexpr int32_t NUMBERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load<i32x16>(NUMBERS);
}

// Where a lane of the mask is set that of a, elsewhere that of b.
template <class M, class V>
PENSTOCK_INLINE V select(M mask, V a, V b) {
    if constexpr (sizeof(V) > REGISTER)
        return {select(mask.lo, a.lo, b.lo), select(mask.hi, a.hi, b.hi)};
    else
        return mask ? a : b;
}

PENSTOCK_INLINE f32xr to_float(i32xr v) { return __builtin_convertvector(v, f32xr); }

template <class H>
PENSTOCK_INLINE auto to_float(const Halves<H>& v) {
    return halves(to_float(v.lo), to_float(v.hi));
}

template <class V>
PENSTOCK_INLINE V vmax(V a, V b) {
    return select(a > b, a, b);
}

PENSTOCK_INLINE f32x16 vabs(f32x16 v) { return (f32x16)((u32x16)v & 0x7fffffffu); }

// Exchange the halves of every run of 2 WIDTH lanes.
template <int WIDTH, class V>
PENSTOCK_INLINE V swap_halves(V v) {
    if constexpr (sizeof(V) == 8 * WIDTH && sizeof(V) > REGISTER)
        return {v.hi, v.lo};
    else if constexpr (sizeof(V) > REGISTER)
        return {swap_halves<WIDTH>(v.lo), swap_halves<WIDTH>(v.hi)};
    else {
        constexpr auto from = [](int lane) { return lane ^ WIDTH; };
        if constexpr (sizeof(V) == 64)
            return __builtin_shufflevector(v, v, from(0), from(1), from(2), from(3), from(4), from(5), from(6), from(7),
                                           from(8), from(9), from(10), from(11), from(12), from(13), from(14), from(15));
        else if constexpr (sizeof(V) == 32)
            return __builtin_shufflevector(v, v, from(0), from(1), from(2), from(3), from(4), from(5), from(6), from(7));
        else
            return __builtin_shufflevector(v, v, from(0), from(1), from(2), from(3));
    }
}

PENSTOCK_INLINE float sum(f32x16 v) {
    v += swap_halves<8>(v);
    v += swap_halves<4>(v);
    v += swap_halves<2>(v);
    v += swap_halves<1>(v);
    return v[0];
}

PENSTOCK_INLINE float maximum(f32x16 v) {
    v = vmax(v, swap_halves<8>(v));
    v = vmax(v, swap_halves<4>(v));
    v = vmax(v, swap_halves<2>(v));
    v = vmax(v, swap_halves<1>(v));
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

PENSTOCK_INLINE i32x16 round_product(f32x16 a, f32x16 b) {
    const f32x16 magic = splat(12582912.f);
    return (i32x16)fma(a, b, magic) - (i32x16)magic;
}

// 2^v, relative error below 3e-7; anything under 2^-126 (also -inf) gives 0.
PENSTOCK_INLINE f32x16 exp2(f32x16 v) {
    const f32x16 clamped = vmax(v, splat(-126.f));
    const i32x16 whole = round_to_int(clamped);
    const f32x16 f = clamped - to_float(whole);  // in [-0.5, 0.5]
    f32x16 p = splat(1.535336188319500e-4f);
    p = fma(p, f, splat(1.339887440266574e-3f));
    p = fma(p, f, splat(9.618437357674640e-3f));
    p = fma(p, f, splat(5.550332471162809e-2f));
    p = fma(p, f, splat(2.402264791363012e-1f));
    p = fma(p, f, splat(6.931472028550421e-1f));
    p = fma(p, f, splat(1.f));
    const f32x16 scaled = (f32x16)((i32x16)p + (whole << 23));
    return select(v < -126.f, f32x16{}, scaled);
}

PENSTOCK_INLINE f32x16 silu(f32x16 v) {
    const f32x16 bounded = vmax(v, splat(-87.f));
    return v / (1.f + exp2(bounded * -1.44269504f));
}

// v (1 + erf(v / sqrt 2)) / 2, with erf by Abramowitz and Stegun 7.1.26, which is off by 1.5e-7 at most.
PENSTOCK_INLINE f32x16 gelu(f32x16 v) {
    const f32x16 z = vabs(v) * 0.70710678f, t = 1.f / fma(z, 0.3275911f, splat(1.f));
    f32x16 p = splat(1.061405429f);
    p = fma(p, t, splat(-1.453152027f));
    p = fma(p, t, splat(1.421413741f));
    p = fma(p, t, splat(-0.284496736f));
    p = fma(p, t, splat(0.254829592f));
    const f32x16 tail = p * t * exp2(z * z * -1.44269504f);  // 1 - erf z
    return 0.5f * v * select(v < 0.f, tail, 2.f - tail);
}

// A lane of 32 bits holds two bfloat16 numbers; a bfloat16 is the upper half of a float32.
PENSTOCK_INLINE f32x16 low_bf16(u32x16 pair) { return (f32x16)(pair << 16); }
PENSTOCK_INLINE f32x16 high_bf16(u32x16 pair) { return (f32x16)(pair & 0xffff0000u); }

template <class V = u32x16>
PENSTOCK_INLINE V widened(const uint16_t* p) {
    if constexpr (sizeof(V) > REGISTER) {
        typedef decltype(V{}.lo) H;
        return {widened<H>(p), widened<H>(p + sizeof(H) / 4)};
    } else {
        typedef uint16_t narrow __attribute__((vector_size(REGISTER / 2)));
        narrow v;
        memcpy(&v, p, sizeof v);
        return __builtin_convertvector(v, V);
    }
}

PENSTOCK_INLINE f32x16 from_bf16(const uint16_t* p) { return (f32x16)(widened(p) << 16); }

// The lowest byte of each lane.
template <class V>
PENSTOCK_INLINE void store_bytes(void* p, V v) {
    if constexpr (sizeof(V) > REGISTER) {
        store_bytes(p, v.lo);
        store_bytes(static_cast<char*>(p) + sizeof v.lo / 4, v.hi);
    } else {
#if defined(__AVX2__) && !defined(__AVX512F__)
        const __m256i order = _mm256_set1_epi32(0x0c080400);
        const __m256i four = _mm256_shuffle_epi8((__m256i)v, order);
        const __m128i eight = _mm_unpacklo_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
        memcpy(p, &eight, 8);
#else
        typedef int8_t bytes __attribute__((vector_size(REGISTER / 4)));
        const bytes narrow = __builtin_convertvector(v, bytes);
        memcpy(p, &narrow, sizeof narrow);
#endif
    }
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
    const u32x16 bits = (u32x16)v, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t wide[16];
    store(wide, rounded);
    for (int i = 0; i < 16; i++) p[i] = uint16_t(wide[i]);
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

template <class V>
PENSTOCK_INLINE bool any_above(V v, float limit) {
    if constexpr (sizeof(V) > REGISTER) {
        return any_above(v.lo, limit) | any_above(v.hi, limit);
    } else {
#if defined(__AVX512F__)
        return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
        return _mm256_movemask_ps((__m256)(v > limit)) != 0;
#else
        return (v[0] > limit) | (v[1] > limit) | (v[2] > limit) | (v[3] > limit);
#endif
    }
}

PENSTOCK_INLINE int32_t four_bytes(const void* p) {
    int32_t four;
    memcpy(&four, p, 4);
    return four;
}

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
// maddubs would saturate on 255 * 127 * 2, so bytes are widened to 16 bits, the even and the odd ones apart.
PENSTOCK_INLINE __m256i even_unsigned(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi16(0xff)); }
PENSTOCK_INLINE __m256i odd_unsigned(__m256i v) { return _mm256_srli_epi16(v, 8); }
PENSTOCK_INLINE __m256i even_signed(__m256i v) { return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8); }
PENSTOCK_INLINE __m256i odd_signed(__m256i v) { return _mm256_srai_epi16(v, 8); }

PENSTOCK_INLINE i32xr add_pairs(i32xr acc, __m256i w_even, __m256i a_even, __m256i w_odd, __m256i a_odd) {
    const __m256i even = _mm256_madd_epi16(w_even, a_even), odd = _mm256_madd_epi16(w_odd, a_odd);
    return (i32xr)_mm256_add_epi32((__m256i)acc, _mm256_add_epi32(even, odd));
}
#elif !defined(__AVX2__)
template <class W, class A>
PENSTOCK_INLINE i32xr dot4_by_lanes(i32xr acc, W w, const A* a) {
    for (int i = 0; i < REGISTER / 4; i++)
        acc[i] += w[4 * i] * a[0] + w[4 * i + 1] * a[1] + w[4 * i + 2] * a[2] + w[4 * i + 3] * a[3];
    return acc;
}
#endif

// acc[i] += the dot product of four unsigned weights w[4i..4i+3] with the four signed activations at `a`.
PENSTOCK_INLINE i32xr dot4(i32xr acc, u8xr w, const int8_t* a) {
#if defined(__AVX512VNNI__)
    return (i32xr)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(four_bytes(a)));
#elif defined(__AVXVNNI__)
    return (i32xr)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, _mm256_set1_epi32(four_bytes(a)));
#elif defined(__AVX2__)
    const __m256i v = (__m256i)w, four = _mm256_set1_epi32(four_bytes(a));
    return add_pairs(acc, even_unsigned(v), even_signed(four), odd_unsigned(v), odd_signed(four));
#else
    return dot4_by_lanes(acc, w, a);
#endif
}

// The same for weights up to 15 and at most 32 of them: the sums of dot4_small become those of dot4 by dot4_total. Without
// a dot product of bytes, lanes hold two sums of 16 bits until then (8 x 2 x 15 x 127 fits).
PENSTOCK_INLINE i32xr dot4_small(i32xr acc, u8xr w, const int8_t* a) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(four_bytes(a)));
    return (i32xr)_mm256_add_epi16((__m256i)acc, pairs);
#else
    return dot4(acc, w, a);
#endif
}

PENSTOCK_INLINE i32xr dot4_total(i32xr acc) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
    return (i32xr)_mm256_madd_epi16((__m256i)acc, _mm256_set1_epi16(1));
#else
    return acc;
#endif
}

template <class H>
PENSTOCK_INLINE Halves<H> dot4_total(const Halves<H>& acc) {
    return {dot4_total(acc.lo), dot4_total(acc.hi)};
}

template <class H, class W>
PENSTOCK_INLINE Halves<H> dot4_small(const Halves<H>& acc, const Halves<W>& w, const int8_t* a) {
    return {dot4_small(acc.lo, w.lo, a), dot4_small(acc.hi, w.hi, a)};
}

// dot4 with the signs the other way round.
PENSTOCK_INLINE i32xr dot4(i32xr acc, i8xr w, const uint8_t* a) {
#if defined(__AVX512VNNI__)
    return (i32xr)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32(four_bytes(a)), (__m512i)w);
#elif defined(__AVXVNNI__)
    return (i32xr)_mm256_dpbusd_avx_epi32((__m256i)acc, _mm256_set1_epi32(four_bytes(a)), (__m256i)w);
#elif defined(__AVX2__)
    const __m256i v = (__m256i)w, four = _mm256_set1_epi32(four_bytes(a));
    return add_pairs(acc, even_signed(v), even_unsigned(four), odd_signed(v), odd_unsigned(four));
#else
    return dot4_by_lanes(acc, w, a);
#endif
}

template <class H, class W, class A>
PENSTOCK_INLINE Halves<H> dot4(const Halves<H>& acc, const Halves<W>& w, const A* a) {
    return {dot4(acc.lo, w.lo, a), dot4(acc.hi, w.hi, a)};
}

PENSTOCK_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
PENSTOCK_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace PENSTOCK_ISA
