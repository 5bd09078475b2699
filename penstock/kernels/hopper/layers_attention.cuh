// Attention of layers.cu for one new token: the queries of one KV head over one part of the context (flash decoding).
//
// Keys and values come by the ring, 128 tokens in a pass; keys are in registers before the queries arrive. A warp computes
// the weights of 16 tokens, all warps share them, and each sums 16 dimensions of the values.
#pragma once
#include "layers_inputs.cuh"

constexpr int GROUP = HEADS / KV_HEADS;
static_assert(GROUP <= 8 && D == 16 * WARPS && PASS_TOKENS == 16 * WARPS, "shares of a warp");

// Half a warp holds a head, each lane eight dimensions of it; `other` are those that they are rotated against.
DEVICE void rotate(float (&out)[8], const uint4& raw, const uint4& raw_other, const uint4& gain, const uint4& gain_other,
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
DEVICE uint4 packed(const float (&x)[8]) {
    return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

// Polls for what this step projects and writes it to shared memory: queries, and for the last part the new token's score
// and value; its key and value also go to the cache at `place` (none for padding). Half a warp has a head.
DEVICE void give_queries(Shared& shared, const Unit& unit, const bf16* exchange, bf16* keys, bf16* values, i64 place,
                         u64 query_gain, u64 key_gain, float eps, float scale) {
    const int lane = threadIdx.x % 16, head = threadIdx.x / 16, rotated = lane ^ 8;
    if (threadIdx.x / 32 >= (GROUP + 1) / 2) return;
    AttentionScratch& scratch = shared.attention;
    const bf16* query = exchange + PROJECTED + (unit.kv_head * GROUP + least(head, GROUP - 1)) * D;
    const bf16* key = exchange + PROJECTED + MIXED + unit.kv_head * D;
    const bf16* value = key + KV_HEADS * D;
    const auto place_of = [&](int i) { return (i < 2 ? query : i < 4 ? key : value) + (i % 2 ? rotated : lane) * 8; };
    uint4 raw[5] = {poll(place_of(0)), poll(place_of(1))}, gains[4] = {};
    if (unit.last) raw[2] = poll(place_of(2)), raw[3] = poll(place_of(3)), raw[4] = poll(place_of(4));
    if (HEAD_NORM) {
        gains[0] = load_once(reinterpret_cast<const bf16*>(query_gain) + lane * 8);
        gains[1] = load_once(reinterpret_cast<const bf16*>(query_gain) + rotated * 8);
        gains[2] = load_once(reinterpret_cast<const bf16*>(key_gain) + lane * 8);
        gains[3] = load_once(reinterpret_cast<const bf16*>(key_gain) + rotated * 8);
    }
    poll_until_written(raw, place_of);
    float q[8];
    rotate(q, raw[0], raw[1], gains[0], gains[1], shared, eps);
    if (head < GROUP) *reinterpret_cast<uint4*>(scratch.queries[head] + lane * 8) = packed(q);
    if (!unit.last) return;
    float k[8], score = 0;
    rotate(k, raw[2], raw[3], gains[2], gains[3], shared, eps);
    const uint4 new_key = packed(k);
    unpack(k, new_key);
    for (int j = 0; j < 8; j++) score += q[j] * k[j];
    score = over_lanes(score, 16);
    if (lane == 0 && head < GROUP) scratch.new_scores[head] = score * scale;
    if (head == 0) {
        *reinterpret_cast<uint4*>(scratch.new_value + lane * 8) = raw[4];
        if (place >= 0) {
            *reinterpret_cast<uint4*>(keys + place + lane * 8) = new_key;
            *reinterpret_cast<uint4*>(values + place + lane * 8) = raw[4];
        }
    }
}

// A warp's share of a pass, as operands of mma: keys of its 16 tokens, and its 16 dimensions of all values. Garbage where
// there are no tokens.
struct Pass {
    Shared& shared;
    int slot, slots;  // the first of the ring, and how many
    u32 keys[8][4];

    // The boxes are halves of 64 dimensions, [16, 128 bytes] each, swizzled. Of a block, eight dimensions of a token:
    DEVICE u32 place(int block, bool of_values, int token, int eight) const {
        const u32 tiles = shared_address(aligned_slot(shared, Ring::after(slot, block / 2)));
        const u32 tile = tiles + (of_values ? 2 * SLOT_TOKENS * D : 0);
        return tile + (block % 2 * 2 + eight / 8) * (BLOCK * 128) + token * 128 + ((eight ^ token) & 7) * 16;
    }

    DEVICE void begin(Ring& ring, int tokens) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        slot = ring.slot, slots = least((tokens + SLOT_TOKENS - 1) / SLOT_TOKENS, PASS_TOKENS / SLOT_TOKENS);
        for (int i = 0; i < slots; i++, ring.advance()) wait(shared.full + ring.slot, ring.parity);
#pragma unroll
        for (int step = 0; step < 8; step++) load_matrices(keys[step], place(warp, false, lane % 16, 2 * step + lane / 16));
    }

    DEVICE void load(u32 (&values)[WARPS][4]) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int block = 0; block < WARPS; block++)
            load_matrices_transposed(values[block], place(block, true, lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2));
    }

    // The slots may be filled again. What is not seen may be another request's NaN, so it becomes zero.
    DEVICE void end(u32 (&values)[WARPS][4], int seen_from, int seen_to) const {
        const int lane = threadIdx.x % 32;
        __syncwarp();
        if (lane < slots) arrive_having(shared.empty + Ring::after(slot, lane), values[WARPS - 1][3]);
        const auto seen = [&](int token) { return token >= seen_from && token < seen_to; };
#pragma unroll
        for (int block = 0; block < WARPS; block++)
            if (!seen(block * BLOCK) || !seen(block * BLOCK + BLOCK - 1))
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int token = block * BLOCK + i / 2 * 8 + lane % 4 * 2;
                    values[block][i] &= (seen(token) ? 0xFFFFu : 0) | (seen(token + 1) ? 0xFFFF0000u : 0);
                }
    }
};

// `exchange` is where to poll, `given` where to publish.
DEVICE void attend(Ring& ring, const Unit& unit, const bf16* exchange, bf16* given, bf16* key_cache, bf16* value_cache,
                   i64 place, u64 query_gain, u64 key_gain, float eps, float scale) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane / 4, pair = lane % 4;
    Shared& shared = ring.shared;
    AttentionScratch& scratch = shared.attention;
    Pass pass{shared};
    pass.begin(ring, unit.stop - unit.start);
    give_queries(shared, unit, exchange, key_cache, value_cache, place, query_gain, key_gain, eps, scale);
    sync_warps();
    // Of head `column`, and of dimensions 16 * warp + column and + 8 for heads 2 * pair and 2 * pair + 1.
    const int head = least(column, GROUP - 1);
    float peak = UNSEEN, whole = 0, sums[4] = {};
    if (unit.last) {
        peak = scratch.new_scores[head], whole = pair == 0;
        sums[0] = sums[1] = from_bf16(scratch.new_value[16 * warp + column]);
        sums[2] = sums[3] = from_bf16(scratch.new_value[16 * warp + column + 8]);
    }
    for (int base = unit.start, buffer = 0; base < unit.stop; base += PASS_TOKENS, buffer ^= 1) {
        const int from = unit.first - base, to = unit.stop - base;
        if (base > unit.start) pass.begin(ring, to);
        float scores[2][4] = {};
#pragma unroll
        for (int step = 0; step < 8; step += 2) {  // a head is a column; there is garbage in those beyond the group
            u32 queries[4];
            load_matrices(queries, shared_address(scratch.queries[lane % 8] + (2 * step + lane / 8) * 8));
            mma_bf16(scores[0], pass.keys[step], queries[0], queries[1]);
            mma_bf16(scores[1], pass.keys[step + 1], queries[2], queries[3]);
        }
        u32 values[WARPS][4];
        pass.load(values);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = 16 * warp + column + i / 2 * 8;
            scores[0][i] = token >= from && token < to ? (scores[0][i] + scores[1][i]) * scale : NEVER;
        }
        float highest[2] = {fmaxf(scores[0][0], scores[0][2]), fmaxf(scores[0][1], scores[0][3])};
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
#pragma unroll
            for (int i = 0; i < 2; i++) highest[i] = fmaxf(highest[i], __shfl_xor_sync(~0u, highest[i], step));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int its = 2 * pair + i % 2;
            if (its < GROUP) {
                const float weight = exp2_approx(scores[0][i] - highest[i % 2]);
                scratch.weights[buffer][its][16 * warp + column + i / 2 * 8] = weight;
                if (column == 0 && i < 2) scratch.highest[buffer][its][warp] = highest[i];
            }
        }
        sync_warps();
        pass.end(values, from, to);
        float factors[WARPS], new_peak = peak;
#pragma unroll
        for (int i = 0; i < WARPS; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(scratch.highest[buffer][head] + i);
            factors[i] = four.x, factors[i + 1] = four.y, factors[i + 2] = four.z, factors[i + 3] = four.w;
            new_peak = fmaxf(fmaxf(new_peak, fmaxf(four.x, four.y)), fmaxf(four.z, four.w));
        }
        const float decay = exp2_approx(peak - new_peak);
        const float decays[2] = {__shfl_sync(~0u, decay, 8 * pair), __shfl_sync(~0u, decay, 8 * pair + 4)};
        peak = new_peak;
        whole *= decay;
        float more[4] = {};
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] *= decays[i % 2];
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            const float factor = exp2_approx(factors[i] - peak);
            const float* weights = scratch.weights[buffer][head] + 16 * i + 2 * pair;
            const float2 low = *reinterpret_cast<const float2*>(weights);
            const float2 high = *reinterpret_cast<const float2*>(weights + 8);
            whole += ((low.x + low.y) + (high.x + high.y)) * factor;
            mma_bf16(i % 2 ? more : sums, values[i], pack_bf16(low.x * factor, low.y * factor),
                     pack_bf16(high.x * factor, high.y * factor));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] += more[i];
    }
    whole = over_lanes(whole, 4);
    const float inverse = __fdividef(1, whole);
    const float inverses[2] = {__shfl_sync(~0u, inverse, 8 * pair), __shfl_sync(~0u, inverse, 8 * pair + 4)};
    const u32 low = transposed(pack_bf16(sums[0] * inverses[0], sums[1] * inverses[1]));  // of head `column` again
    const u32 high = transposed(pack_bf16(sums[2] * inverses[0], sums[3] * inverses[1]));
    if (column < GROUP) {
        const int its = unit.part * HEADS + unit.kv_head * GROUP + column;
        publish(given, ATTENDED + its * D + 16 * warp + 2 * pair, low);
        publish(given, ATTENDED + its * D + 16 * warp + 2 * pair + 8, high);
        if (warp == 0 && pair == 0) publish(given, WEIGHTS + 2 * its, __float_as_uint(peak + log2_approx(whole)));
    }
    sync_warps();  // the next input takes the place of what was read here
}
