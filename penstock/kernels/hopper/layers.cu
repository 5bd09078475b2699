// All layers of a dense decoder for one decoding sequence in one launch, one block of threads on each multiprocessor.
//
//     norm, qkv | q/k norm, rope, cache write, attention | out + residual | norm, gate_up, silu * mul | down + residual
//
// A warp streams this block's rows of every weight into a ring of shared memory, through all phases: it waits for free
// slots only, so memory is busy while the others wait for each other's results. Those are handed over without a barrier:
// a place of `exchange` is UNWRITTEN until its number is there, whoever needs it looks until it is, and another warp
// restores it once all have read it. docs/design/0010-all-layers-in-one-launch.md
//
// Macros: HIDDEN, INNER, HEADS, KV_HEADS, HEAD_NORM, FP8, PROGRAMS (blocks of the grid), UNDERWAY (slots that are being
// filled at most). Head size 128, tokens in blocks of 16.
#include "device.cuh"

constexpr int D = 128, BLOCK = 16;
constexpr int WARPS = 8, THREADS = 32 * WARPS;  // that compute
constexpr int MIXED = HEADS * D, QKV = MIXED + 2 * KV_HEADS * D;
constexpr int SIZE = FP8 ? 1 : 2;      // bytes of a weight
constexpr int ROWS = 8, CHUNK = 2048;  // rows of a weight in a slot of the ring, and bytes of each
constexpr int STRIDE = CHUNK + 64;     // of rows in a slot, so that two rows' 64 bytes lie in different banks
constexpr int MOST_PARTS = PROGRAMS / HEADS < 8 ? PROGRAMS / HEADS : 8;  // of the context

// What a block hands to others, as places in `exchange` of 16 bits.
constexpr int ENTERING = 0;                               // the residual stream that enters a layer
constexpr int PROJECTED = ENTERING + HIDDEN;              // queries, keys and values
constexpr int ATTENDED = PROJECTED + QKV;                 // [MOST_PARTS, HEADS, D]
constexpr int MIDDLE = ATTENDED + MOST_PARTS * MIXED;     // the residual stream after attention
constexpr int INSIDE = MIDDLE + HIDDEN;                   // silu(gate) * up
constexpr int WEIGHTS = INSIDE + INNER;                   // float32 [MOST_PARTS, HEADS]: log2 of the parts' weights
constexpr int ORDER = WEIGHTS + 2 * MOST_PARTS * HEADS;   // 32 bits of each block, read by none
constexpr int PLACES = (ORDER + 2 * PROGRAMS + 63) / 64 * 64;
constexpr int REPLICAS = 4;                               // of all that: each is looked at by a quarter of the blocks
constexpr u32 UNWRITTEN = 0xFFFF, NOTHING = 0xFFFFFFFF;   // NaNs that no conversion and no sum gives
constexpr float UNSEEN = -1e30f, NEVER = -1e38f;          // the highest score of none; the score of no token

// The addresses of a layer.
enum {
    ATTENTION_NORM, QKV_WEIGHT, QUERY_NORM, KEY_NORM, OUT, MLP_NORM, GATE_UP, DOWN,
    QKV_SCALES, OUT_SCALES, GATE_UP_SCALES, DOWN_SCALES, ADDRESSES
};

constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int share(int rows) { return (rows + PROGRAMS - 1) / PROGRAMS; }
constexpr int tiled(int rows) { return (rows + ROWS - 1) / ROWS * ROWS; }

constexpr int SUMS = tiled(most(most(share(QKV), share(HIDDEN)), 2 * share(INNER)));
constexpr int INPUT = most(most(HIDDEN, MIXED), INNER);
constexpr int SLOT = ROWS * STRIDE;
constexpr int SLOT_TOKENS = 32;  // or keys of so many tokens, then their values

constexpr int MEMORY = 232448;  // what a block can have
constexpr int OTHER = 2 * INPUT + 4 * WARPS * (SUMS + D + 4) + 4 * D + 1024;
constexpr int SLOTS = least((MEMORY - OTHER) / SLOT, 32);

struct Shared {
    alignas(128) unsigned char slots[SLOTS][SLOT];
    alignas(16) unsigned short x[INPUT];  // a phase's input, bfloat16 or float16
    alignas(16) float sums[WARPS][SUMS];  // of each warp, for each row
    alignas(16) float attended[WARPS][D];
    alignas(16) float angles[D];  // cosines, then sines, of the position
    float highest[WARPS], weights[WARPS];  // of each warp's tokens
    float squares[WARPS], peaks[WARPS];    // of the input
    u64 full[SLOTS], empty[SLOTS], seen, clean;
};
static_assert(sizeof(Shared) <= MEMORY && UNDERWAY <= SLOTS, "more shared memory than there is");
static_assert(SLOT >= 4 * SLOT_TOKENS * D, "keys and values must fit");
static_assert(share(QKV) <= THREADS && share(HIDDEN) <= THREADS && share(INNER) <= THREADS, "a thread for each row");

struct Rows {
    int first, count;
};
DEVICE Rows own_rows(int rows) {
    const int first = static_cast<int>(static_cast<i64>(blockIdx.x) * rows / PROGRAMS);
    return {first, static_cast<int>((static_cast<i64>(blockIdx.x) + 1) * rows / PROGRAMS) - first};
}

// What this block attends to: one head over one part of the context.
struct Unit {
    int head, part, parts;
    int first, start, stop;  // tokens of the cache; none before the first is seen
    bool attends, last;      // the last part has the new token
};
DEVICE Unit own_unit(int context, int window) {
    constexpr int STEP = 64;
    const int stop = most(context - 1, 0), first = window > 0 ? most(context - window, 0) : 0, base = first / BLOCK * BLOCK;
    const int tokens = most(((stop - base + MOST_PARTS - 1) / MOST_PARTS + STEP - 1) / STEP * STEP, STEP);
    const int parts = most((stop - base + tokens - 1) / tokens, 1), part = blockIdx.x / HEADS, start = base + part * tokens;
    return {static_cast<int>(blockIdx.x % HEADS), part, parts, first, start, least(start + tokens, stop), part < parts,
            part == parts - 1};
}

struct Ring {
    Shared& shared;
    int slot = 0;
    u32 parity = 0;
    DEVICE void advance() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

// -- global memory ----------------------------------------------------------------------------------------------------------

DEVICE u64 address(const u64* layer, int which) { return __ldg(layer + which); }

// A number, or 32 bits of it, to all who look.
DEVICE void hand_over(bf16* exchange, int place, bf16 value) {
#pragma unroll
    for (int i = 0; i < REPLICAS; i++) put_half(exchange + i * PLACES + place, value);
}
DEVICE void hand_over(bf16* exchange, int place, u32 value) {
#pragma unroll
    for (int i = 0; i < REPLICAS; i++) put_word(exchange + i * PLACES + place, value);
}
DEVICE bool written(const uint4& v) {
    const u32 top = larger_halves(larger_halves(v.x, v.y), larger_halves(v.z, v.w));
    return (top & 0xFFFF) != UNWRITTEN && top >> 16 != UNWRITTEN;
}
template <class Step>
DEVICE void look_until(Step all_there) {
    for (u32 tries = 0; !all_there(); tries++)
        if (tries > 8000000) trap();  // seconds: a block is missing
}
// Each time, all that is missing is looked for at once.
template <int N, class Place>
DEVICE void look_until_written(uint4 (&v)[N], Place place) {
    look_until([&] {
        bool missing = false;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (!written(v[i])) v[i] = look(place(i)), missing = true;
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

// -- weights: one warp copies, the others multiply ------------------------------------------------------------------------

// What is asked of memory too early makes everything else that is asked of it wait: no more is under way than keeps it busy.
struct Producer {
    Ring ring, landed;
    int under_way = 0;

    // The lanes that `copy` copy one piece each.
    DEVICE void fill(u32 place, const void* from, int bytes, bool copy, int total) {
        Shared& shared = ring.shared;
        u64* full = shared.full + ring.slot;
        if (under_way == UNDERWAY) {
            wait(shared.full + landed.slot, landed.parity);
            landed.advance();
        } else {
            under_way++;
        }
        wait(shared.empty + ring.slot, ring.parity ^ 1);
        if (threadIdx.x % 32 == 0) arrive_expecting(full, total);
        __syncwarp();
        if (copy) copy_bulk(shared.slots[ring.slot] + place, from, bytes, full);
        ring.advance();
    }

    // `jump` is how many rows are left out after the first `before`.
    DEVICE void stream(u64 weight, int row_bytes, int first, int rows, int before, int jump) {
        const int lane = threadIdx.x % 32;
        for (int row = 0; row < rows; row += ROWS) {
            const int mine = row + lane, count = least(rows - row, ROWS);
            const i64 place = first + mine + (mine >= before ? jump : 0);
            const char* from = reinterpret_cast<const char*>(weight) + place * row_bytes;
            for (int at = 0; at < row_bytes; at += CHUNK) {
                const int bytes = least(CHUNK, row_bytes - at);
                fill(lane * STRIDE, from + at, bytes, lane < count, count * bytes);
            }
        }
    }

    // Of a layer; lanes 0 and 1 copy keys and values of a block of tokens, 2 and 3 of the next.
    DEVICE void stream_tokens(const bf16* keys, const bf16* values, const int* table, const Unit& unit) {
        constexpr int BYTES = 2 * BLOCK * D;
        const int lane = threadIdx.x % 32, kv_head = unit.head / (HEADS / KV_HEADS);
        for (int base = unit.start; base < unit.stop; base += SLOT_TOKENS) {
            const int token = base + lane / 2 * BLOCK;
            const bool copy = lane < 4 && token < unit.stop;
            const i64 block = copy ? __ldg(table + token / BLOCK) : 0;
            const bf16* from = (lane % 2 ? values : keys) + (block * KV_HEADS + kv_head) * (BLOCK * D);
            const int blocks = unit.stop - base > BLOCK ? 2 : 1;
            fill(lane % 2 * (2 * SLOT_TOKENS * D) + lane / 2 * BYTES, from, BYTES, copy, 2 * blocks * BYTES);
        }
    }
};

// A tile of 8 rows is the 16 of an mma: every second word of a row counts as a row of its own, against a column that has the
// other words of the input. So what a lane reads of a row, in one go, is its part of the mma as it stands.
constexpr int PIECES = CHUNK / 128, EACH = PIECES / WARPS;  // of a chunk, and those that each warp takes
constexpr int X_WORDS = FP8 ? 8 : 4;                        // of the input, for one piece
static_assert(PIECES % WARPS == 0, "warps share a chunk evenly");

DEVICE void multiply(float (&sums)[2][4], const uint4& low, const uint4& high, const u32 (&x)[X_WORDS]) {
    const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#if FP8
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const u32 first = words[2 * j], second = words[2 * j + 1];
        const u32 a[4] = {f16_of_e4m3(first & 0xFFFF), f16_of_e4m3(first >> 16), f16_of_e4m3(second & 0xFFFF),
                          f16_of_e4m3(second >> 16)};
        mma_f16(sums[j % 2], a, x[2 * j], x[2 * j + 1]);
    }
#else
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const u32 a[4] = {words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]};
        mma_bf16(sums[j], a, x[2 * j], x[2 * j + 1]);
    }
#endif
}

// The sums of the rows of this block, over the columns that each warp takes. One slot is read ahead.
template <int K>
DEVICE void project(Ring& ring, int rows) {
    constexpr int BYTES = K * SIZE, CHUNKS = (BYTES + CHUNK - 1) / CHUNK;
    constexpr bool KEEP = CHUNKS * EACH * X_WORDS <= 32;  // the input in registers, for all tiles
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, part = lane % 4;
    Shared& shared = ring.shared;
    const auto inside = [&](int chunk, int i) { return BYTES % CHUNK == 0 || chunk * CHUNK + (i * WARPS + warp) * 128 < BYTES; };
    const auto load_input = [&](u32 (&words)[X_WORDS], int chunk, int i) {
        const int sixteen = (chunk * PIECES + i * WARPS + warp) * 8 + part;  // bytes of the weight
        const u32* x = reinterpret_cast<const u32*>(shared.x) + sixteen * X_WORDS + row % 2 * (X_WORDS / 2);
#pragma unroll
        for (int j = 0; j < X_WORDS / 2; j++) {
            words[j] = x[j];
            words[X_WORDS / 2 + j] = x[4 * X_WORDS + j];
        }
    };
    u32 kept[KEEP ? CHUNKS : 1][EACH][X_WORDS];
    if (KEEP) {
#pragma unroll
        for (int chunk = 0; chunk < (KEEP ? CHUNKS : 1); chunk++)
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (inside(chunk, i)) load_input(kept[chunk][i], chunk, i);
    }
    uint4 low[EACH], high[EACH];
    const auto read = [&](bool more) {  // garbage where there is no more
        const unsigned char* weights = shared.slots[ring.slot] + row * STRIDE + warp * 128 + part * 16;
        if (more) wait(shared.full + ring.slot, ring.parity);
#pragma unroll
        for (int i = 0; i < EACH; i++) {  // of what lies beyond a row's end, nothing is multiplied
            low[i] = *reinterpret_cast<const uint4*>(weights + i * WARPS * 128);
            high[i] = *reinterpret_cast<const uint4*>(weights + i * WARPS * 128 + 64);
        }
    };
    read(true);
    for (int tile = 0; tile < rows; tile += ROWS) {
        float sums[2][4] = {};
#pragma unroll(KEEP ? CHUNKS : 1)
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            uint4 now_low[EACH], now_high[EACH];
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                now_low[i] = low[i], now_high[i] = high[i];
                if (!KEEP && inside(chunk, i)) load_input(kept[0][i], chunk, i);
            }
            u64* empty = shared.empty + ring.slot;
            ring.advance();
            read(chunk + 1 < CHUNKS || tile + ROWS < rows);
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (inside(chunk, i)) multiply(sums, now_low[i], now_high[i], kept[KEEP ? chunk : 0][i]);
            __syncwarp();
            if (lane == 0) arrive(empty);
        }
        if (part == 0) shared.sums[warp][tile + row] = (sums[0][0] + sums[1][0]) + (sums[0][3] + sums[1][3]);
    }
}

DEVICE float total(const Shared& shared, int row) {
    float sums[2] = {};
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sums[warp % 2] += shared.sums[warp][row];
    return sums[0] + sums[1];
}

// -- a phase's input to shared memory --------------------------------------------------------------------------------------

DEVICE void sync_warps() { sync_threads(1, THREADS); }

// Eight numbers of the input at a time; of what 16 bytes of a weight are multiplied with, first the even words.
DEVICE void place_input(Shared& shared, int eight, const u32 (&words)[4]) {
    uint2* to = reinterpret_cast<uint2*>(shared.x) + (FP8 ? eight / 2 * 4 + eight % 2 : eight * 2);
    to[0] = make_uint2(words[0], words[2]);
    to[FP8 ? 2 : 1] = make_uint2(words[1], words[3]);
}

// What the product is to be multiplied by. Float16 has a small range: with fp8 weights the input is scaled to it.
template <int COUNT, int EIGHTS>
DEVICE float give_input(Shared& shared, const float (&values)[COUNT][8]) {
    float factor = 1, inverse = 1;
#if FP8
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
#endif
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int eight = threadIdx.x + i * THREADS;
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            words[j] = FP8 ? pack_f16(values[i][2 * j] * factor, values[i][2 * j + 1] * factor)
                           : pack_bf16(values[i][2 * j], values[i][2 * j + 1]);
        if (eight < EIGHTS) place_input(shared, eight, words);
    }
    return inverse;
}

constexpr int eights_each(int size) { return (size / 8 + THREADS - 1) / THREADS; }

// The residual stream times the gain; the squares' sum is left in `squares`, for each warp.
DEVICE float give_normed(Shared& shared, const bf16* x, bool ready, u64 gain) {
    constexpr int COUNT = eights_each(HIDDEN), EIGHTS = HIDDEN / 8;
    uint4 gains[COUNT], raw[COUNT];
    float values[COUNT][8], squares = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int eight = threadIdx.x + i * THREADS;
        gains[i] = raw[i] = make_uint4(0, 0, 0, 0);
        if (eight < EIGHTS) {
            gains[i] = load_once(reinterpret_cast<const uint4*>(gain) + eight);
            raw[i] = look(x + eight * 8);
        }
    }
    if (!ready) look_until_written(raw, [&](int i) { return x + (threadIdx.x + i * THREADS) * 8; });
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        float factors[8];
        unpack(values[i], raw[i]);
        unpack(factors, gains[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) squares += values[i][j] * values[i][j], values[i][j] *= factors[j];
    }
    squares = over_lanes(squares, 32);
    if (threadIdx.x % 32 == 0) shared.squares[threadIdx.x / 32] = squares;
    return give_input<COUNT, EIGHTS>(shared, values);
}
DEVICE float inverse_norm(const Shared& shared, float eps) {
    float squares = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) squares += shared.squares[warp];
    return rsqrtf(squares / HIDDEN + eps);
}

DEVICE float give_inner(Shared& shared, const bf16* inner) {
    constexpr int COUNT = eights_each(INNER), EIGHTS = INNER / 8;
    uint4 raw[COUNT];
    float values[COUNT][8];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int eight = threadIdx.x + i * THREADS;
        raw[i] = eight < EIGHTS ? look(inner + eight * 8) : make_uint4(0, 0, 0, 0);
    }
    look_until_written(raw, [&](int i) { return inner + (threadIdx.x + i * THREADS) * 8; });
#pragma unroll
    for (int i = 0; i < COUNT; i++) unpack(values[i], raw[i]);
    return give_input<COUNT, EIGHTS>(shared, values);
}

// The parts of the context merged.
DEVICE float give_attended(Shared& shared, const bf16* attended, const float* weights, int parts) {
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
            raw[n] = look(place(n)), shares[n] = look_word(share_of(n));
    }
    look_until([&] {
        bool missing = false;
#pragma unroll
        for (int n = 0; n < COUNT * MOST_PARTS; n++) {
            if (!written(raw[n])) raw[n] = look(place(n)), missing = true;
            if (shares[n] == NOTHING) shares[n] = look_word(share_of(n)), missing = true;
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
    return give_input<COUNT, EIGHTS>(shared, values);
}

// -- attention ----------------------------------------------------------------------------------------------------------------

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

// -- the warp that restores UNWRITTEN ------------------------------------------------------------------------------------------

DEVICE void unwrite(bf16* exchange, int place, int count) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < count; i += 32) hand_over(exchange, place + i, static_cast<bf16>(UNWRITTEN));
}

// What a layer reads beside weights, to the L2 cache; of what all blocks read, each fetches a part.
DEVICE void prefetch(u64 from, int bytes, int number, int of) {
    const u64 line = from / 128 * 128;
    for (u64 at = line + 128 * number; at < from + bytes; at += 128 * of) prefetch_line(at);
}
DEVICE void prefetch_layer(const u64* layer, const Rows& qkv, const Rows& hidden, const Rows& inner) {
    const int lane = threadIdx.x % 32;
    const auto shared_by_all = [&](int which, int size) {
        prefetch(address(layer, which), 2 * size, blockIdx.x * 32 + lane, PROGRAMS * 32);
    };
    const auto scales = [&](int which, int first, int count) {
        prefetch(address(layer, which) + 4 * first, 4 * count, lane, 32);
    };
    shared_by_all(ATTENTION_NORM, HIDDEN);
    shared_by_all(MLP_NORM, HIDDEN);
    if (HEAD_NORM) shared_by_all(QUERY_NORM, D), shared_by_all(KEY_NORM, D);
    if (FP8) {
        scales(QKV_SCALES, qkv.first, qkv.count);
        scales(OUT_SCALES, hidden.first, hidden.count);
        scales(GATE_UP_SCALES, inner.first, inner.count);
        scales(GATE_UP_SCALES, INNER + inner.first, inner.count);
        scales(DOWN_SCALES, hidden.first, hidden.count);
    }
}

// When a phase has all of its input, everyone has read that of the phase before it, and its own places may be restored;
// they are awaited again only by those who have seen what this block writes later.
DEVICE void restore_all(Shared& shared, bf16* exchange, const u64* layers, int num_layers, const Unit& unit) {
    const Rows qkv = own_rows(QKV), hidden = own_rows(HIDDEN), inner = own_rows(INNER);
    for (int phase = 0; phase < 4 * num_layers; phase++) {
        wait(&shared.seen, phase % 2);
        if (phase % 4 == 0) unwrite(exchange, INSIDE + inner.first, inner.count);
        if (phase % 4 == 1) {
            unwrite(exchange, ENTERING + hidden.first, hidden.count);
            unwrite(exchange, PROJECTED + qkv.first, qkv.count);
        }
        if (phase % 4 == 2 && unit.attends) {
            unwrite(exchange, ATTENDED + unit.part * MIXED + unit.head * D, D);
            if (threadIdx.x % 32 == 0) hand_over(exchange, WEIGHTS + 2 * (unit.part * HEADS + unit.head), NOTHING);
        }
        if (phase % 4 == 3) unwrite(exchange, MIDDLE + hidden.first, hidden.count);
        put_after_all(exchange + ORDER + 2 * blockIdx.x, phase);
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&shared.clean);
        if (phase % 4 == 0 && phase / 4 + 1 < num_layers)
            prefetch_layer(layers + (phase / 4 + 1) * ADDRESSES, qkv, hidden, inner);
    }
}

// -- all of it -----------------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS + 64, 1)
    layers(bf16* x, const u64* layers, int num_layers, bf16* exchange, bf16* keys, bf16* values, int num_blocks,
           const int* table, const int* context_of, const float* cos_sin, float eps, float scale, int window) {
    SHARED_MEMORY(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int thread = threadIdx.x, warp = thread / 32;
    if (thread == 0) {
        for (int slot = 0; slot < SLOTS; slot++) {
            init_barrier(shared.full + slot, 1);
            init_barrier(shared.empty + slot, WARPS);
        }
        init_barrier(&shared.seen, 1);
        init_barrier(&shared.clean, 1);
        publish_barriers();
    }
    __syncthreads();
    const Rows qkv = own_rows(QKV), hidden = own_rows(HIDDEN), inner = own_rows(INNER);
    constexpr i64 CACHE_BLOCK = KV_HEADS * BLOCK * D;
    if (warp == WARPS) {
        Producer producer{{shared}, {shared}};
        Unit unit;
        for (int number = 0; number < num_layers; number++) {
            const u64* layer = layers + number * ADDRESSES;
            producer.stream(address(layer, QKV_WEIGHT), HIDDEN * SIZE, qkv.first, qkv.count, QKV, 0);
            if (number == 0) {
                wait_for_previous();
                unit = own_unit(*context_of, window);
            }
            const i64 cache = number * num_blocks * CACHE_BLOCK;
            if (unit.attends) producer.stream_tokens(keys + cache, values + cache, table, unit);
            producer.stream(address(layer, OUT), MIXED * SIZE, hidden.first, hidden.count, HIDDEN, 0);
            producer.stream(address(layer, GATE_UP), HIDDEN * SIZE, inner.first, 2 * inner.count, inner.count,
                            INNER - inner.count);
            producer.stream(address(layer, DOWN), INNER * SIZE, hidden.first, hidden.count, HIDDEN, 0);
        }
        return;
    }
    wait_for_previous();
    const int context = *context_of;
    const Unit unit = own_unit(context, window);
    if (warp == WARPS + 1) {
        restore_all(shared, exchange, layers, num_layers, unit);
        return;
    }

    bf16* given = exchange;
    exchange += blockIdx.x % REPLICAS * PLACES;
    i64 place = -1;
    if (context > 0) {
        const i64 block = table[(context - 1) / BLOCK];
        place = block * CACHE_BLOCK + (unit.head / (HEADS / KV_HEADS) * BLOCK + (context - 1) % BLOCK) * D;
    }
    if (thread < D) shared.angles[thread] = cos_sin[static_cast<i64>(most(context - 1, 0)) * D + thread];
    float residual = thread < hidden.count ? from_bf16(x[hidden.first + thread]) : 0;
    Ring ring{shared};

    // Phases of a layer, each with a projection: qkv, out, gate and up, down.
    for (int phase = 0; phase < 4 * num_layers; phase++) {
        const int which = phase % 4, number = phase / 4;
        const u64* layer = layers + number * ADDRESSES;
        float factor;
        if (which % 2 == 0) {
            const bf16* from = phase == 0 ? x : exchange + (which ? MIDDLE : ENTERING);
            factor = give_normed(shared, from, phase == 0, address(layer, which ? MLP_NORM : ATTENTION_NORM));
        } else if (which == 1) {
            const i64 cache = number * num_blocks * CACHE_BLOCK;
            if (unit.attends)
                attend(ring, unit, exchange, given, keys + cache, values + cache, place, address(layer, QUERY_NORM),
                       address(layer, KEY_NORM), eps, scale);
            factor = give_attended(shared, exchange + ATTENDED, reinterpret_cast<const float*>(exchange + WEIGHTS), unit.parts);
        } else {
            factor = give_inner(shared, exchange + INSIDE);
        }
        sync_warps();
        if (thread == 0) {
            if (phase > 0) wait(&shared.clean, (phase - 1) % 2);
            arrive(&shared.seen);
        }

        const Rows rows = which == 0 ? qkv : which == 2 ? inner : hidden;
        const int row = rows.first + thread;
        const bool mine = thread < rows.count;
        float scale = 1, up_scale = 1;
        if (FP8 && mine) {
            const u64 scales = address(layer, QKV_SCALES + which);
            scale = __ldg(reinterpret_cast<const float*>(scales) + row);
            if (which == 2) up_scale = __ldg(reinterpret_cast<const float*>(scales) + INNER + row);
        }
        const int count = which == 2 ? 2 * rows.count : rows.count;
        if (which == 3)
            project<INNER>(ring, count);
        else if (HIDDEN == MIXED || which != 1)
            project<HIDDEN>(ring, count);
        else
            project<MIXED>(ring, count);
        if (which % 2 == 0) factor *= inverse_norm(shared, eps);
        sync_warps();
        if (mine) {
            float sum = total(shared, thread) * factor * scale;
            if (which == 2) {
                const float up = total(shared, rows.count + thread) * factor * up_scale;
                sum = __fdividef(sum, 1 + __expf(-sum)) * up;
            } else if (which % 2 == 1) {
                sum = residual += sum;
            }
            const int to = which == 0 ? PROJECTED : which == 1 ? MIDDLE : which == 2 ? INSIDE : ENTERING;
            if (phase + 1 < 4 * num_layers)
                hand_over(given, to + row, to_bf16(sum));
            else
                x[row] = to_bf16(sum);
        }
    }
}
