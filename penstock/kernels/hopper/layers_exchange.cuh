// Common to all parts of layers.cu: the sizes of the layers, shared memory, and how CTAs exchange results.
//
// A place of `exchange` in global memory holds UNWRITTEN until its value is published. Whoever needs it polls until it is
// there, and one warp of its owner restores UNWRITTEN once all have read it.
#pragma once
#include "device.cuh"

constexpr int D = 128, BLOCK = 16;
constexpr int WARPS = 8, THREADS = 32 * WARPS;  // that compute
constexpr int MIXED = HEADS * D, QKV = MIXED + 2 * KV_HEADS * D;
constexpr int SIZE = FP8 ? 1 : 2;      // bytes of a weight
constexpr int ROWS = 8, CHUNK = 2048;  // rows of a weight in a slot of the ring, and bytes of each
constexpr int STRIDE = CHUNK + 64;     // of rows in a slot, so that two rows' 64 bytes lie in different banks
constexpr int MOST_PARTS = CTAS / HEADS < 8 ? CTAS / HEADS : 8;  // of the context

// What CTAs publish, as places in `exchange` of 16 bits.
constexpr int ENTERING = 0;                               // the residual stream that enters a layer
constexpr int PROJECTED = ENTERING + HIDDEN;              // queries, keys and values
constexpr int ATTENDED = PROJECTED + QKV;                 // [MOST_PARTS, HEADS, D]
constexpr int MIDDLE = ATTENDED + MOST_PARTS * MIXED;     // the residual stream after attention
constexpr int INSIDE = MIDDLE + HIDDEN;                   // silu(gate) * up
constexpr int WEIGHTS = INSIDE + INNER;                   // float32 [MOST_PARTS, HEADS]: log2 of the parts' weights
constexpr int ORDER = WEIGHTS + 2 * MOST_PARTS * HEADS;   // 32 bits of each CTA, read by none
constexpr int ARGMAX = (ORDER + 2 * CTAS + 3) / 4 * 4;  // 64 bits of each CTA: its argmax, for CTA 0
constexpr int PLACES = (ARGMAX + 4 * CTAS + 63) / 64 * 64;
constexpr int REPLICAS = 4;                               // of all that: each is polled by a quarter of the CTAs
constexpr u32 UNWRITTEN = 0xFFFF, NOTHING = 0xFFFFFFFF;   // NaNs that no conversion and no sum gives
constexpr float UNSEEN = -1e30f, NEVER = -1e38f;          // the highest score of none; the score of no token

// The addresses of a layer.
enum {
    ATTENTION_NORM, QKV_WEIGHT, QUERY_NORM, KEY_NORM, OUT, MLP_NORM, GATE_UP, DOWN,
    QKV_SCALES, OUT_SCALES, GATE_UP_SCALES, DOWN_SCALES, ADDRESSES
};

constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int share(int rows) { return (rows + CTAS - 1) / CTAS; }
constexpr int tiled(int rows) { return (rows + ROWS - 1) / ROWS * ROWS; }

constexpr int HEAD_ROWS = 64;  // of the head, whose sums are added up together
constexpr int SUMS = most(tiled(most(most(share(QKV), share(HIDDEN)), 2 * share(INNER))), 2 * HEAD_ROWS);
constexpr int INPUT = most(most(HIDDEN, MIXED), INNER);
constexpr int SLOT = ROWS * STRIDE;
constexpr int SLOT_TOKENS = 32;   // or keys of so many tokens, then their values
constexpr int PASS_TOKENS = 128;  // that are attended to at a time

constexpr int MEMORY = 232448;  // shared memory that a CTA can have

// What warps exchange while they attend; rows are apart so that columns of them lie in different banks.
struct AttentionScratch {
    alignas(16) bf16 queries[8][D + 8];
    alignas(16) float weights[2][HEADS / KV_HEADS][PASS_TOKENS + 8];  // of tokens, relative to the highest of their warp,
    alignas(16) float highest[2][HEADS / KV_HEADS][WARPS];            // which has this score
    float new_scores[HEADS / KV_HEADS];
    alignas(16) bf16 new_value[D];
};

constexpr int OTHER = most(2 * INPUT, sizeof(AttentionScratch)) + 4 * WARPS * SUMS + 4 * D + 1280;
constexpr int SLOTS = least((MEMORY - OTHER) / SLOT, 32);

struct Shared {
    alignas(1024) unsigned char slots[SLOTS][SLOT];
    union {
        alignas(16) unsigned short x[INPUT];  // a phase's input, bfloat16 or float16
        AttentionScratch attention;           // between two of them
    };
    alignas(16) float sums[WARPS][SUMS];   // of each warp, for each row
    alignas(16) float angles[D];           // cosines, then sines, of the position
    float squares[WARPS], peaks[WARPS];    // of the input
    u64 argmax[WARPS];                     // of each warp's tokens, as a key
    u64 full[SLOTS], empty[SLOTS], seen, clean;
};
static_assert(sizeof(Shared) <= MEMORY && IN_FLIGHT <= SLOTS, "more shared memory than there is");
static_assert(SLOT % 512 == 0 && SLOT >= 4 * SLOT_TOKENS * D + 512, "keys and values must fit");
static_assert(share(QKV) <= THREADS && share(HIDDEN) <= THREADS && share(INNER) <= THREADS, "a thread for each row");
static_assert(CTAS <= THREADS, "a thread for each CTA");

struct Rows {
    int first, count;
};
DEVICE Rows own_rows(int rows) {
    const int first = static_cast<int>(static_cast<i64>(blockIdx.x) * rows / CTAS);
    return {first, static_cast<int>((static_cast<i64>(blockIdx.x) + 1) * rows / CTAS) - first};
}

// Where keys and values lie in a slot: at a multiple of 1,024.
DEVICE unsigned char* aligned_slot(Shared& shared, int slot) { return shared.slots[slot] + slot % 2 * 512; }

// This CTA's part of attention: the queries of one KV head over one part of the context.
struct Unit {
    int kv_head, part, parts;
    int first, start, stop;  // tokens of the cache; none before the first is seen
    bool attends, last;      // the last part has the new token
};
DEVICE Unit own_unit(int context, int window) {
    const int stop = most(context - 1, 0), first = window > 0 ? most(context - window, 0) : 0, base = first / BLOCK * BLOCK;
    const int wanted = most(least((stop - base + PASS_TOKENS - 1) / PASS_TOKENS, MOST_PARTS), 1);  // of parts
    const int tokens = ((stop - base + wanted - 1) / wanted + BLOCK - 1) / BLOCK * BLOCK;
    const int parts = tokens > 0 ? (stop - base + tokens - 1) / tokens : 1;
    const int part = blockIdx.x / KV_HEADS, start = base + part * tokens;
    return {static_cast<int>(blockIdx.x % KV_HEADS), part, parts, first, start, least(start + tokens, stop), part < parts,
            part == parts - 1};
}

struct Ring {
    Shared& shared;
    int slot = 0;
    u32 parity = 0;
    DEVICE void advance() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
    DEVICE static int after(int slot, int count) { return slot + count < SLOTS ? slot + count : slot + count - SLOTS; }
};

// -- global memory ----------------------------------------------------------------------------------------------------------

DEVICE u64 address(const u64* layer, int which) { return __ldg(layer + which); }
DEVICE void sync_warps() { sync_threads(1, THREADS); }

// Publishes one value, or two in 32 bits, to all replicas.
DEVICE void publish(bf16* exchange, int place, bf16 value) {
#pragma unroll
    for (int i = 0; i < REPLICAS; i++) put_half(exchange + i * PLACES + place, value);
}
DEVICE void publish(bf16* exchange, int place, u32 value) {
#pragma unroll
    for (int i = 0; i < REPLICAS; i++) put_word(exchange + i * PLACES + place, value);
}
DEVICE bool written(const uint4& v) {
    const u32 top = larger_halves(larger_halves(v.x, v.y), larger_halves(v.z, v.w));
    return (top & 0xFFFF) != UNWRITTEN && top >> 16 != UNWRITTEN;
}
template <class Step>
DEVICE void poll_until(Step all_there) {
    for (u32 tries = 0; !all_there(); tries++)
        if (tries > 8000000) trap();  // seconds: a CTA is missing
}
// Each round polls for all that is missing at once.
template <int N, class Place>
DEVICE void poll_until_written(uint4 (&v)[N], Place place) {
    poll_until([&] {
        bool missing = false;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (!written(v[i])) v[i] = poll(place(i)), missing = true;
        return !missing;
    });
}

DEVICE void unpack(float (&out)[8], const uint4& v) {
    out[0] = low_bf16(v.x), out[1] = high_bf16(v.x), out[2] = low_bf16(v.y), out[3] = high_bf16(v.y);
    out[4] = low_bf16(v.z), out[5] = high_bf16(v.z), out[6] = low_bf16(v.w), out[7] = high_bf16(v.w);
}
DEVICE float over_lanes(float value, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

// -- the warp that restores UNWRITTEN ------------------------------------------------------------------------------------------

DEVICE void unwrite(bf16* exchange, int place, int count) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < count; i += 32) publish(exchange, place + i, static_cast<bf16>(UNWRITTEN));
}

// Prefetches to L2 what a layer reads beside weights; of what all CTAs read, each prefetches a part.
DEVICE void prefetch(u64 from, int bytes, int number, int of) {
    const u64 line = from / 128 * 128;
    for (u64 at = line + 128 * number; at < from + bytes; at += 128 * of) prefetch_line(at);
}
DEVICE void prefetch_by_all(u64 from, int bytes) {
    prefetch(from, bytes, blockIdx.x * 32 + threadIdx.x % 32, CTAS * 32);
}
DEVICE void prefetch_layer(const u64* layer, const Rows& qkv, const Rows& hidden, const Rows& inner) {
    const int lane = threadIdx.x % 32;
    const auto scales = [&](int which, int first, int count) {
        prefetch(address(layer, which) + 4 * first, 4 * count, lane, 32);
    };
    prefetch_by_all(address(layer, ATTENTION_NORM), 2 * HIDDEN);
    prefetch_by_all(address(layer, MLP_NORM), 2 * HIDDEN);
    if (HEAD_NORM) {
        prefetch_by_all(address(layer, QUERY_NORM), 2 * D);
        prefetch_by_all(address(layer, KEY_NORM), 2 * D);
    }
    if (FP8) {
        scales(QKV_SCALES, qkv.first, qkv.count);
        scales(OUT_SCALES, hidden.first, hidden.count);
        scales(GATE_UP_SCALES, inner.first, inner.count);
        scales(GATE_UP_SCALES, INNER + inner.first, inner.count);
        scales(DOWN_SCALES, hidden.first, hidden.count);
    }
}

// When a phase has all of its input, every CTA has read the input of the phase before, so those places may be restored;
// they are polled again only by CTAs that have seen what this CTA publishes later.
DEVICE void restore_all(Shared& shared, bf16* exchange, const u64* layers, int num_layers, const Unit& unit,
                        u64 head_gain) {
    const Rows qkv = own_rows(QKV), hidden = own_rows(HIDDEN), inner = own_rows(INNER);
    for (int phase = 0; phase <= 4 * num_layers; phase++) {
        wait(&shared.seen, phase % 2);
        if (phase % 4 == 0) unwrite(exchange, INSIDE + inner.first, inner.count);
        if (phase % 4 == 1) {
            unwrite(exchange, ENTERING + hidden.first, hidden.count);
            unwrite(exchange, PROJECTED + qkv.first, qkv.count);
        }
        if (phase % 4 == 2 && unit.attends) {
            const int group = HEADS / KV_HEADS, first = unit.part * HEADS + unit.kv_head * group;
            unwrite(exchange, ATTENDED + first * D, group * D);
            unwrite(exchange, WEIGHTS + 2 * first, 2 * group);
        }
        if (phase % 4 == 3) unwrite(exchange, MIDDLE + hidden.first, hidden.count);
        put_after_all(exchange + ORDER + 2 * blockIdx.x, phase);
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&shared.clean);
        if (phase % 4 == 0 && phase / 4 + 1 < num_layers)
            prefetch_layer(layers + (phase / 4 + 1) * ADDRESSES, qkv, hidden, inner);
        if (phase % 4 == 0 && phase / 4 + 1 == num_layers) prefetch_by_all(head_gain, 2 * HIDDEN);
    }
}

