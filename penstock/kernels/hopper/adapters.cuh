// LoRA adapters inside a GEMM: out += (x A^T) B^T, with another A and B for every token.
//
// Helpers, warps that do not multiply with the weight, do all of it while the others do that. Those of the first CTAs
// compute x A^T (shrink): a unit of work is 16 tokens of one adapter, one module and 1,024 columns of x, 128 for each warp.
// The helpers of every CTA wait for the partial sums of all units, add them up in order, and multiply them with their
// channels of B (expand). The epilogue finds the products in shared memory. So the GEMM
// keeps its epilogues, no kernel is added, and the weight never waits. The first CTAs must be resident at the same time:
// all wait for them.
//
// While weights stream, whatever else is read takes some microseconds. So three reads depend on each other: of tiles, of A
// and x, of partial sums and B. Nobody counts or fences: a partial sum that is not ABSENT has been written.
//
// A is [modules, rank, inputs], B [outputs, rank], both bfloat16; ranks are multiples of 16.
#pragma once
#include "device.cuh"

constexpr int RANK_STEP = 16;
constexpr int COLUMNS = 128;     // of a warp; as in gemm.py
constexpr int LOADS = COLUMNS / 32;
constexpr int TILE_TOKENS = 16;  // at most
constexpr int HELPER_WARPS = 8, ADAPTER_HELPERS = 32 * HELPER_WARPS;  // as in gemm.py
constexpr int HELD = 4;          // pieces of B that a warp loads at once
constexpr int READ = 8;          // partial sums that a thread reads at once
constexpr u32 HELPERS_MEET = 3;  // barrier of the CTA
constexpr u32 ABSENT = 0xFFFFFFFFu;  // a NaN that no sum is

struct Adapters {
    const int4* tiles;  // slot (-1: no adapter; those with one are neighbours), rank, first entry of the order, tokens
    const int* order;   // of the tokens
    const bf16* weights;
    const bf16* x;      // [tokens, inputs]
    float* partials;    // [parts, tokens, modules * most_rank]; ABSENT before
    i64 slot_stride;    // elements
    int a_offset, b_offset;  // elements per rank
    int num_tiles, modules, most_rank, inputs, parts, tokens, workers;  // CTAs that compute units
    int second, third;  // first channels of those modules
};

// Shared memory of a CTA for its adapters.
struct SharedAdapters {
    int4* tiles;   // [num_tiles]
    float* added;  // [rows, pitch]: what the adapters add to the tile; before that [warps, RANK_STEP, TILE_TOKENS]
    bf16* shrunk;  // [modules of the tile, rows, shrunk_pitch]
    int* order;    // [rows]: of the tokens
    int* tile_of;  // [rows]: of the entries of the order
    int rows, pitch, shrunk_pitch;
    DEVICE SharedAdapters(unsigned char* memory, const Adapters& all, int rows, int channels, int modules)
        : tiles(reinterpret_cast<int4*>(memory)), added(reinterpret_cast<float*>(tiles + all.num_tiles)), rows(rows),
          pitch(channels + 4), shrunk_pitch(all.most_rank + 4) {
        const int scratch = HELPER_WARPS * RANK_STEP * TILE_TOKENS, sums = rows * pitch;
        shrunk = reinterpret_cast<bf16*>(added + (sums > scratch ? sums : scratch));
        order = reinterpret_cast<int*>(shrunk + modules * rows * shrunk_pitch);
        tile_of = order + rows;
    }
};

// The tiles that have an adapter.
struct Adapted {
    const int4* tiles;
    int count, most_rank;
    DEVICE Adapted(const SharedAdapters& shared, const Adapters& all) : tiles(shared.tiles), count(0), most_rank(0) {
#pragma unroll 1
        for (int tile = 0; tile < all.num_tiles; tile++) {
            const int4 of = shared.tiles[tile];
            if (of.x < 0) continue;
            if (count++ == 0) tiles += tile;
            most_rank = max(most_rank, of.y);
        }
    }
};

// What a helper reads of the list of tiles, before its CTA asks for weights.
struct Listed {
    int4 tile;
    int token;
    DEVICE Listed(const Adapters& all, int helper) : tile{-1, 0, 0, 0}, token(0) {
        if (helper < 0) return;
        if (helper < all.num_tiles) tile = all.tiles[helper];
        if (helper < all.tokens) token = all.order[helper];
    }
};

DEVICE void list_tiles(const SharedAdapters& shared, const Adapters& all, const Listed& listed, int helper) {
    if (helper < all.num_tiles) shared.tiles[helper] = listed.tile;
    if (helper < all.tokens) shared.order[helper] = listed.token;
    sync_threads(HELPERS_MEET, ADAPTER_HELPERS);
    if (helper < all.num_tiles)
#pragma unroll 1
        for (int i = 0; i < listed.tile.w; i++) shared.tile_of[listed.tile.z + i] = helper;
}

// 16 ranks and 128 columns of A: a lane has eight columns of two ranks, four times.
struct Factor {
    uint4 low[LOADS], high[LOADS];
    DEVICE Factor(const Adapters& all, int4 of, int module, int rank, int first) {
        const int lane = threadIdx.x % 32;
        const bf16* a = all.weights + of.x * all.slot_stride + i64(of.y) * all.a_offset +
                        i64(module * of.y + rank + lane / 4) * all.inputs;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int column = first + i * 32 + lane % 4 * 8;
            const bool there = column < all.inputs;
            low[i] = there ? load_once(a + column) : uint4{0, 0, 0, 0};
            high[i] = there ? load_once(a + 8 * i64(all.inputs) + column) : uint4{0, 0, 0, 0};
        }
    }
};

// 128 columns of x for two times eight tokens, as Factor has them. In both they are in another order than mma has them.
struct Inputs {
    uint4 x[2][LOADS];
    DEVICE Inputs(const SharedAdapters& shared, const Adapters& all, int4 of, int first) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int eight = 0; eight < 2; eight++) {
            const bool real = eight * 8 + lane / 4 < of.w;
            const int token = real ? shared.order[of.z + eight * 8 + lane / 4] : 0;
            const bf16* at = all.x + i64(token) * all.inputs + lane % 4 * 8;
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const int column = first + i * 32;
                x[eight][i] = real && column + lane % 4 * 8 < all.inputs ? read_words(at + column) : uint4{0, 0, 0, 0};
            }
        }
    }
};

// The sums of 16 ranks for the tokens of a tile, over the columns of all warps. Waits for the previous kernel.
DEVICE void shrink(const SharedAdapters& shared, const Adapters& all, int4 of, int module, int part, int rank, int helper) {
    const int warp = helper / 32, lane = helper % 32, first = (part * HELPER_WARPS + warp) * COLUMNS;
    const Factor factor(all, of, module, rank, first);
    wait_for_previous();
    const Inputs inputs(shared, all, of, first);
    float* scratch = shared.added;
#pragma unroll
    for (int eight = 0; eight < 2; eight++) {
        if (eight * 8 >= of.w) break;
        float sums[2][4] = {};
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const uint4 low = factor.low[i], high = factor.high[i], x = inputs.x[eight][i];
            const u32 even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
            mma_bf16(sums[0], even, x.x, x.y);
            mma_bf16(sums[1], odd, x.z, x.w);
        }
        float* to = scratch + (warp * RANK_STEP + lane / 4) * TILE_TOKENS + eight * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]);
        *reinterpret_cast<float2*>(to + 8 * TILE_TOKENS) = make_float2(sums[0][2] + sums[1][2], sums[0][3] + sums[1][3]);
    }
    sync_threads(HELPERS_MEET, ADAPTER_HELPERS);
    if (helper < of.w * RANK_STEP) {
        const int token = shared.order[of.z + helper / RANK_STEP], width = all.modules * all.most_rank;
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < HELPER_WARPS; i++)
            total += scratch[(i * RANK_STEP + helper % RANK_STEP) * TILE_TOKENS + helper / RANK_STEP];
        const i64 place = i64(part * all.tokens + token) * width + module * all.most_rank + rank + helper % RANK_STEP;
        put_word(all.partials + place, min(__float_as_uint(total), ABSENT - 1));
    }
    sync_threads(HELPERS_MEET, ADAPTER_HELPERS);
}

DEVICE void shrink_units(const SharedAdapters& shared, const Adapters& all, const Adapted& adapted, int helper) {
    const int units = blockIdx.x < all.workers ? adapted.count * all.modules * all.parts : 0;
#pragma unroll 1
    for (int number = blockIdx.x; number < units; number += all.workers) {
        const int4 of = adapted.tiles[number / all.parts / all.modules];
#pragma unroll 1
        for (int rank = 0; rank < of.y; rank += RANK_STEP)
            shrink(shared, all, of, number / all.parts % all.modules, number % all.parts, rank, helper);
    }
    wait_for_previous();
}

DEVICE bool absent(uint4 sums) { return sums.x == ABSENT || sums.y == ABSENT || sums.z == ABSENT || sums.w == ABSENT; }

// Waits for the partial sums of `modules` modules from the first on and adds them up, for tiles that this CTA expands.
template <int ALONG_K>
DEVICE void gather_shrunk(const SharedAdapters& shared, const Adapters& all, const Adapted& adapted, int first, int modules,
                          int split, int helper) {
    sync_threads(HELPERS_MEET, ADAPTER_HELPERS);  // tiles of the entries; nothing is added yet
    const int quads = adapted.most_rank / 4, width = all.modules * all.most_rank;
    const int begin = adapted.count ? adapted.tiles[0].z : all.tokens, tokens = all.tokens - begin;
#pragma unroll 1
    for (int item = helper; item < modules * tokens * quads; item += ADAPTER_HELPERS) {
        const int rank = item % quads * 4, entry = begin + item / quads % tokens, module = item / quads / tokens;
        const int tile = shared.tile_of[entry], token = shared.order[entry];
        if (rank >= shared.tiles[tile].y || (shared.tiles + tile - adapted.tiles) % ALONG_K != split) continue;
        const float* at = all.partials + i64(token) * width + (first + module) * all.most_rank + rank;
        float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (int part = 0; part < all.parts; part += READ) {
            uint4 sums[READ];
            bool missing = true;
            while (missing) {
                missing = false;
#pragma unroll
                for (int i = 0; i < READ; i++)
                    if (part + i < all.parts) sums[i] = poll(at + i64(part + i) * all.tokens * width);
#pragma unroll
                for (int i = 0; i < READ; i++) missing |= part + i < all.parts && absent(sums[i]);
            }
#pragma unroll
            for (int i = 0; i < READ; i++) {
                if (part + i >= all.parts) break;
                total.x += __uint_as_float(sums[i].x), total.y += __uint_as_float(sums[i].y);
                total.z += __uint_as_float(sums[i].z), total.w += __uint_as_float(sums[i].w);
            }
        }
        *reinterpret_cast<uint2*>(shared.shrunk + (module * shared.rows + token) * shared.shrunk_pitch + rank) = {
            pack_bf16(total.x, total.y), pack_bf16(total.z, total.w)};
    }
    sync_threads(HELPERS_MEET, ADAPTER_HELPERS);
}

// The channels of a CTA: of gate and of up, half of them each, or of one module.
template <int CHANNELS, bool GATES>
struct Channels {
    int first, width;
    DEVICE int place(int local) const { return GATES && local >= CHANNELS / 2 ? width + first + local - CHANNELS / 2 : first + local; }
    DEVICE bool there(int local) const { return first + (GATES ? local % (CHANNELS / 2) : local) < width; }
    DEVICE int module(int local) const { return GATES && local >= CHANNELS / 2; }
};

// What a warp expands: pieces of 16 channels of B times the low-rank sums of a tile. CTAs along K share the tiles.
template <int CHANNELS, bool GATES, int ALONG_K>
struct Expansion {
    static constexpr int SIXTEENS = CHANNELS / 16;
    const SharedAdapters& shared;
    const Adapters& all;
    const Adapted& adapted;
    const Channels<CHANNELS, GATES> channels;
    const int lane, split, count;
    uint2 low[HELD], high[HELD];  // 16 ranks for the two channels of a lane: four each

    DEVICE Expansion(const SharedAdapters& shared, const Adapters& all, const Adapted& adapted,
                     const Channels<CHANNELS, GATES>& channels, int split, int helper)
        : shared(shared), all(all), adapted(adapted), channels(channels), lane(helper % 32), split(split),
          count((adapted.count - split + ALONG_K - 1) / ALONG_K * SIXTEENS) {}
    DEVICE int tile(int piece) const { return split + piece / SIXTEENS * ALONG_K; }
    DEVICE int channel(int piece) const { return piece % SIXTEENS * 16 + lane / 4; }

    DEVICE void load(int first, int rank) {
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int piece = first + i * HELPER_WARPS, at = channel(piece);
            low[i] = high[i] = {0, 0};
            if (piece >= count) continue;
            const int4 of = adapted.tiles[tile(piece)];
            if (rank >= of.y) continue;
            const bf16* b = all.weights + of.x * all.slot_stride + i64(of.y) * (all.b_offset + channels.place(at));
            b += rank + lane % 4 * 4;
            if (channels.there(at)) low[i] = *reinterpret_cast<const uint2*>(b);
            if (channels.there(at + 8)) high[i] = *reinterpret_cast<const uint2*>(b + 8 * of.y);
        }
    }
    // Adds the pieces that are loaded.
    DEVICE void add(int first, int rank) {
#pragma unroll 1
        for (int eight = 0; eight < TILE_TOKENS; eight += 8) {
            uint2 x[HELD];
#pragma unroll
            for (int i = 0; i < HELD; i++) {
                const int piece = first + i * HELPER_WARPS;
                x[i] = {0, 0};
                if (piece >= count) continue;
                const int4 of = adapted.tiles[tile(piece)];
                if (rank >= of.y || eight + lane / 4 >= of.w) continue;
                const int row = channels.module(channel(piece)) * shared.rows + shared.order[of.z + eight + lane / 4];
                x[i] = *reinterpret_cast<const uint2*>(shared.shrunk + row * shared.shrunk_pitch + rank + lane % 4 * 4);
            }
#pragma unroll
            for (int i = 0; i < HELD; i++) {
                const int piece = first + i * HELPER_WARPS;
                if (piece >= count) break;
                const u32 b[4] = {low[i].x, high[i].x, low[i].y, high[i].y};
                float sums[4] = {};
                mma_bf16(sums, b, x[i].x, x[i].y);
                const int4 of = adapted.tiles[tile(piece)];
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    const int token = eight + lane % 4 * 2 + odd;
                    if (token >= of.w) continue;
                    float* to = shared.added + shared.order[of.z + token] * shared.pitch + channel(piece);
                    to[0] += sums[odd], to[8] += sums[2 + odd];
                }
            }
        }
    }
};

// By the helpers: fills `added` for the channels of a CTA, the first of them of that module.
template <int CHANNELS, bool GATES, int ALONG_K>
DEVICE void add_adapters(const SharedAdapters& shared, const Adapters& all, const Listed& listed,
                         const Channels<CHANNELS, GATES>& channels, int module, int split, int helper) {
    list_tiles(shared, all, listed, helper);
    const Adapted adapted(shared, all);
    shrink_units(shared, all, adapted, helper);
#pragma unroll 1
    for (int item = helper; item < shared.rows * shared.pitch / 4; item += ADAPTER_HELPERS)
        reinterpret_cast<float4*>(shared.added)[item] = {0.0f, 0.0f, 0.0f, 0.0f};
    Expansion<CHANNELS, GATES, ALONG_K> expansion(shared, all, adapted, channels, split, helper);
#pragma unroll 1
    for (int rank = 0; rank < adapted.most_rank; rank += RANK_STEP)
#pragma unroll 1
        for (int first = 0; first < expansion.count; first += HELD * HELPER_WARPS) {
            expansion.load(first + helper / 32, rank);
            if (rank == 0 && first == 0) gather_shrunk<ALONG_K>(shared, all, adapted, module, GATES ? 2 : 1, split, helper);
            expansion.add(first + helper / 32, rank);
        }
}
