// Attention of ragged chunks of queries over a paged cache, causal.
//
// As many thread blocks as multiprocessors draw tiles from a counter. Where tiles are few, the keys of each are divided
// into pieces of about equal length; the one that comes last adds the others to its own.
//
// RANGE: 0; or the keys of every tile are divided into pieces of so many tiles of keys, by their positions, and added up in
// order, so that a query has the same bits whatever else is computed. Where that makes more pieces than there are slots,
// a block takes all pieces of a tile one after the other.
#include "attention.cuh"

// Where pieces meet, in the order in which threads hold them.
struct Scratch {
    float4* sums;    // [slots + blocks, 2, 16, 128]
    float4* states;  // [slots + blocks, 2, 128]: peak and total of both rows
    int* counters;   // of pieces drawn, of blocks done, and [slots, 2] of pieces that arrived: zero between launches
};
constexpr int FEWEST_TILES = 4;
constexpr int LENGTH = RANGE ? RANGE : 1;
// What a piece costs beside its keys, in tiles of keys: if it is a whole tile, if it is joined with others, and if blocks
// do several, so that those with the same keys do not read them at the same time.
constexpr int STARTING = 1, JOINING = 6, LAGGING = 10;

DEVICE int tiles_of(int queries) { return (queries + BLOCK_Q - 1) / BLOCK_Q; }
DEVICE int key_tiles_of(int tokens) { return (tokens + KEYS - 1) / KEYS; }

// How many tiles of keys a piece has, so that rounds of pieces take the least time. A lane tries as many pieces for the
// longest context as its number says. It weighs pieces by their length: a chunk far into a long prompt fills all blocks
// even if there are short prompts beside it.
DEVICE int piece_length(const int* starts, const int* contexts, int sequences, int heads, int slots, int lane) {
    int all_tiles = 0, longest = 1;
    for (int s = lane; s < sequences; s += 32) {
        const int tiles = tiles_of(starts[s + 1] - starts[s]);
        all_tiles += tiles;
        if (tiles) longest = max(longest, key_tiles_of(contexts[s]));
    }
    longest = max_of_warp(longest);
    if (sum_of_warp(all_tiles) * heads > slots) return longest;
    const int blocks = gridDim.x, length = max((longest + lane) / (lane + 1), FEWEST_TILES);
    const int beside = length < longest ? JOINING : STARTING;
    int pieces = 0, large = 0, work = 0;  // large pieces: two of them take more than a round
    for (int base = 0; base < sequences; base += 32) {
        const int s = min(base + lane, sequences - 1), key_tiles = key_tiles_of(contexts[s]);
        const int tiles = base + lane < sequences ? tiles_of(starts[s + 1] - starts[s]) : 0;
        for (u32 left = __ballot_sync(~0u, tiles > 0); left; left &= left - 1) {
            const int from = __ffs(left) - 1;
            const int rows = __shfl_sync(~0u, tiles, from), keys = __shfl_sync(~0u, key_tiles, from);
            const int each = (keys + length - 1) / length;
            pieces += rows * each;
            if (2 * keys > each * length) large += rows * each;
            work += rows * (keys + each * beside);
        }
    }
    const int round = (length + beside) * blocks;
    const int rounds = max((work * heads + round - 1) / round, (large * heads + blocks - 1) / blocks);
    const bool fits = lane == 0 || pieces * heads <= slots;
    const int cost = fits ? rounds * (length + beside + (rounds > 1 ? LAGGING : 0)) : 1 << 30;
    const int least = -max_of_warp(-cost);
    return __shfl_sync(~0u, length, __ffs(__ballot_sync(~0u, cost == least)) - 1);
}

// By sequence, tile, head and piece: pieces of one head are next to each other.
struct Place {
    int sequence, tile, head, piece;
    int pieces;  // of each tile and head of the sequence
    int total;   // if there is no such piece
};

DEVICE Place place_of(int number, int length, const int* starts, const int* contexts, int sequences, int heads,
                      int lane) {
    int before = 0;
    for (int base = 0; base < sequences; base += 32) {
        const int s = min(base + lane, sequences - 1);
        // A sequence without context pads a CUDA graph.
        const int tiles = base + lane < sequences && contexts[s] ? tiles_of(starts[s + 1] - starts[s]) : 0;
        const int pieces = max((key_tiles_of(contexts[s]) + length - 1) / length, 1), own = tiles * heads * pieces;
        int end = own;  // of this sequence and of those before it
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_sync(~0u, end, max(lane - distance, 0));
            if (lane >= distance) end += other;
        }
        const int ended = __popc(__ballot_sync(~0u, before + end <= number));
        if (ended < 32) {
            const int rest = number - before - __shfl_sync(~0u, end - own, ended);
            const int each = __shfl_sync(~0u, pieces, ended);
            return {base + ended, rest / each / heads, rest / each % heads, rest % each, each, 0};
        }
        before += __shfl_sync(~0u, end, 31);
    }
    return {0, 0, 0, 0, 0, before};
}

// Starts and contexts are read before the kernel ahead has ended: a step begins with them in their place.
DEVICE void produce(Producer& producer, const int* starts, const int* contexts, int sequences, int heads, int slots,
                    int* counters) {
    const int lane = threadIdx.x % 32;
    int length = RANGE;
    if (!RANGE) length = piece_length(starts, contexts, sequences, heads, slots, lane);
    const auto find = [&](int number) { return place_of(number, length, starts, contexts, sequences, heads, lane); };
    int total = find(1 << 30).total;
    const bool in_turn = RANGE && total > slots;
    if (in_turn) length = 1 << 20, total = find(1 << 30).total;
    const auto draw = [&] { return atomicAdd(&counters[0], 1) + int(gridDim.x); };
    wait_for_previous();
    for (int drawn = blockIdx.x; drawn < total;) {
        const int number = total - 1 - drawn;  // late tiles first: they see most keys
        const Place place = find(number);
        const int begin = starts[place.sequence], count = starts[place.sequence + 1] - begin;
        const int skip = place.tile * BLOCK_Q, context = contexts[place.sequence], position = context - count + skip;
        const int queries = min(BLOCK_Q, count - skip), key_tiles = key_tiles_of(position + queries);
        const int pieces = RANGE ? (key_tiles + LENGTH - 1) / LENGTH : min(place.pieces, max(key_tiles / FEWEST_TILES, 1));
        const int last = in_turn ? pieces - 1 : place.piece;
        int next = 0;
        for (int piece = place.piece; piece <= last && piece < pieces; piece++) {
            const Work work = {begin + skip,
                               queries,
                               position,
                               context,
                               place.sequence,
                               place.head,
                               RANGE ? piece * RANGE : key_tiles * piece / pieces,
                               RANGE ? min((piece + 1) * RANGE, key_tiles) : key_tiles * (piece + 1) / pieces,
                               piece,
                               pieces,
                               in_turn ? slots + int(blockIdx.x) : number - piece};
            producer.give(work, [&] {
                if (piece == last) next = draw();
            });
        }
        if (place.piece >= pieces && elected()) next = draw();
        drawn = sum_of_warp(next);
    }
    producer.end();
    if (lane == 0 && atomicAdd(&counters[1], 1) == int(gridDim.x) - 1) counters[0] = counters[1] = 0;
}

DEVICE void put(const float (&sum)[64], const Softmax& state, float4* sums, float4* states) {
#pragma unroll
    for (int i = 0; i < 16; i++)
        sums[i * 128] = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
    *states = make_float4(state.peak[0], state.total[0], state.peak[1], state.total[1]);
}
// Whether a query is in one of the thread's rows.
DEVICE bool has_query(const Consumer& consumer, const Work& work) {
    return consumer.group * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 < u32(work.queries * GROUP);
}
// Adds what was put there; with LATER as the second of both, and all rounding written down.
template <bool LATER>
DEVICE void add(float (&sum)[64], Softmax& state, const float4* sums, const float4* states, float scale) {
    const float4 other = *states;
    const float peaks[2] = {other.x, other.z}, totals[2] = {other.y, other.w};
    float here[2] = {}, there[2] = {};
    const auto joined = [&](float own, float part, int row) {
        if (!RANGE) return own * here[row] + part * there[row];
        return LATER ? fmaf(own, here[row], rounded_product(part, there[row]))
                     : fmaf(part, there[row], rounded_product(own, here[row]));
    };
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float peak = fmaxf(state.peak[i], peaks[i]);
        here[i] = exp2_approx(rounded_product(state.peak[i] - peak, scale));
        there[i] = exp2_approx(rounded_product(peaks[i] - peak, scale));
        state.peak[i] = peak;
        state.total[i] = joined(state.total[i], totals[i], i);
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float4 part = sums[i * 128];
        sum[4 * i] = joined(sum[4 * i], part.x, 0), sum[4 * i + 1] = joined(sum[4 * i + 1], part.y, 0);
        sum[4 * i + 2] = joined(sum[4 * i + 2], part.z, 1), sum[4 * i + 3] = joined(sum[4 * i + 3], part.w, 1);
    }
}

// The pieces of a tile that a block takes in turn: whether this is the last. Each thread reads what it wrote.
DEVICE bool combine_in_turn(Consumer& consumer, const Work& work, float (&sum)[64], Softmax& state,
                            const Scratch& scratch) {
    const int slot = work.slot * 2 + consumer.group, thread = threadIdx.x % 128;
    float4 *sums = scratch.sums + slot * 16 * 128 + thread, *states = scratch.states + slot * 128 + thread;
    const bool real = has_query(consumer, work);
    if (work.piece && real) add<false>(sum, state, sums, states, consumer.scale);
    if (work.piece == work.pieces - 1) return true;
    if (real) put(sum, state, sums, states);
    return false;
}

// Whether this piece is the last of its item to come; then the others are added to it, or with RANGE all in order.
DEVICE bool combine(Consumer& consumer, const Work& work, float (&sum)[64], Softmax& state, const Scratch& scratch) {
    const int group = consumer.group, thread = threadIdx.x % 128;
    const int slot = work.slot * 2 + group, mine = work.piece, pieces = work.pieces;
    int* arrivals = scratch.counters + 2 + slot;
    const auto sums = [&](int piece) { return scratch.sums + (slot + piece * 2) * 16 * 128 + thread; };
    const auto states = [&](int piece) { return scratch.states + (slot + piece * 2) * 128 + thread; };
    const bool real = has_query(consumer, work);
    if (real) put(sum, state, sums(mine), states(mine));
    __threadfence();
    sync_threads(OWN + group, 128);
    if (thread == 0) consumer.shared.arrived[group] = atomicAdd(arrivals, 1);
    sync_threads(OWN + group, 128);
    if (consumer.shared.arrived[group] != pieces - 1) return false;
    __threadfence();
    if (thread == 0) *arrivals = 0;
    if (RANGE) {
        state = NOTHING_SEEN;
#pragma unroll
        for (int i = 0; i < 64; i++) sum[i] = 0.0f;
    }
    for (int piece = 0; real && piece < pieces; piece++)
        if (RANGE || piece != mine) add<true>(sum, state, sums(piece), states(piece), consumer.scale);
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
        const auto joins = [&] {
            return RANGE && work.slot >= slots ? combine_in_turn(consumer, work, sum, state, scratch)
                                               : combine(consumer, work, sum, state, scratch);
        };
        if (work.pieces == 1 || joins()) write(consumer, work, slot, sum, state, out, stride_out);
    };
    attend(shared, &values, tables, stride_table, scale, give_tiles, finish);
}
