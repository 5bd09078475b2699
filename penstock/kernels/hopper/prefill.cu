// Attention of ragged chunks of queries over a paged cache, causal: bf16, heads of 128.
//
// A tile is 128 rows: BLOCK_Q queries with all GROUP query heads of one key/value head. One warp copies queries, keys and
// values; two warpgroups of 64 rows each multiply. While one multiplies, the other computes its softmax: they take turns
// at the tensor cores. Within a warpgroup the scores of the next keys are multiplied before the softmax of those present
// is needed. Keys are taken from the last visible ones to the first, so that masks concern the first ones taken alone.
// As many thread blocks as multiprocessors draw tiles from a counter, and copy for the next while they finish one.
#include "device.cuh"

constexpr int ROWS = 128, KEYS = 128, DIM = 128, PAGE = 16, PAGES = KEYS / PAGE;
constexpr int BLOCK_Q = ROWS / GROUP;
// Bytes of 128 rows, as halves of 64 columns in rows of 128 bytes, swizzled: first the one half of all rows, then the
// other; values have both halves of 16 tokens side by side.
constexpr int TILE = 128 * DIM * 2;
constexpr int HALF = TILE / 2;
constexpr int ROW = 128;              // bytes of a row of one half
constexpr float UNSEEN = -1.0e30f;    // finite: a row that saw no key yet must not produce NaN
constexpr int TURN = 1, OWN = 3;      // named barriers: of the turns, and of a warpgroup alone; plus its number

struct Work {
    int first;     // row of the first query in `queries` and `out`
    int queries;   // of this tile
    int position;  // of the first query in its sequence
    int context;   // tokens of the sequence in the cache
    int sequence;
    int head;      // of keys and values
    int from;      // tile of keys
    int tiles;     // of keys, up to here; 0: there is no more work
    int item;      // number of tile and head
    int piece, pieces;  // of the keys of the item
    int slot;      // of its first piece in the scratch
};

struct Barriers {
    u64 q_full[2], q_empty[2], k_full[2], k_empty[2], v_full[2], v_empty[2];
};

struct Shared {
    unsigned char q[2][TILE];  // where results are put together afterwards
    unsigned char k[2][TILE];
    unsigned char v[2][TILE];
    Barriers barriers;
    Work work[2];
    int arrived[2];
};

// Where pieces of few tiles with many keys meet: the one that comes last adds the others to its own. All in the order in
// which threads hold them.
struct Scratch {
    float4* sums;    // [slots, 2, 16, 128]
    float4* states;  // [slots, 2, 128]: peak and total of both rows
    int* counters;   // of items drawn and of blocks done; then [items, 2] of pieces that arrived: zero between launches
};
constexpr int MOST_PIECES = 8, FEWEST_TILES = 4;

// -- products of a warpgroup: 64 rows by 128 columns ----------------------------------------------------------------------

DEVICE void score(float (&scores)[64], u64 q, u64 k) {
    begin_wgmma();
#pragma unroll
    for (int step = 0; step < DIM / 16; step++) {
        const u64 at = (step / 4 * HALF + step % 4 * 32) >> 4;
        if (step == 0)
            start_wgmma_n128(scores, q + at, k + at);
        else
            wgmma_n128(scores, q + at, k + at);
    }
    commit_wgmma();
}
DEVICE void weigh(float (&sum)[64], u32 (&weights)[32], u64 v) {
    keep_in_place(sum);
    keep_in_place(weights);
    begin_wgmma();
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) wgmma_n128(sum, weights + 4 * step, v + (step * 2 * PAGE * ROW >> 4));
    commit_wgmma();
}

// -- softmax: a thread has columns 8 j + 2 (lane % 4) + {0, 1} of rows lane / 4 and lane / 4 + 8 of its warp ------------

struct Softmax {
    float peak[2], total[2], decay[2];
};

// Column c of a row is visible if c <= limit, both counted from the thread's own first column.
DEVICE void hide(float (&scores)[64], int limit0, int limit1) {
#pragma unroll
    for (int i = 0; i < 64; i++) {
        const int column = i / 4 * 8 + i % 2;
        if (column > (i % 4 < 2 ? limit0 : limit1)) scores[i] = __int_as_float(0xFF800000);
    }
}
DEVICE void exponentiate(float (&scores)[64], Softmax& state, float scale) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
        float peak = state.peak[row];
#pragma unroll
        for (int i = 2 * row; i < 64; i += 4) peak = fmaxf(peak, fmaxf(scores[i], scores[i + 1]));
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
        state.decay[row] = exp2_approx((state.peak[row] - peak) * scale);
        state.peak[row] = peak;
        const float shift = peak * scale;
        float even = state.total[row] * state.decay[row], odd = 0.0f;
#pragma unroll
        for (int i = 2 * row; i < 64; i += 4) {
            scores[i] = exp2_approx(fmaf(scores[i], scale, -shift));
            scores[i + 1] = exp2_approx(fmaf(scores[i + 1], scale, -shift));
            even += scores[i];
            odd += scores[i + 1];
        }
        state.total[row] = even + odd;
    }
}
DEVICE void pack(u32 (&weights)[32], const float (&scores)[64]) {
#pragma unroll
    for (int i = 0; i < 32; i++) weights[i] = pack_bf16(scores[2 * i], scores[2 * i + 1]);
}

// -- the warps that copy: one the queries and keys, which draws the work as well; one the values --------------------------

struct Place {
    int sequence, skip;  // queries of the sequence in earlier tiles
    int tiles;           // of all sequences, if there is no such tile
};

DEVICE Place place_of(int tile, const int* starts, int sequences, int lane) {
    int before = 0;
    for (int base = 0; base < sequences; base += 32) {
        const int s = min(base + lane, sequences - 1);
        const int tiles = base + lane < sequences ? (starts[s + 1] - starts[s] + BLOCK_Q - 1) / BLOCK_Q : 0;
        int end = tiles;  // of this sequence and of those before it
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_sync(~0u, end, max(lane - distance, 0));
            if (lane >= distance) end += other;
        }
        const int ended = __popc(__ballot_sync(~0u, before + end <= tile));
        if (ended < 32) {
            const int begin = before + __shfl_sync(~0u, end - tiles, ended);
            return {base + ended, (tile - begin) * BLOCK_Q, 0};
        }
        before += __shfl_sync(~0u, end, 31);
    }
    return {0, 0, before};
}

// Tiles of keys or of values, the last first. After the last page its copies follow: what they hold is never seen.
struct Copier {
    const TensorMap* map;
    unsigned char (*tiles)[TILE];
    u64 *full, *empty;
    u32 count = 0;

    template <bool WHOLE_PAGES, typename Between>
    DEVICE void copy(const Work& work, const int* table, Between between) {
        const int last_page = (work.context - 1) / PAGE;
        int pages[PAGES];
#pragma unroll
        for (int i = 0; i < PAGES; i++) pages[i] = table[min((work.tiles - 1) * PAGES + i, last_page)];
        for (int n = work.tiles - 1; n >= work.from; n--) {
            int ahead[PAGES];
#pragma unroll
            for (int i = 0; i < PAGES; i++) ahead[i] = table[min(max(n - 1, 0) * PAGES + i, last_page)];
            if (n == work.from) between();
            const u32 stage = count % 2, parity = count / 2 % 2;
            count++;
            wait(&empty[stage], parity ^ 1);
            arrive_expecting(&full[stage], TILE);
#pragma unroll
            for (int i = 0; i < PAGES; i++) {
                if (WHOLE_PAGES) {
                    copy_box(tiles[stage] + i * PAGE * ROW * 2, map, 0, 0, 0, work.head, pages[i], &full[stage]);
                } else {
                    unsigned char* to = tiles[stage] + i * PAGE * ROW;
                    copy_box(to, map, 0, 0, 0, work.head, pages[i], &full[stage]);
                    copy_box(to + HALF, map, 0, 0, 1, work.head, pages[i], &full[stage]);
                }
                pages[i] = ahead[i];
            }
        }
    }
};

DEVICE void produce_keys(Shared& shared, const TensorMap* queries, const TensorMap* keys, const int* tables,
                         const int* starts, const int* contexts, int* counters, int slots, int sequences, int heads,
                         int stride_table) {
    const int lane = threadIdx.x % 32;
    Barriers& barriers = shared.barriers;
    Copier copier{keys, shared.k, barriers.k_full, barriers.k_empty};
    wait_for_previous();
    const int tiles = place_of(1 << 30, starts, sequences, lane).tiles, all = tiles * heads;
    const int splits = all < 2 * int(gridDim.x) ? min(slots / max(all, 1), MOST_PIECES) : 1;
    const auto draw = [&] { return atomicAdd(&counters[0], 1) + int(gridDim.x); };
    u32 items = 0;
    for (int drawn = blockIdx.x; drawn < all * splits;) {
        const int item = drawn / splits, piece = drawn % splits;
        const int head = item % heads, tile = tiles - 1 - item / heads;  // late tiles see most keys: they come first
        const Place place = place_of(tile, starts, sequences, lane);
        const int begin = starts[place.sequence], count = starts[place.sequence + 1] - begin;
        const int context = contexts[place.sequence], here = min(BLOCK_Q, count - place.skip);
        const int position = context - count + place.skip;
        const int key_tiles = (position + here + KEYS - 1) / KEYS;
        const int pieces = min(splits, max(key_tiles / FEWEST_TILES, 1));
        int next = 0;
        if (piece >= pieces) {
            if (elected()) next = draw();
            drawn = sum_of_warp(next);
            continue;
        }
        const Work work = {begin + place.skip, here, position, context, place.sequence, head,
                           key_tiles * piece / pieces, key_tiles * (piece + 1) / pieces,
                           item, piece, pieces, item * splits};
        const u32 slot = items % 2, parity = items / 2 % 2;
        items++;
        if (elected()) {
            wait(&barriers.q_empty[slot], parity ^ 1);
            shared.work[slot] = work;
            arrive_expecting(&barriers.q_full[slot], BLOCK_Q * GROUP * DIM * 2);
            copy_box(shared.q[slot], queries, 0, head * GROUP, work.first, &barriers.q_full[slot]);
            copy_box(shared.q[slot] + HALF, queries, DIM / 2, head * GROUP, work.first, &barriers.q_full[slot]);
            copier.copy<false>(work, tables + i64(work.sequence) * stride_table,
                               [&] { next = draw(); });
        }
        drawn = sum_of_warp(next);
    }
    if (elected()) {
        const u32 slot = items % 2, parity = items / 2 % 2;
        wait(&barriers.q_empty[slot], parity ^ 1);
        shared.work[slot].tiles = 0;
        arrive(&barriers.q_full[slot]);
        if (atomicAdd(&counters[1], 1) == int(gridDim.x) - 1) counters[0] = counters[1] = 0;  // for the next launch
    }
}

DEVICE void produce_values(Shared& shared, const TensorMap* values, const int* tables, int stride_table) {
    Barriers& barriers = shared.barriers;
    Copier copier{values, shared.v, barriers.v_full, barriers.v_empty};
    if (elected())
        for (u32 items = 0;; items++) {
            const u32 slot = items % 2, parity = items / 2 % 2;
            wait(&barriers.q_full[slot], parity);
            const Work work = shared.work[slot];
            arrive(&barriers.q_empty[slot]);
            if (work.tiles == 0) break;
            copier.copy<true>(work, tables + i64(work.sequence) * stride_table, [] {});
        }
}

// -- a warpgroup that computes --------------------------------------------------------------------------------------------

DEVICE void release(u64* barrier) {
    if (threadIdx.x % 128 == 0) arrive(barrier);
}

struct Consumer {
    Shared& shared;
    int group;  // 0 or 1
    float scale;
    u32 k_count = 0, v_count = 0, items = 0;

    DEVICE u64 keys() const { return swizzled_tile(shared_address(shared.k[k_count % 2])); }
    DEVICE u64 values() const { return swizzled_tile_of_rows(shared_address(shared.v[v_count % 2]), PAGE * ROW); }
    DEVICE void wait_keys() { wait(&shared.barriers.k_full[k_count % 2], k_count / 2 % 2); }
    DEVICE void wait_values() { wait(&shared.barriers.v_full[v_count % 2], v_count / 2 % 2); }
    DEVICE void release_keys() { release(&shared.barriers.k_empty[k_count++ % 2]); }
    DEVICE void release_values() { release(&shared.barriers.v_empty[v_count++ % 2]); }

    // A reused block may hold another request's NaN after this sequence's end; zero weights would not stop them.
    DEVICE void clean_values(int from) {
        wait_values();
        uint4* tile = reinterpret_cast<uint4*>(shared.v[v_count % 2]);
        for (int i = threadIdx.x % 128; i < TILE / 16; i += 128)
            if (i / (2 * PAGE * ROW / 16) * PAGE + i / (ROW / 16) % PAGE >= from) tile[i] = uint4{0, 0, 0, 0};
        fence_async_proxy();
        sync_threads(OWN + group, 128);
    }

    template <bool MASKED>
    DEVICE void step(float (&sum)[64], u32 (&weights)[32], Softmax& state, u64 q, int limit0, int limit1) {
        float scores[64];
        wait_keys();
        sync_threads(TURN + group, 256);
        score(scores, q, keys());
        wait_values();
        weigh(sum, weights, values());
        arrive_threads(TURN + 1 - group, 256);
        await_wgmma<1>();
        keep_in_place(scores);
        release_keys();
        if (MASKED) hide(scores, limit0, limit1);
        exponentiate(scores, state, scale);
        await_wgmma<0>();
        keep_in_place(sum);
        keep_in_place(weights);
        release_values();
#pragma unroll
        for (int i = 0; i < 64; i++) sum[i] *= state.decay[i % 4 / 2];
        pack(weights, scores);
    }

    DEVICE void attend(const Work& work, u32 slot, const Scratch& scratch, bf16* out, i64 stride_out) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        const int row = group * 64 + warp * 16 + lane / 4;
        const int own = lane % 4 * 2;
        int n = work.tiles - 1;
        const int last = work.context - 1 - n * KEYS - own;  // limits in the tile of keys at hand
        int limit0 = min(work.position + row / GROUP - n * KEYS - own, last);
        int limit1 = min(work.position + (row + 8) / GROUP - n * KEYS - own, last);
        const u64 q = swizzled_tile(shared_address(shared.q[slot]) + group * 64 * ROW);

        float sum[64] = {};
        u32 weights[32];
        Softmax state = {{UNSEEN, UNSEEN}, {0.0f, 0.0f}, {1.0f, 1.0f}};
        {
            float scores[64];
            wait_keys();
            score(scores, q, keys());
            await_wgmma<0>();
            keep_in_place(scores);
            release_keys();
            hide(scores, limit0, limit1);
            exponentiate(scores, state, scale);
            pack(weights, scores);
        }
        if (work.tiles * KEYS > work.context) clean_values(work.context - n * KEYS);
        for (n--; n >= work.from && (n + 1) * KEYS > work.position + 1; n--) {
            limit0 += KEYS, limit1 += KEYS;
            step<true>(sum, weights, state, q, limit0, limit1);
        }
        for (; n >= work.from; n--) step<false>(sum, weights, state, q, 0, 0);
        wait_values();
        weigh(sum, weights, values());
        await_wgmma<0>();
        keep_in_place(sum);
        release_values();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            state.total[i] += __shfl_xor_sync(~0u, state.total[i], 1);
            state.total[i] += __shfl_xor_sync(~0u, state.total[i], 2);
        }
        if (work.pieces == 1 || combine(work, sum, state, scratch)) write(work, slot, sum, state, out, stride_out);
        fence_async_proxy();  // the next queries are copied to where results were
        __syncwarp();
        if (lane == 0) arrive(&shared.barriers.q_empty[slot]);
    }

    // Whether this piece is the last of its item; then the others are added to it.
    DEVICE bool combine(const Work& work, float (&sum)[64], Softmax& state, const Scratch& scratch) {
        const int thread = threadIdx.x % 128;
        int* arrivals = scratch.counters + 2 + work.item * 2 + group;
        const auto sums = [&](int piece) { return scratch.sums + ((work.slot + piece) * 2 + group) * 16 * 128 + thread; };
        const auto states = [&](int piece) { return scratch.states + ((work.slot + piece) * 2 + group) * 128 + thread; };
#pragma unroll
        for (int i = 0; i < 16; i++)
            sums(work.piece)[i * 128] = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
        *states(work.piece) = make_float4(state.peak[0], state.total[0], state.peak[1], state.total[1]);
        __threadfence();
        sync_threads(OWN + group, 128);
        if (thread == 0) shared.arrived[group] = atomicAdd(arrivals, 1);
        sync_threads(OWN + group, 128);
        if (shared.arrived[group] != work.pieces - 1) return false;
        __threadfence();
        if (thread == 0) *arrivals = 0;
        for (int piece = 0; piece < work.pieces; piece++) {
            if (piece == work.piece) continue;
            const float4 other = *states(piece);
            const float peaks[2] = {other.x, other.z}, totals[2] = {other.y, other.w};
            float here[2], there[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float peak = fmaxf(state.peak[i], peaks[i]);
                here[i] = exp2_approx((state.peak[i] - peak) * scale);
                there[i] = exp2_approx((peaks[i] - peak) * scale);
                state.peak[i] = peak;
                state.total[i] = state.total[i] * here[i] + totals[i] * there[i];
            }
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const float4 part = sums(piece)[i * 128];
                sum[4 * i] = sum[4 * i] * here[0] + part.x * there[0];
                sum[4 * i + 1] = sum[4 * i + 1] * here[0] + part.y * there[0];
                sum[4 * i + 2] = sum[4 * i + 2] * here[1] + part.z * there[1];
                sum[4 * i + 3] = sum[4 * i + 3] * here[1] + part.w * there[1];
            }
        }
        return true;
    }

    // Through the shared memory of the queries, each warp its 16 rows, so that whole rows are written.
    DEVICE void write(const Work& work, u32 slot, const float (&sum)[64], const Softmax& state, bf16* out,
                      i64 stride_out) {
        const int lane = threadIdx.x % 32, first = group * 64 + threadIdx.x / 32 % 4 * 16;
        const float inverse[2] = {reciprocal_approx(state.total[0]), reciprocal_approx(state.total[1])};
        unsigned char* tile = shared.q[slot] + first * ROW;
        sync_threads(OWN + group, 128);  // no one reads the queries any more
#pragma unroll
        for (int i = 0; i < 64; i += 2) {
            const int row = lane / 4 + i % 4 / 2 * 8, chunk = i / 4;
            const int at = chunk / 8 * HALF + row * ROW + (chunk % 8 ^ row % 8) * 16 + lane % 4 * 4;
            const float factor = inverse[i % 4 / 2];
            *reinterpret_cast<u32*>(tile + at) = pack_bf16(sum[i] * factor, sum[i + 1] * factor);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int row = i * 2 + lane / 16, chunk = lane % 16;
            const int query = (first + row) / GROUP, head = work.head * GROUP + (first + row) % GROUP;
            const uint4 value =
                *reinterpret_cast<uint4*>(tile + chunk / 8 * HALF + row * ROW + (chunk % 8 ^ row % 8) * 16);
            if (query < work.queries)
                *reinterpret_cast<uint4*>(out + (work.first + query) * stride_out + head * DIM + chunk * 8) = value;
        }
    }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    prefill(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,
            const __grid_constant__ TensorMap values, bf16* out, const int* tables, const int* starts,
            const int* contexts, float4* sums, float4* states, int* counters, int slots, int sequences, int heads,
            float scale, int stride_out, int stride_table) {
    SHARED_MEMORY(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const Scratch scratch = {sums, states, counters};
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform, and known to be
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            init_barrier(&shared.barriers.q_full[i], 1);
            init_barrier(&shared.barriers.q_empty[i], 9);
            init_barrier(&shared.barriers.k_full[i], 1);
            init_barrier(&shared.barriers.k_empty[i], 2);
            init_barrier(&shared.barriers.v_full[i], 1);
            init_barrier(&shared.barriers.v_empty[i], 2);
        }
        publish_barriers();
    }
    __syncthreads();
    let_next_start();
    if (role < 2) {  // this branch first: in the other order the compiler keeps to 168 registers
        take_registers<224>();
        if (role == 1) arrive_threads(TURN, 256);
        Consumer consumer{shared, role, scale};
        while (true) {
            const u32 slot = consumer.items % 2, parity = consumer.items / 2 % 2;
            consumer.items++;
            wait(&shared.barriers.q_full[slot], parity);
            const Work work = shared.work[slot];
            if (work.tiles == 0) break;
            consumer.attend(work, slot, scratch, out, stride_out);
        }
    } else {
        give_registers<56>();
        const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
        if (warp == 0)
            produce_keys(shared, &queries, &keys, tables, starts, contexts, scratch.counters, slots, sequences,
                         heads, stride_table);
        else if (warp == 1)
            produce_values(shared, &values, tables, stride_table);
    }
}
