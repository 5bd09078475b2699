// The vector part of sampling: passes over a row of logits. The noise of a token is word token % 4 of Philox4x32-10 with
// the seed as key and (token / 4, position, 0, 0) as counter; word x gives u = (x / 512 + 0.5) / 2^23 and the noise
// -log(-log(u)).
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

// The keys of the ten rounds of Philox.
struct Keys {
    uint64_t first[10], second[10];
    explicit Keys(uint64_t seed) {
        uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
        for (int round = 0; round < 10; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u)
            first[round] = key0, second[round] = key1;
    }
};

// u of tokens 32 g … 32 g + 31.
PENSTOCK_INLINE void uniform_of(const Keys& keys, uint32_t position, int g, f32x16 (&uniform)[2]) {
    alignas(64) static constexpr uint64_t NUMBERS[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    // The first round, whose last two words are 0. Only the lower halves of the lanes matter until the end.
    const u64x8 product = multiply_low(load<u64x8>(NUMBERS) + uint64_t(8 * g), 0xD2511F53u);
    u64x8 c0 = u64x8{} + (uint64_t(position) ^ keys.first[0]), c1 = {}, c2 = (product >> 32) ^ keys.second[0], c3 = product;
#pragma GCC unroll 9
    for (int round = 1; round < 10; round++) {
        const u64x8 product0 = multiply_low(c0, 0xD2511F53u), product1 = multiply_low(c2, 0xCD9E8D57u);
        c0 = (product1 >> 32) ^ c1 ^ keys.first[round];
        c1 = product1;
        c2 = (product0 >> 32) ^ c3 ^ keys.second[round];
        c3 = product0;
    }
    const u64x8 first = (c0 & 0xffffffffu) | c1 << 32, second = (c2 & 0xffffffffu) | c3 << 32;
    const u64x8 words[2] = {interleave<false>(first, second), interleave<true>(first, second)};
    for (int half = 0; half < 2; half++)
        uniform[half] = (to_float((i32x16)((u32x16)words[half] >> 9)) + 0.5f) * 0x1p-23f;
}

// 16 logits from i on, of which there are n.
PENSTOCK_INLINE f32x16 logits_at(const float* logits, int n, int i) {
    if (n - i >= 16) return load<f32x16>(logits + i);
    float some[16];
    for (int j = 0; j < 16; j++) some[j] = i + j < n ? logits[i + j] : -__builtin_inff();
    return load<f32x16>(some);
}

PENSTOCK_INLINE float block_maximum(const float* logits, int n, int i) {
    return maximum(vmax(logits_at(logits, n, i), logits_at(logits, n, i + 16)));
}

// The largest of each block.
static void block_maxima(const float* logits, int n, float* maxima) {
    for (int i = 0; i < n; i += SAMPLING_BLOCK) maxima[i / SAMPLING_BLOCK] = block_maximum(logits, n, i);
}

// The allowed logits of a block that has some: the others become -inf. Returns the largest.
PENSTOCK_INLINE float mask_block(float* logits, int n, int block, int32_t word) {
    alignas(64) static constexpr int32_t BITS[32] = {
        1 << 0,  1 << 1,  1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,  1 << 8,  1 << 9,  1 << 10,
        1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16, 1 << 17, 1 << 18, 1 << 19, 1 << 20, 1 << 21,
        1 << 22, 1 << 23, 1 << 24, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30, int32_t(1u << 31)};
    for (int half = 0; half < 32; half += 16) {
        const int i = block * SAMPLING_BLOCK + half;
        const i32x16 forbidden = (load<i32x16>(BITS + half) & word) == 0;
        const f32x16 left = select(forbidden, splat(-__builtin_inff()), logits_at(logits, n, i));
        if (n - i >= 16) {
            store(logits + i, left);
            continue;
        }
        float some[16];
        store(some, left);
        for (int j = 0; i + j < n; j++) logits[i + j] = some[j];
    }
    return block_maximum(logits, n, block * SAMPLING_BLOCK);
}

// Tokens whose bit is not set get -inf, and so do the maxima of blocks that do not come within `margin` of the largest
// logit that is allowed; their logits are left as they are. Most blocks of peaked logits are not even read.
static void mask_logits(float* logits, int n, const int32_t* mask, float* maxima, float margin) {
    const int blocks = (n + SAMPLING_BLOCK - 1) / SAMPLING_BLOCK;
    float reached = -__builtin_inff();
    const auto apply = [&](int block) {
        const int32_t word = mask[block];
        if (word == 0)
            maxima[block] = -__builtin_inff();
        else if (word != -1)
            maxima[block] = mask_block(logits, n, block, word);
        reached = maxima[block] > reached ? maxima[block] : reached;
    };
    const f32x16 nothing = splat(-__builtin_inff());
    f32x16 largest = nothing;
    i32x16 index = {};
    for (int first = 0; first < blocks; first += 16) {
        const f32x16 tops = load<f32x16>(maxima + first);
        const i32x16 better = tops > largest;
        largest = select(better, tops, largest);
        index = select(better, lane_numbers() + first, index);
    }
    const int top = index_of_best(largest, index);
    apply(top);  // mostly it is allowed, and nearly all others are too small then
    for (int first = 0; first < blocks; first += 16) {
        const f32x16 tops = load<f32x16>(maxima + first);
        if (!any_above(tops, reached - margin)) {
            store(maxima + first, nothing);
            continue;
        }
        for (int block = first; block < first + 16 && block < blocks; block++) {
            if (block == top) continue;
            if (maxima[block] > reached - margin)
                apply(block);
            else
                maxima[block] = -__builtin_inff();
        }
    }
}

// Calls use(16 logits) for blocks that have one above the limit. After each 16 blocks it asks whether to go on.
template <class Use, class More>
PENSTOCK_INLINE void above(const float* logits, const float* maxima, int n, float limit, Use use, More more) {
    for (int first = 0; first < n; first += 16 * SAMPLING_BLOCK) {
        const float* tops = maxima + first / SAMPLING_BLOCK;
        if (!any_above(load<f32x16>(tops), limit)) continue;
        for (int b = 0; b < 16; b++) {
            if (!(tops[b] > limit)) continue;
            const int i = first + b * SAMPLING_BLOCK;
            use(logits_at(logits, n, i));
            use(logits_at(logits, n, i + 16));
        }
        if (!more()) return;
    }
}

// How many are above the limit; where that is enough, at least as many.
static int count_above(const float* logits, const float* maxima, int n, float limit, int enough) {
    f32x16 count = {};
    above(
        logits, maxima, n, limit, [&](f32x16 v) { count += select(v > limit, splat(1.f), f32x16{}); },
        [&] { return sum(count) < float(enough); });
    return int(sum(count));
}

// The sums of e^(scale (logit - peak)) over logits above two limits.
static Masses masses(const float* logits, const float* maxima, int n, float low, float high, float peak, float scale) {
    const float factor = scale * 1.44269504f;
    f32x16 above_low = {}, above_high = {};
    Masses total = {};
    above(
        logits, maxima, n, low,
        [&](f32x16 v) {
            const f32x16 mass = exp2((v - peak) * factor);
            above_low += select(v > low, mass, f32x16{});
            above_high += select(v > high, mass, f32x16{});
        },
        [&] {
            total.above_low += sum(above_low);
            total.above_high += sum(above_high);
            above_low = above_high = f32x16{};
            return true;
        });
    return total;
}

// The token of the largest logit / temperature + noise among logits above the limit, of which there must be one. Where no
// u of a block is large enough to beat the best so far even with the block's largest logit, its logarithms are left out.
static int32_t draw(const float* logits, const float* maxima, int n, float limit, float temperature, uint64_t seed,
                    uint32_t position) {
    constexpr float LOG2_E = 1.44269504f, ERROR = 1e-5f;  // far more than that of exp2
    constexpr float LARGEST = 24.1f;                      // more than any noise, in powers of two
    const Keys keys(seed);
    const i32x16 lanes = lane_numbers();
    const f32x16 nothing = splat(-__builtin_inff());
    f32x16 best = nothing;
    i32x16 index = {};
    for (int first = 0; first < n; first += 16 * SAMPLING_BLOCK) {
        const f32x16 tops = load<f32x16>(maxima + first / SAMPLING_BLOCK);
        if (!any_above(tops, limit)) continue;
        float needed[16] = {};
        if (const float reached = maximum(best); reached > -__builtin_inff()) {
            const f32x16 ahead = (tops / temperature - reached) * LOG2_E;
            const f32x16 bounded = select(ahead > 30.f, splat(30.f), ahead);
            store(needed, select(ahead < -LARGEST, splat(1.f), exp2(exp2(bounded) * -LOG2_E) - ERROR));
        }
        for (int b = 0; b < 16; b++) {
            if (!(tops[b] > limit) || needed[b] == 1.f) continue;
            const int block = first / SAMPLING_BLOCK + b;
            f32x16 uniform[2];
            uniform_of(keys, position, block, uniform);
            if (!any_above(vmax(uniform[0], uniform[1]), needed[b])) continue;
            for (int half = 0; half < 2; half++) {
                const int i = block * SAMPLING_BLOCK + 16 * half;
                const f32x16 v = logits_at(logits, n, i);
                const f32x16 score = select(v > limit, v / temperature - log(-log(uniform[half])), nothing);
                const i32x16 better = score > best;
                best = select(better, score, best);
                index = select(better, lanes + i, index);
            }
        }
    }
    return index_of_best(best, index);
}

}  // namespace PENSTOCK_ISA
