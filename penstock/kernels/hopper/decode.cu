// Paged decode attention (flash decoding), one query per sequence. A CTA is one warp for one key/value head of one part of a
// sequence; it copies keys and values, 16 tokens at a time, to a ring in shared memory and keeps a running softmax. Many
// CTAs share an SM. The last part of a sequence to arrive merges them all.
//
// The matmuls are transposed, for mma's 16 rows would be mostly padding with so few heads: scores[token, head] = K q', and
// out[dim, head] = V' p. Head h of the group is column h of 8.
//
// What does not come from the kernel before this one is read ahead of the wait: the plan, the tables and the cache, but
// for the new token's place. With ROTARY that is filled in from `q`; else the blocks with the last NEW tokens, which the
// kernel before may have written, are read after the wait.
//
// A shared prefix may have been left to another kernel (`prefix.cu`, cascade attention): its partial results, a row for
// each of `splits` pieces and each of `sequences`, come first in the memory of the partial results and are merged too.
//
// ROTARY: elements of a head that RoPE rotates; 0: `q` is ready and the new token in the cache. NORM: RMSNorm of heads.
// FP8: the cache is e4m3 without scales, and the matmuls are of float16, which holds each of its values.
// GROUP: query heads of a key/value head. NEW: tokens of one sequence that the step may compute, at most; with ROTARY, 1.
#include "device.cuh"

constexpr int HEAD = 128, TOKENS = 16, HALF = ROTARY / 2, HEADS = GROUP * KV_HEADS, FIELDS = 8;
constexpr int BYTES = FP8 ? 1 : 2, MATRIX = TOKENS * HEAD * BYTES, SLOT = 2 * MATRIX;
constexpr int QUERY = HEAD * 2 + 16;  // bytes of a query in shared memory: rows begin in different banks
constexpr int RESULT = HEAD + 4;  // floats of a result in shared memory
constexpr float UNSEEN = -1e30f;
#define INFINITE __int_as_float(0x7F800000)

DEVICE float across(float x, int lanes) { return __shfl_xor_sync(~0u, x, lanes); }

// Which element is which, mma does not care, as long as both factors agree. Of 8-bit numbers a lane has four at once.
DEVICE int dim_of(int i, int g, int u) { return FP8 ? 16 * i + 2 * g + u : 16 * i + g + 8 * u; }
DEVICE int place_of(int d) { return FP8 ? (d & ~15) + (d / 2 & 1) * 8 + (d / 4 & 3) * 2 : d; }  // of a query's pair

DEVICE u32 pack(float low, float high) { return FP8 ? pack_f16(low, high) : pack_bf16(low, high); }
DEVICE void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (FP8) mma_f16(sum, a, b0, b1);
    else mma_bf16(sum, a, b0, b1);
}
DEVICE u32 low_e4m3(u32 four) { return f16_of_e4m3(static_cast<unsigned short>(four)); }
DEVICE u32 high_e4m3(u32 four) { return f16_of_e4m3(static_cast<unsigned short>(four >> 16)); }

// In the cache, and in a slot of the ring, in which TMA has swizzled it.
DEVICE void store(unsigned char* at, float low, float high) {
    if (FP8) *reinterpret_cast<unsigned short*>(at) = pack_e4m3(low, high);
    else *reinterpret_cast<u32*>(at) = pack_bf16(low, high);
}
DEVICE int swizzled(int row, int d) {
    const int byte = d * BYTES;
    return byte / 128 * (MATRIX / 2) + row * 128 + ((byte / 16 ^ row) & 7) * 16 + byte % 16;
}

// A running softmax: out[dim_of(i, g, 0 or 1), 2 t (+ 1)] of lane 4 g + t.
struct Running {
    float out[8][4], total[2], peak[2];

    DEVICE void clear() {
        for (int i = 0; i < 8; i++)
            for (int e = 0; e < 4; e++) out[i][e] = 0;
        for (int h = 0; h < 2; h++) total[h] = 0, peak[h] = UNSEEN;
    }
    DEVICE void scale(const float (&by)[2]) {
        for (int i = 0; i < 8; i++)
            for (int e = 0; e < 4; e++) out[i][e] *= by[e & 1];
    }
    DEVICE void divide() {
        float by[2];
        for (int h = 0; h < 2; h++) by[h] = total[h] > 0 ? reciprocal_approx(total[h]) : 1;
        scale(by);
    }
};

// Results of several parts put together: 4 elements of each head.
struct Merged {
    float4 out[GROUP];
    float peak[GROUP], total[GROUP];

    DEVICE void clear() {
#pragma unroll
        for (int h = 0; h < GROUP; h++) out[h] = make_float4(0, 0, 0, 0), peak[h] = UNSEEN, total[h] = 0;
    }
    // Of `parts` parts from a row on, rows so far apart, with the logarithm of each total.
    DEVICE void add(const float* results, const float* lse, i64 row, i64 distance, int parts, int lane) {
        constexpr int STEP = GROUP > 4 ? 2 : 4;  // parts in flight
#pragma unroll 1
        for (int p = 0; p < parts; p += STEP) {
            float4 other[STEP][GROUP];
            float size[STEP][GROUP];
#pragma unroll
            for (int s = 0; s < STEP; s++)
#pragma unroll
                for (int h = 0; h < GROUP; h++) {
                    const i64 at = row + min(p + s, parts - 1) * distance + h;
                    other[s][h] = read_float4(results + at * HEAD + 4 * lane);
                    size[s][h] = p + s < parts ? read_float(lse + at) : -INFINITE;
                }
#pragma unroll
            for (int s = 0; s < STEP; s++)
#pragma unroll
                for (int h = 0; h < GROUP; h++) {
                    const float highest = fmaxf(peak[h], size[s][h]);
                    const float decay = exp2_approx(peak[h] - highest), weight = exp2_approx(size[s][h] - highest);
                    const float4 a = out[h], b = other[s][h];
                    out[h] = make_float4(
                        a.x * decay + b.x * weight, a.y * decay + b.y * weight, a.z * decay + b.z * weight,
                        a.w * decay + b.w * weight);
                    total[h] = total[h] * decay + weight, peak[h] = highest;
                }
        }
    }
};

// Two pairs of elements of each head, half of the rotated part of the head apart: what a lane rotates.
struct RopePair {
    float x[4];

    DEVICE void unpack(u32 first, u32 second) {
        x[0] = low_bf16(first), x[1] = high_bf16(first), x[2] = low_bf16(second), x[3] = high_bf16(second);
    }
    DEVICE void normalize(const RopePair& gain, float eps) {
        float sum = x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3];
        for (int lanes = 1; lanes < 32; lanes *= 2) sum += across(sum, lanes);
        const float factor = inverse_root_approx(sum / HEAD + eps);
        for (int e = 0; e < 4; e++) x[e] *= factor * gain.x[e];
    }
    DEVICE void rotate(float2 cos, float2 sin) {
        const float a = x[0], b = x[1];
        x[0] = a * cos.x - x[2] * sin.x, x[1] = b * cos.y - x[3] * sin.y;
        x[2] = x[2] * cos.x + a * sin.x, x[3] = x[3] * cos.y + b * sin.y;
    }
};

// Tokens of one block as mma's first factor: a row for each token,
DEVICE void load_keys(u32 (&k)[8][4], u32 address, int lane) {
    const int row = lane % 8 + (lane / 8 & 1) * 8;
    const u32 own = row * 128 + ((lane / 16 ^ row & 7) << 4);  // row l % 8 of matrix l / 8
    for (int j = 0; j < (FP8 ? 4 : 8); j++) {
        if (FP8) {
            u32 fours[4];
            load_matrices(fours, address + (own ^ j << 5));
            for (int c = 0; c < 2; c++)
                for (int e = 0; e < 2; e++) {
                    k[2 * j + c][e] = low_e4m3(fours[2 * c + e]);
                    k[2 * j + c][e + 2] = high_e4m3(fours[2 * c + e]);
                }
        } else {
            load_matrices(k[j], address + j / 4 * (MATRIX / 2) + (own ^ (j % 4) << 5));
        }
    }
}
// or a row for each element.
DEVICE void load_values(u32 (&v)[8][4], u32 address, int lane) {
    const int row = lane % 8 + (FP8 ? lane / 8 & 1 : lane / 16) * 8;
    const u32 own = row * 128 + (((FP8 ? lane / 16 : lane / 8 & 1) ^ row & 7) << 4);
    for (int i = 0; i < (FP8 ? 4 : 8); i++) {
        if (FP8) {
            u32 fours[4];  // two elements each of two tokens
            load_matrices_transposed(fours, address + (own ^ i << 5));
            for (int c = 0; c < 2; c++)
                for (int e = 0; e < 2; e++) {
                    const u32 apart = __byte_perm(fours[2 * c + e], 0, 0x3120);
                    v[2 * i + c][2 * e] = low_e4m3(apart), v[2 * i + c][2 * e + 1] = high_e4m3(apart);
                }
        } else {
            load_matrices_transposed(v[i], address + i / 4 * (MATRIX / 2) + (own ^ (i % 4) << 5));
        }
    }
}

extern "C" __global__ void __launch_bounds__(32, 12) decode(
    const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values, bf16* out, const bf16* q,
    unsigned char* k_cache, unsigned char* v_cache, const int* tables, const int* plan, float* partial_out,
    float* partial_lse, int* arrivals, const float* cos_sin, const bf16* q_gain, const bf16* k_gain, float eps,
    float scale, int sequences, int splits, int stride_out, int stride_q, int stride_table) {
    let_next_start();
    SHARED_MEMORY(shared);  // ring, queries, barriers
    unsigned char* queries = shared + STAGES * SLOT;
    u64* full = reinterpret_cast<u64*>(queries + 8 * QUERY);
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4, head = blockIdx.x, entry = blockIdx.y;
    const int4 place = read_ints(plan + entry * FIELDS), division = read_ints(plan + entry * FIELDS + 4);
    const int seq = place.x, start = place.y, stop = place.z, part = division.x, parts = division.z;
    const bool rotates = 2 * lane < HALF;
    const int d = rotates ? 2 * lane : ROTARY + 2 * lane - HALF, apart = rotates ? HALF : HEAD / 2 - HALF;
    auto pair = [&](const bf16* at, int u) { return *reinterpret_cast<const u32*>(at + d + u * apart); };
    RopePair q_gains, k_gains;
    if (NORM) q_gains.unpack(pair(q_gain, 0), pair(q_gain, 1)), k_gains.unpack(pair(k_gain, 0), pair(k_gain, 1));
    if (lane == 0) {
        for (int i = 0; i < STAGES; i++) init_barrier(full + i, 1);
        publish_barriers();
    }
    __syncwarp();
    if (seq < 0) return;

    const bool newest = ROTARY && part == parts - 1 && stop > start;  // has the new token
    const int first = start / TOKENS, blocks = (stop + TOKENS - 1) / TOKENS - first;
    const int* table = tables + static_cast<i64>(seq) * stride_table + first;
    int ids = lane < blocks ? read_int(table + lane) : 0;
    i64 new_block = newest ? read_int(table + blocks - 1) : 0;
    float2 cos = make_float2(1, 1), sin = make_float2(0, 0);
    if (rotates) {
        const float* angles = cos_sin + static_cast<i64>(max(place.w - 1, 0)) * ROTARY + d;
        cos = *reinterpret_cast<const float2*>(angles), sin = *reinterpret_cast<const float2*>(angles + HALF);
    }
    auto copy = [&](int block, int stage) {
        if (block >= blocks) return;
        if (block && block % 32 == 0) ids = block + lane < blocks ? read_int(table + block + lane) : 0;
        const int row = (__shfl_sync(~0u, ids, block % 32) * KV_HEADS + head) * TOKENS;
        if (lane == 0) {
            arrive_expecting(full + stage, SLOT);
            copy_box(shared + stage * SLOT, &keys, 0, row, 0, full + stage, EVICT_FIRST);
            copy_box(shared + stage * SLOT + MATRIX, &values, 0, row, 0, full + stage, EVICT_FIRST);
        }
    };
    const int ahead = ROTARY ? STAGES : min(max((place.w - NEW) / TOKENS - first, 0), STAGES);
#pragma unroll 1
    for (int i = 0; i < ahead; i++) copy(i, i);
    wait_for_previous();
#pragma unroll 1
    for (int i = ahead; i < STAGES; i++) copy(i, i);

    const bf16* projected = q + static_cast<i64>(seq) * stride_q;
    u32 raw[GROUP + 2][2] = {};
#pragma unroll
    for (int h = 0; h < GROUP; h++)
        for (int u = 0; u < 2; u++) raw[h][u] = pair(projected + (head * GROUP + h) * HEAD, u);
    if (newest)
        for (int u = 0; u < 2; u++) {
            raw[GROUP][u] = pair(projected + (HEADS + head) * HEAD, u);
            raw[GROUP + 1][u] = pair(projected + (HEADS + KV_HEADS + head) * HEAD, u);
        }
    for (int h = 0; h < 8; h++) {
        RopePair query = {};
        if (h < GROUP) {
            query.unpack(raw[h][0], raw[h][1]);
            if (NORM) query.normalize(q_gains, eps);
            if (ROTARY) query.rotate(cos, sin);
        }
        for (int u = 0; u < 2; u++)
            *reinterpret_cast<u32*>(queries + h * QUERY + place_of(d + u * apart) * 2) =
                pack(query.x[2 * u], query.x[2 * u + 1]);
    }
    __syncwarp();
    u32 query[4][4];  // word w of row j: elements 32 j + 8 w + 2 t and the next one of head g
    for (int j = 0; j < 4; j++)
        load_matrices(query[j], shared_address(queries) + lane % 8 * QUERY + (4 * j + lane / 8) * 16);
    RopePair key, value;
    if (newest) {
        key.unpack(raw[GROUP][0], raw[GROUP][1]), value.unpack(raw[GROUP + 1][0], raw[GROUP + 1][1]);
        if (NORM) key.normalize(k_gains, eps);
        key.rotate(cos, sin);
        const i64 row = (new_block * KV_HEADS + head) * TOKENS + (stop - 1) % TOKENS;
        for (int u = 0; u < 2; u++) {
            store(k_cache + (row * HEAD + d + u * apart) * BYTES, key.x[2 * u], key.x[2 * u + 1]);
            store(v_cache + (row * HEAD + d + u * apart) * BYTES, value.x[2 * u], value.x[2 * u + 1]);
        }
    }

    Running running;
    running.clear();
    int stage = 0;
    u32 parity = 0;
#pragma unroll 1
    for (int block = 0; block < blocks; block++) {
        const int token = (first + block) * TOKENS;
        unsigned char* slot = shared + stage * SLOT;
        wait(full + stage, parity);
        if (newest && block == blocks - 1) {
            for (int u = 0; u < 2; u++) {
                const int at = swizzled((stop - 1) % TOKENS, d + u * apart);
                store(slot + at, key.x[2 * u], key.x[2 * u + 1]);
                store(slot + MATRIX + at, value.x[2 * u], value.x[2 * u + 1]);
            }
            __syncwarp();
        }
        u32 k[8][4], v[8][4];
        load_keys(k, shared_address(slot), lane);
        float even[4] = {}, odd[4] = {};
        for (int j = 0; j < 8; j++)
            multiply(j & 1 ? odd : even, k[j], query[j / 2][j % 2 * 2], query[j / 2][j % 2 * 2 + 1]);
        load_values(v, shared_address(slot + MATRIX), lane);
        float scores[4];
        for (int e = 0; e < 4; e++) scores[e] = (even[e] + odd[e]) * scale;
        if (token < start || token + TOKENS > stop) {
            // What lies outside may be another request's NaN.
            auto seen = [&](int i) { return token + i >= start && token + i < stop; };
            for (int e = 0; e < 4; e++) scores[e] = seen(g + e / 2 * 8) ? scores[e] : -INFINITE;
            u32 low = (seen(2 * t) ? 0xFFFF : 0) | (seen(2 * t + 1) ? 0xFFFF0000 : 0);
            u32 high = (seen(2 * t + 8) ? 0xFFFF : 0) | (seen(2 * t + 9) ? 0xFFFF0000 : 0);
            for (int i = 0; i < 8; i++) v[i][0] &= low, v[i][1] &= low, v[i][2] &= high, v[i][3] &= high;
        }
        float decay[2];
        for (int h = 0; h < 2; h++) {
            float highest = fmaxf(scores[h], scores[h + 2]);
            for (int lanes = 4; lanes < 32; lanes *= 2) highest = fmaxf(highest, across(highest, lanes));
            highest = fmaxf(highest, running.peak[h]);
            decay[h] = exp2_approx(running.peak[h] - highest);
            scores[h] = exp2_approx(scores[h] - highest), scores[h + 2] = exp2_approx(scores[h + 2] - highest);
            running.total[h] = running.total[h] * decay[h] + scores[h] + scores[h + 2];
            running.peak[h] = highest;
        }
        running.scale(decay);
        const u32 low = transposed(pack(scores[0], scores[1])), high = transposed(pack(scores[2], scores[3]));
        for (int i = 0; i < 8; i++) multiply(running.out[i], v[i], low, high);
        __syncwarp();
        copy(block + STAGES, stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    for (int h = 0; h < 2; h++)
        for (int lanes = 4; lanes < 32; lanes *= 2) running.total[h] += across(running.total[h], lanes);
    running.divide();

    // From here on a lane has elements 4 l to 4 l + 3 of each head.
    float* mine = reinterpret_cast<float*>(shared);
    __syncwarp();
    for (int i = 0; i < 8; i++)
        for (int e = 0; e < 4; e++) mine[(2 * t + e % 2) * RESULT + dim_of(i, g, e / 2)] = running.out[i][e];
    float own_lse[2];
    for (int h = 0; h < 2; h++) own_lse[h] = running.peak[h] + log2_approx(running.total[h]);
    __syncwarp();
    Merged merged;
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
        merged.out[h] = *reinterpret_cast<const float4*>(mine + h * RESULT + 4 * lane);
        merged.peak[h] = __shfl_sync(~0u, own_lse[h % 2], h / 2), merged.total[h] = 1;
    }
    const i64 shared_rows = static_cast<i64>(splits) * sequences;
    if (parts > 1) {
        const i64 row = (shared_rows + entry) * HEADS + head * GROUP;
#pragma unroll
        for (int h = 0; h < GROUP; h++) {
            *reinterpret_cast<float4*>(partial_out + (row + h) * HEAD + 4 * lane) = merged.out[h];
            if (lane == h) partial_lse[row + h] = merged.peak[h];
        }
        int arrived = 0;
        __threadfence();
        __syncwarp();
        if (lane == 0) arrived = atomicAdd(arrivals + seq * KV_HEADS + head, 1);
        if (__shfl_sync(~0u, arrived, 0) != parts - 1) return;
        __threadfence();
        if (lane == 0) arrivals[seq * KV_HEADS + head] = 0;
        merged.clear();
        merged.add(partial_out, partial_lse, (shared_rows + division.y) * HEADS + head * GROUP, HEADS, parts, lane);
    }
    if (division.w) {  // it has a prefix
        const i64 row = static_cast<i64>(seq) * HEADS + head * GROUP;
        merged.add(partial_out, partial_lse, row, static_cast<i64>(sequences) * HEADS, splits, lane);
    }
    bf16* into = out + static_cast<i64>(seq) * stride_out + head * GROUP * HEAD + 4 * lane;
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
        const float4 x = merged.out[h];
        const float by = merged.total[h] > 0 ? reciprocal_approx(merged.total[h]) : 0;
        *reinterpret_cast<uint2*>(into + h * HEAD) =
            make_uint2(pack_bf16(x.x * by, x.y * by), pack_bf16(x.z * by, x.w * by));
    }
}
