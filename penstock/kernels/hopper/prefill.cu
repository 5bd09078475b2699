// Attention of ragged chunks of queries over a paged cache, causal.
//
// As many thread blocks as multiprocessors draw tiles from a counter. Where tiles are few, the keys of each are divided
// into pieces; the one that comes last adds the others to its own.
#include "attention.cuh"

// Where pieces meet, in the order in which threads hold them.
struct Scratch {
    float4* sums;    // [slots, 2, 16, 128]
    float4* states;  // [slots, 2, 128]: peak and total of both rows
    int* counters;   // of pieces drawn and of blocks done; then [items, 2] of pieces that arrived: zero between launches
};
constexpr int MOST_PIECES = 8, FEWEST_TILES = 4;

// So that rounds of pieces, each with what it costs to join them, take the least time.
DEVICE int pieces_of_each(int items, int slots) {
    const int blocks = gridDim.x;
    int best = 1, least = (items + blocks - 1) / blocks * 100;
#pragma unroll
    for (int pieces = 2; pieces <= MOST_PIECES; pieces++) {
        const int cost = (items * pieces + blocks - 1) / blocks * (100 / pieces + 3);
        if (cost < least && items * pieces <= slots) least = cost, best = pieces;
    }
    return best;
}

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

DEVICE void produce(Producer& producer, const int* starts, const int* contexts, int sequences, int heads, int slots,
                    int* counters) {
    const int lane = threadIdx.x % 32;
    wait_for_previous();
    const int tiles = place_of(1 << 30, starts, sequences, lane).tiles;
    const int most = pieces_of_each(tiles * heads, slots);
    const auto draw = [&] { return atomicAdd(&counters[0], 1) + int(gridDim.x); };
    for (int drawn = blockIdx.x; drawn < tiles * heads * most;) {
        const int item = drawn / most, piece = drawn % most;
        const int head = item % heads, tile = tiles - 1 - item / heads;  // late tiles see most keys: they come first
        const Place place = place_of(tile, starts, sequences, lane);
        const int begin = starts[place.sequence], count = starts[place.sequence + 1] - begin;
        const int context = contexts[place.sequence], position = context - count + place.skip;
        const int queries = min(BLOCK_Q, count - place.skip), key_tiles = (position + queries + KEYS - 1) / KEYS;
        const int pieces = min(most, max(key_tiles / FEWEST_TILES, 1));
        const Work work = {begin + place.skip,
                           queries,
                           position,
                           context,
                           place.sequence,
                           head,
                           key_tiles * piece / pieces,
                           key_tiles * (piece + 1) / pieces,
                           item,
                           piece,
                           pieces,
                           item * most};
        int next = 0;
        if (piece < pieces)
            producer.give(work, [&] { next = draw(); });
        else if (elected())
            next = draw();
        drawn = sum_of_warp(next);
    }
    producer.end();
    if (lane == 0 && atomicAdd(&counters[1], 1) == int(gridDim.x) - 1) counters[0] = counters[1] = 0;
}

// Whether this piece is the last of its item; then the others are added to it.
DEVICE bool combine(Consumer& consumer, const Work& work, float (&sum)[64], Softmax& state, const Scratch& scratch) {
    const int group = consumer.group, thread = threadIdx.x % 128;
    int* arrivals = scratch.counters + 2 + work.item * 2 + group;
    const int slot = work.slot * 2 + group, mine = work.piece, pieces = work.pieces;
    const auto sums = [&](int piece) { return scratch.sums + (slot + piece * 2) * 16 * 128 + thread; };
    const auto states = [&](int piece) { return scratch.states + (slot + piece * 2) * 128 + thread; };
#pragma unroll
    for (int i = 0; i < 16; i++)
        sums(mine)[i * 128] = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
    *states(mine) = make_float4(state.peak[0], state.total[0], state.peak[1], state.total[1]);
    __threadfence();
    sync_threads(OWN + group, 128);
    if (thread == 0) consumer.shared.arrived[group] = atomicAdd(arrivals, 1);
    sync_threads(OWN + group, 128);
    if (consumer.shared.arrived[group] != pieces - 1) return false;
    __threadfence();
    if (thread == 0) *arrivals = 0;
    for (int piece = 0; piece < pieces; piece++) {
        if (piece == mine) continue;
        const float4 other = *states(piece);
        const float peaks[2] = {other.x, other.z}, totals[2] = {other.y, other.w};
        float here[2], there[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float peak = fmaxf(state.peak[i], peaks[i]);
            here[i] = exp2_approx((state.peak[i] - peak) * consumer.scale);
            there[i] = exp2_approx((peaks[i] - peak) * consumer.scale);
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
DEVICE void write(Consumer& consumer, const Work& work, u32 slot, const float (&sum)[64], const Softmax& state,
                  bf16* out, i64 stride_out) {
    const int lane = threadIdx.x % 32, first = consumer.group * 64 + threadIdx.x / 32 % 4 * 16;
    const float inverse[2] = {reciprocal_approx(state.total[0]), reciprocal_approx(state.total[1])};
    const int queries = work.queries, first_head = work.head * GROUP;
    out += work.first * stride_out;
    unsigned char* tile = consumer.shared.q[slot] + first * ROW;
    sync_threads(OWN + consumer.group, 128);  // no one reads the queries any more
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
        const int query = (first + row) / GROUP, head = first_head + (first + row) % GROUP;
        const uint4 value =
            *reinterpret_cast<uint4*>(tile + chunk / 8 * HALF + row * ROW + (chunk % 8 ^ row % 8) * 16);
        if (query < queries)
            *reinterpret_cast<uint4*>(out + query * stride_out + head * DIM + chunk * 8) = value;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,
            const __grid_constant__ TensorMap values, bf16* out, const int* tables, const int* starts,
            const int* contexts, float4* sums, float4* states, int* counters, int slots, int sequences, int heads,
            float scale, int stride_out, int stride_table) {
    SHARED_MEMORY(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const Scratch scratch = {sums, states, counters};
    const auto give_tiles = [&] {
        Producer producer(shared, &queries, &keys, tables, stride_table);
        produce(producer, starts, contexts, sequences, heads, slots, counters);
    };
    const auto finish = [&](Consumer& consumer, const Work& work, u32 slot, float (&sum)[64], Softmax& state) {
        complete_totals(state);
        if (work.pieces == 1 || combine(consumer, work, sum, state, scratch))
            write(consumer, work, slot, sum, state, out, stride_out);
    };
    attend(shared, &values, tables, stride_table, scale, give_tiles, finish);
}
