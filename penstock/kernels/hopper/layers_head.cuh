// The end of a step of layers.cu: final norm, output projection (head) and argmax.
#pragma once
#include "layers_inputs.cuh"

struct Head {
    float* logits;
    i64 *token, *last_token;  // the argmax goes to both; NOT_A_NUMBER to the first where no logit is a number
};

constexpr int NOT_A_NUMBER = -2;  // as in engine/executor.py
#define LOWEST __int_as_float(0xFF800000)  // -infinity

// A key orders tokens: a higher score has a higher key, and of equal scores the lower token. No key is UNDECIDED.
constexpr u64 UNDECIDED = ~0ull;
DEVICE u64 key_of(float score, u32 token) {
    const u32 bits = __float_as_uint(score + 0.0f);  // no negative zero
    return static_cast<u64>(bits >> 31 ? ~bits : bits | 1u << 31) << 32 | (NOTHING - token);
}
DEVICE u64 highest_of_warp(u64 key) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const u64 other = __shfl_xor_sync(~0u, key, step);
        key = other > key ? other : key;
    }
    return key;
}
// The highest key of the CTA, in every thread.
DEVICE u64 highest_of_cta(Shared& shared, u64 key) {
    key = highest_of_warp(key);
    if (threadIdx.x % 32 == 0) shared.argmax[threadIdx.x / 32] = key;
    sync_warps();
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) key = shared.argmax[warp] > key ? shared.argmax[warp] : key;
    return key;
}

// Logits of this CTA's tokens, HEAD_ROWS at a time: while some threads add those up, all go on with the next.
// Returns the key of their argmax.
DEVICE u64 compute_logits(Ring& ring, const Head& head, const Rows& rows, float factor, float eps) {
    Shared& shared = ring.shared;
    float best = LOWEST;
    int argmax = rows.first;
    for (int base = 0; base < rows.count; base += HEAD_ROWS) {
        const int group = base / HEAD_ROWS, count = least(rows.count - base, HEAD_ROWS), to = group % 2 * HEAD_ROWS;
        Gemv<false, HIDDEN, HEAD_ROWS / ROWS, 0>().compute(ring, count, to);
        sync_warps();
        if (base == 0) factor *= inverse_norm(shared, eps);
        const int mine = threadIdx.x - group * HEAD_ROWS % THREADS;
        if (mine >= 0 && mine < count) {
            const int token = rows.first + base + mine;
            const float score = total(shared, to + mine) * factor;
            head.logits[token] = score;
            if (score > best) best = score, argmax = token;
        }
    }
    return highest_of_cta(shared, key_of(best, argmax));
}

// CTA 0 takes the argmax over all CTAs, and restores the places that it has read.
DEVICE void choose_token(Shared& shared, const Head& head, bf16* exchange, u64 key) {
    if (threadIdx.x == 0) put_long(exchange + ARGMAX + 4 * blockIdx.x, key);
    if (blockIdx.x > 0) return;
    u64 theirs = 0;
    if (threadIdx.x < CTAS) {
        bf16* place = exchange + ARGMAX + 4 * threadIdx.x;
        poll_until([&] { return (theirs = poll_long(place)) != UNDECIDED; });
        put_long(place, UNDECIDED);
    }
    sync_warps();  // all have read what highest_of_cta left
    const u64 highest = highest_of_cta(shared, theirs);
    if (threadIdx.x > 0) return;
    const bool found = highest >> 32 > key_of(LOWEST, 0) >> 32;
    *head.last_token = NOTHING - static_cast<u32>(highest);
    *head.token = found ? *head.last_token : NOT_A_NUMBER;
}
