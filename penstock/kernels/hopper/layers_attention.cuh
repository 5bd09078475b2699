// Attention of one head over one part of the context, for one new token.
#pragma once
#include "layers_inputs.cuh"

// Half a warp holds a head, each lane eight dimensions of it; `other` are those that they are rotated against.
DEVICE void turn(float (&out)[8], const uint4& raw, const uint4& raw_other, const uint4& gain, const uint4& gain_other,
                 const Shared& shared, float eps) {
    const int lane = threadIdx.x % 16;
    float other[8];
    unpack(out, raw);
    unpack(other, raw_other);
    if (HEAD_NORM) {
        float squares = 0, gains[8], others[8];
        unpack(gains, gain);
        unpack(others, gain_other);
        for (int j = 0; j < 8; j++) squares += out[j] * out[j];
        const float inverse = rsqrtf(over_lanes(squares, 16) / D + eps);
        for (int j = 0; j < 8; j++) out[j] *= inverse * gains[j], other[j] *= inverse * others[j];
    }
    const float sign = lane < 8 ? -1 : 1;
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
        const float4 cos = *reinterpret_cast<const float4*>(shared.angles + lane % 8 * 8 + j);
        const float4 sin = *reinterpret_cast<const float4*>(shared.angles + D / 2 + lane % 8 * 8 + j);
        out[j] = out[j] * cos.x + sign * other[j] * sin.x;
        out[j + 1] = out[j + 1] * cos.y + sign * other[j + 1] * sin.y;
        out[j + 2] = out[j + 2] * cos.z + sign * other[j + 2] * sin.z;
        out[j + 3] = out[j + 3] * cos.w + sign * other[j + 3] * sin.w;
    }
}

DEVICE float dot(const float (&a)[8], const float (&b)[8]) {
    float sum = 0;
    for (int j = 0; j < 8; j++) sum += a[j] * b[j];
    return over_lanes(sum, 16);
}

// `place` is where the new token goes in the cache: none for padding.
DEVICE void attend(Ring& ring, const Unit& unit, const bf16* exchange, bf16* given, bf16* keys, bf16* values, i64 place,
                   u64 query_gain, u64 key_gain, float eps, float scale) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 16, token_lane = threadIdx.x / 16;
    const int kv_head = unit.head / (HEADS / KV_HEADS), rotated = lane ^ 8;
    Shared& shared = ring.shared;
    const bf16* query = exchange + PROJECTED + unit.head * D;
    const bf16* key = exchange + PROJECTED + MIXED + kv_head * D;
    const bf16* value = key + KV_HEADS * D;
    const bool fresh = unit.last && warp == 0;
    const auto place_of = [&](int i) {
        return (i < 2 ? query : i < 4 ? key : value) + (i % 2 ? rotated : lane) * 8;
    };
    uint4 raw[5] = {look(place_of(0)), look(place_of(1))}, gains[4] = {};
    if (fresh) raw[2] = look(place_of(2)), raw[3] = look(place_of(3)), raw[4] = look(place_of(4));
    if (HEAD_NORM) {
        gains[0] = load_once(reinterpret_cast<const bf16*>(query_gain) + lane * 8);
        gains[1] = load_once(reinterpret_cast<const bf16*>(query_gain) + rotated * 8);
        gains[2] = load_once(reinterpret_cast<const bf16*>(key_gain) + lane * 8);
        gains[3] = load_once(reinterpret_cast<const bf16*>(key_gain) + rotated * 8);
    }
    look_until_written(raw, place_of);
    float q[8], acc[8] = {}, peak = UNSEEN, whole = 0;
    turn(q, raw[0], raw[1], gains[0], gains[1], shared, eps);
#pragma unroll
    for (int j = 0; j < 8; j++) q[j] *= scale;
    if (fresh) {
        float turned[8], held[8];
        turn(turned, raw[2], raw[3], gains[2], gains[3], shared, eps);
        const uint4 packed = make_uint4(pack_bf16(turned[0], turned[1]), pack_bf16(turned[2], turned[3]),
                                        pack_bf16(turned[4], turned[5]), pack_bf16(turned[6], turned[7]));
        unpack(turned, packed);
        unpack(held, raw[4]);
        const float score = dot(q, turned);
        if (token_lane == 0) {
            peak = score, whole = 1;
#pragma unroll
            for (int j = 0; j < 8; j++) acc[j] = held[j];
            if (place >= 0 && unit.head % (HEADS / KV_HEADS) == 0) {
                *reinterpret_cast<uint4*>(keys + place + lane * 8) = packed;
                *reinterpret_cast<uint4*>(values + place + lane * 8) = raw[4];
            }
        }
    }
    constexpr int LANES = 2 * WARPS, AHEAD = SLOT_TOKENS / LANES;  // tokens of half a warp in a slot
    for (int base = unit.start; base < unit.stop; base += SLOT_TOKENS, ring.advance()) {
        uint4 k[AHEAD], v[AHEAD];
        float scores[AHEAD], new_peak = peak;
        wait(shared.full + ring.slot, ring.parity);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int number = i * LANES + token_lane, token = base + number;
            const uint4* held = reinterpret_cast<const uint4*>(shared.slots[ring.slot]) + number * (D / 8) + lane;
            const bool seen = token >= unit.first && token < unit.stop;  // else there may be another request's NaN
            k[i] = seen ? held[0] : make_uint4(0, 0, 0, 0);
            v[i] = seen ? held[SLOT_TOKENS * (D / 8)] : make_uint4(0, 0, 0, 0);
            scores[i] = seen ? 0 : NEVER;
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(shared.empty + ring.slot);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            float held[8];
            unpack(held, k[i]);
            scores[i] += dot(q, held);
            new_peak = fmaxf(new_peak, scores[i]);
        }
        const float decay = exp2f(peak - new_peak);
        peak = new_peak;
        whole *= decay;
#pragma unroll
        for (int j = 0; j < 8; j++) acc[j] *= decay;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            float held[8];
            unpack(held, v[i]);
            const float weight = exp2f(scores[i] - peak);
            whole += weight;
#pragma unroll
            for (int j = 0; j < 8; j++) acc[j] += weight * held[j];
        }
    }

    // The two halves of each warp, then the warps.
    const float higher = fmaxf(peak, __shfl_xor_sync(~0u, peak, 16)), factor = exp2f(peak - higher);
    whole *= factor;
    whole += __shfl_xor_sync(~0u, whole, 16);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        acc[j] *= factor;
        acc[j] += __shfl_xor_sync(~0u, acc[j], 16);
    }
    if (token_lane % 2 == 0) {
        float4* to = reinterpret_cast<float4*>(shared.attended[warp] + lane * 8);
        to[0] = make_float4(acc[0], acc[1], acc[2], acc[3]);
        to[1] = make_float4(acc[4], acc[5], acc[6], acc[7]);
    }
    if (threadIdx.x % 32 == 0) shared.highest[warp] = higher, shared.weights[warp] = whole;
    sync_warps();
    if (threadIdx.x < D) {
        float highest = shared.highest[0], all = 0, sum = 0;
#pragma unroll
        for (int w = 1; w < WARPS; w++) highest = fmaxf(highest, shared.highest[w]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float weight = exp2f(shared.highest[w] - highest);
            all += shared.weights[w] * weight;
            sum += shared.attended[w][threadIdx.x] * weight;
        }
        hand_over(given, ATTENDED + unit.part * MIXED + unit.head * D + threadIdx.x, to_bf16(__fdividef(sum, all)));
        if (threadIdx.x == 0)
            hand_over(given, WEIGHTS + 2 * (unit.part * HEADS + unit.head), __float_as_uint(highest + log2f(all)));
    }
}

