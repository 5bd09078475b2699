// Attention of tiles of queries over a paged cache: bf16, heads of 128. `prefill.cu` and `prefix.cu` say which tiles.
//
// A tile is 128 rows: BLOCK_Q queries with all GROUP query heads of one key/value head. One warp copies queries and keys,
// one values; two warpgroups of 64 rows each multiply. While one multiplies, the other computes its softmax
// (ping-pong). Within a warpgroup the scores of the next keys are multiplied before the softmax of those
// present is needed. Keys are taken from the last visible ones to the first, so that masks concern the first ones taken
// alone. CTAs are persistent: they copy for the next tile while they finish one.
#pragma once
#include "device.cuh"

constexpr int ROWS = 128, KEYS = 128, DIM = 128, PAGE = 16, PAGES = KEYS / PAGE;
constexpr int BLOCK_Q = ROWS / GROUP;
// Bytes of 128 rows, as halves of 64 columns in rows of 128 bytes, swizzled: first the one half of all rows, then the
// other; values have both halves of 16 tokens side by side.
constexpr int TILE = 128 * DIM * 2, HALF = TILE / 2;
constexpr int ROW = 128;            // bytes of a row of one half
constexpr float UNSEEN = -1.0e30f;  // finite: a row that saw no key yet must not produce NaN
constexpr int TILES_AHEAD = 2;      // of queries: one computed, one on its way
constexpr int TURN = 1, OWN = 3;    // named barriers: of the ping-pong, and of a warpgroup alone; plus its number

struct alignas(16) Work {  // aligned, so that it is copied in vectors
    int first;          // row of the first query
    int queries;        // of this tile; 0: there is no more work
    int position;       // of the first query in its sequence
    int context;        // tokens of the sequence in the cache
    int sequence;       // its block table
    int head;           // of keys and values
    int from, to;       // tiles of keys: at least one
    int piece, pieces;  // of the keys of a tile and head
    int slot;           // of its first piece, where pieces meet
};

struct Barriers {
    u64 q_full[TILES_AHEAD], q_empty[TILES_AHEAD], k_full[2], k_empty[2], v_full[2], v_empty[2];
};

struct Shared {
    unsigned char q[TILES_AHEAD][TILE];  // where results are put together afterwards
    unsigned char k[2][TILE];
    unsigned char v[2][TILE];
    Barriers barriers;
    Work work[TILES_AHEAD];
    int arrived[2];
};

// -- matmuls of a warpgroup: 64 rows by 128 columns -----------------------------------------------------------------------

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
    float peak[2], total[2], decay[2];  // `total`: of this thread's columns
};
constexpr Softmax NOTHING_SEEN = {{UNSEEN, UNSEEN}, {0.0f, 0.0f}, {1.0f, 1.0f}};

// Where this thread's columns of a tile of keys end, for its two rows.
struct Limits {
    int of[2];
};

DEVICE void hide(float (&scores)[64], const Limits& limits) {
#pragma unroll
    for (int i = 0; i < 64; i++) {
        const int column = i / 4 * 8 + i % 2;
        if (column > limits.of[i % 4 / 2]) scores[i] = __int_as_float(0xFF800000);
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
// Of all columns of its rows.
DEVICE void complete_totals(Softmax& state) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        state.total[i] += __shfl_xor_sync(~0u, state.total[i], 1);
        state.total[i] += __shfl_xor_sync(~0u, state.total[i], 2);
    }
}
DEVICE void pack(u32 (&weights)[32], const float (&scores)[64]) {
#pragma unroll
    for (int i = 0; i < 32; i++) weights[i] = pack_bf16(scores[2 * i], scores[2 * i + 1]);
}

// -- the warps that copy --------------------------------------------------------------------------------------------------

// Tiles of keys or of values, the last first. After the last page its copies follow: what they hold is never seen.
struct Copier {
    const TensorMap* map;
    unsigned char (*tiles)[TILE];
    u64 *full, *empty;
    u32 count = 0;

    template <bool WHOLE_PAGES, typename Function>
    DEVICE void copy(const Work& work, const int* table, Function near_end) {
        const int last_page = (work.context - 1) / PAGE;
        int pages[PAGES];
#pragma unroll
        for (int i = 0; i < PAGES; i++) pages[i] = table[min((work.to - 1) * PAGES + i, last_page)];
        for (int n = work.to - 1; n >= work.from; n--) {
            int ahead[PAGES];
#pragma unroll
            for (int i = 0; i < PAGES; i++) ahead[i] = table[min(max(n - 1, 0) * PAGES + i, last_page)];
            if (n == work.from) near_end();
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

// Gives tiles to the others with their queries and keys.
struct Producer {
    Shared& shared;
    const TensorMap* queries;
    const int* tables;
    int stride_table;
    Copier copier;
    u32 items = 0;

    DEVICE Producer(Shared& shared, const TensorMap* queries, const TensorMap* keys, const int* tables, int stride_table)
        : shared(shared),
          queries(queries),
          tables(tables),
          stride_table(stride_table),
          copier{keys, shared.k, shared.barriers.k_full, shared.barriers.k_empty} {}

    // All lanes; one does `near_end` before it copies the last tile of keys.
    template <typename Function>
    DEVICE void give(const Work& work, Function near_end) {
        const u32 slot = items % TILES_AHEAD, parity = items / TILES_AHEAD % 2;
        u64* full = &shared.barriers.q_full[slot];
        items++;
        if (elected()) {
            wait(&shared.barriers.q_empty[slot], parity ^ 1);
            shared.work[slot] = work;
            arrive_expecting(full, BLOCK_Q * GROUP * DIM * 2);
            copy_box(shared.q[slot], queries, 0, work.head * GROUP, work.first, full);
            copy_box(shared.q[slot] + HALF, queries, DIM / 2, work.head * GROUP, work.first, full);
            copier.copy<false>(work, tables + i64(work.sequence) * stride_table, near_end);
        }
        __syncwarp();
    }
    DEVICE void end() {
        const u32 slot = items % TILES_AHEAD, parity = items / TILES_AHEAD % 2;
        if (elected()) {
            wait(&shared.barriers.q_empty[slot], parity ^ 1);
            shared.work[slot].queries = 0;
            arrive(&shared.barriers.q_full[slot]);
        }
    }
};

DEVICE void copy_values(Shared& shared, const TensorMap* values, const int* tables, int stride_table) {
    Barriers& barriers = shared.barriers;
    Copier copier{values, shared.v, barriers.v_full, barriers.v_empty};
    if (elected())
        for (u32 items = 0;; items++) {
            const u32 slot = items % TILES_AHEAD, parity = items / TILES_AHEAD % 2;
            wait(&barriers.q_full[slot], parity);
            const Work work = shared.work[slot];
            arrive(&barriers.q_empty[slot]);
            if (work.queries == 0) break;
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

    DEVICE Limits limits(const Work& work, int n) const {
        const int row = group * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        const int first = n * KEYS + threadIdx.x % 4 * 2, last = work.context - 1;
        return {min(work.position + row / GROUP, last) - first, min(work.position + (row + 8) / GROUP, last) - first};
    }
    DEVICE u64 queries() const {
        return swizzled_tile(shared_address(shared.q[items % TILES_AHEAD]) + group * 64 * ROW);
    }
    DEVICE const Work& take() {
        wait(&shared.barriers.q_full[items % TILES_AHEAD], items / TILES_AHEAD % 2);
        return shared.work[items % TILES_AHEAD];
    }
    // Scores of the next keys and the sum over the values at hand, in its turn; returns once the scores are there.
    DEVICE void multiply(float (&scores)[64], float (&sum)[64], u32 (&weights)[32]) {
        wait_keys();
        sync_threads(TURN + group, 256);
        score(scores, queries(), keys());
        wait_values();
        weigh(sum, weights, values());
        arrive_threads(TURN + 1 - group, 256);
        await_wgmma<1>();
        keep_in_place(scores);
        release_keys();
    }
    DEVICE void complete(float (&sum)[64], u32 (&weights)[32]) {
        await_wgmma<0>();
        keep_in_place(sum);
        keep_in_place(weights);
        release_values();
    }
    template <bool MASKED>
    DEVICE void step(float (&sum)[64], u32 (&weights)[32], Softmax& state, const Limits& limits) {
        float scores[64];
        multiply(scores, sum, weights);
        if (MASKED) hide(scores, limits);
        exponentiate(scores, state, scale);
        complete(sum, weights);
#pragma unroll
        for (int i = 0; i < 64; i++) sum[i] *= state.decay[i % 4 / 2];
        pack(weights, scores);
    }

    // What was multiplied with them is complete, and the results are out.
    DEVICE void release_queries(u32 slot) {
        fence_async_proxy();  // results may have been there
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&shared.barriers.q_empty[slot]);
    }
    DEVICE void prepare_values(const Work& work) {
        if (work.to * KEYS > work.context) clean_values(work.context - (work.to - 1) * KEYS);
    }

    // A tile whose queries are all in the other warpgroup: this one takes its turns and computes nothing.
    DEVICE void pass(const Work& work) {
        for (int n = work.to - 1; n >= work.from; n--) {
            wait_keys();
            if (n < work.to - 1) {
                sync_threads(TURN + group, 256);
                arrive_threads(TURN + 1 - group, 256);
            }
            sync_threads(OWN + group, 128);  // no warp falls behind by a whole ring
            release_keys();
            wait_values();
            sync_threads(OWN + group, 128);
            release_values();
        }
    }

    // All tiles that there are. `finish` writes the results of one; its queries' place in shared memory is free then.
    template <typename Finish>
    DEVICE void consume(Finish finish) {
        while (true) {
            const Work& work = take();
            if (work.queries == 0) return;
            if (work.queries * GROUP <= group * 64) {
                pass(work);
                release_queries(items++ % TILES_AHEAD);
                continue;
            }
            float sum[64] = {};
            u32 weights[32];
            Softmax state = NOTHING_SEEN;
            {
                float scores[64];
                wait_keys();
                score(scores, queries(), keys());
                await_wgmma<0>();
                keep_in_place(scores);
                release_keys();
                hide(scores, limits(work, work.to - 1));
                exponentiate(scores, state, scale);
                pack(weights, scores);
            }
            prepare_values(work);
            const int from = work.from, position = work.position;
            int n = work.to - 2;
            for (; n >= from && (n + 1) * KEYS > position + 1; n--) step<true>(sum, weights, state, limits(work, n));
            for (; n >= from; n--) step<false>(sum, weights, state, {});
            wait_values();
            weigh(sum, weights, values());
            complete(sum, weights);
            const u32 slot = items++ % TILES_AHEAD;
            finish(*this, work, slot, sum, state);
            release_queries(slot);
        }
    }
};

// The threads of a block by their roles. `produce` gives the tiles.
constexpr int THREADS = 384;
template <typename Produce, typename Finish>
DEVICE void attend(Shared& shared, const TensorMap* values, const int* tables, int stride_table, float scale,
                   Produce produce, Finish finish) {
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform, and known to be
    if (threadIdx.x == 0) {
        for (int i = 0; i < TILES_AHEAD; i++) {
            init_barrier(&shared.barriers.q_full[i], 1);
            init_barrier(&shared.barriers.q_empty[i], 9);
        }
        for (int i = 0; i < 2; i++) {
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
        consumer.consume(finish);
    } else {
        give_registers<56>();
        const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
        if (warp == 0)
            produce();
        else if (warp == 1)
            copy_values(shared, values, tables, stride_table);
    }
}
