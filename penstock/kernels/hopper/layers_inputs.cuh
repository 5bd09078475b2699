// The input of each phase of layers.cu: polled for in global memory, and written to shared memory once all of it is there.
#pragma once
#include "layers_gemm.cuh"

// Eight numbers of the input at a time; of what 16 bytes of a weight are multiplied with, first the even words.
template <bool QUANTIZED>
DEVICE void place_input(Shared& shared, int eight, const u32 (&words)[4]) {
    uint2* to = reinterpret_cast<uint2*>(shared.x) + (QUANTIZED ? eight / 2 * 4 + eight % 2 : eight * 2);
    to[0] = make_uint2(words[0], words[2]);
    to[QUANTIZED ? 2 : 1] = make_uint2(words[1], words[3]);
}

// Writes the input; returns what the GEMV's result must be multiplied by: with fp8 weights the input is scaled to the small
// range of float16.
template <bool QUANTIZED, int COUNT, int EIGHTS>
DEVICE float give_input(Shared& shared, const float (&values)[COUNT][8]) {
    float factor = 1, inverse = 1;
    if constexpr (QUANTIZED) {
        float peak = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) peak = fmaxf(peak, fabsf(values[i][j]));
        for (int step = 16; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, step));
        if (threadIdx.x % 32 == 0) shared.peaks[threadIdx.x / 32] = peak;
        sync_warps();
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) peak = fmaxf(peak, shared.peaks[warp]);
        const int exponent = most(__float_as_int(peak) >> 23, 20);  // to 2^13 .. 2^14
        factor = __int_as_float((267 - exponent) << 23), inverse = __int_as_float((exponent - 13) << 23);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int eight = threadIdx.x + i * THREADS;
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            words[j] = QUANTIZED ? pack_f16(values[i][2 * j] * factor, values[i][2 * j + 1] * factor)
                                 : pack_bf16(values[i][2 * j], values[i][2 * j + 1]);
        if (eight < EIGHTS) place_input<QUANTIZED>(shared, eight, words);
    }
    return inverse;
}

constexpr int eights_each(int size) { return (size / 8 + THREADS - 1) / THREADS; }

// Each of these gives a phase its input; `meanwhile` runs between the first poll and the rest.

// The residual stream times the gain of its deferred RMSNorm; each thread adds to `squares`.
template <bool QUANTIZED, class Meanwhile>
DEVICE float give_normed(Shared& shared, const bf16* x, bool ready, u64 gain, float& squares, Meanwhile meanwhile) {
    constexpr int COUNT = eights_each(HIDDEN), EIGHTS = HIDDEN / 8;
    uint4 gains[COUNT], raw[COUNT];
    float values[COUNT][8];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int eight = threadIdx.x + i * THREADS;
        gains[i] = raw[i] = make_uint4(0, 0, 0, 0);
        if (eight < EIGHTS) {
            raw[i] = poll(x + eight * 8);
            gains[i] = load_once(reinterpret_cast<const uint4*>(gain) + eight);
        }
    }
    meanwhile();
    if (!ready) poll_until_written(raw, [&](int i) { return x + (threadIdx.x + i * THREADS) * 8; });
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        float factors[8];
        unpack(values[i], raw[i]);
        unpack(factors, gains[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) squares += values[i][j] * values[i][j], values[i][j] *= factors[j];
    }
    return give_input<QUANTIZED, COUNT, EIGHTS>(shared, values);
}
// The rest of the deferred RMSNorm, off the critical path: the sum of squares of each warp, and from those the factor.
DEVICE void add_squares(Shared& shared, float squares) {
    squares = over_lanes(squares, 32);
    if (threadIdx.x % 32 == 0) shared.squares[threadIdx.x / 32] = squares;
}
DEVICE float inverse_norm(const Shared& shared, float eps) {
    float squares = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) squares += shared.squares[warp];
    return rsqrtf(squares / HIDDEN + eps);
}

template <class Meanwhile>
DEVICE float give_inner(Shared& shared, const bf16* inner, Meanwhile meanwhile) {
    constexpr int COUNT = eights_each(INNER), EIGHTS = INNER / 8;
    uint4 raw[COUNT];
    float values[COUNT][8];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int eight = threadIdx.x + i * THREADS;
        raw[i] = eight < EIGHTS ? poll(inner + eight * 8) : make_uint4(0, 0, 0, 0);
    }
    meanwhile();
    poll_until_written(raw, [&](int i) { return inner + (threadIdx.x + i * THREADS) * 8; });
#pragma unroll
    for (int i = 0; i < COUNT; i++) unpack(values[i], raw[i]);
    return give_input<FP8, COUNT, EIGHTS>(shared, values);
}

// The output of attention, its parts merged by their weights.
template <class Meanwhile>
DEVICE float give_attended(Shared& shared, const bf16* attended, const float* weights, int parts, Meanwhile meanwhile) {
    constexpr int COUNT = eights_each(MIXED), EIGHTS = MIXED / 8;
    uint4 raw[COUNT * MOST_PARTS];
    u32 shares[COUNT * MOST_PARTS];
    float values[COUNT][8];
    const auto place = [&](int n) { return attended + n % MOST_PARTS * MIXED + (threadIdx.x + n / MOST_PARTS * THREADS) * 8; };
    const auto share_of = [&](int n) {
        return weights + n % MOST_PARTS * HEADS + (threadIdx.x + n / MOST_PARTS * THREADS) / (D / 8);
    };
#pragma unroll
    for (int n = 0; n < COUNT * MOST_PARTS; n++) {
        raw[n] = make_uint4(0, 0, 0, 0), shares[n] = __float_as_uint(NEVER);
        if (threadIdx.x + n / MOST_PARTS * THREADS < EIGHTS && n % MOST_PARTS < parts)
            raw[n] = poll(place(n)), shares[n] = poll_word(share_of(n));
    }
    meanwhile();
    poll_until([&] {
        bool missing = false;
#pragma unroll
        for (int n = 0; n < COUNT * MOST_PARTS; n++) {
            if (!written(raw[n])) raw[n] = poll(place(n)), missing = true;
            if (shares[n] == NOTHING) shares[n] = poll_word(share_of(n)), missing = true;
        }
        return !missing;
    });
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        float peak = NEVER, whole = 0;
#pragma unroll
        for (int p = 0; p < MOST_PARTS; p++) peak = fmaxf(peak, __uint_as_float(shares[i * MOST_PARTS + p]));
#pragma unroll
        for (int j = 0; j < 8; j++) values[i][j] = 0;
#pragma unroll
        for (int p = 0; p < MOST_PARTS; p++)
            if (p < parts) {
                float part[8];
                unpack(part, raw[i * MOST_PARTS + p]);
                const float factor = exp2f(__uint_as_float(shares[i * MOST_PARTS + p]) - peak);
                whole += factor;
#pragma unroll
                for (int j = 0; j < 8; j++) values[i][j] += factor * part[j];
            }
        const float inverse = __fdividef(1, whole);
#pragma unroll
        for (int j = 0; j < 8; j++) values[i][j] *= inverse;
    }
    return give_input<FP8, COUNT, EIGHTS>(shared, values);
}

