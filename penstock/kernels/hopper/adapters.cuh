// LoRA adapters inside a GEMM: out += (x A^T) B^T, with another A and B for every token.
//
// While the ring of the GEMM fills, the warps of its first CTAs compute x A^T (shrink): a unit of work is 16 tokens of one
// adapter, one module and 256 columns of x for each warp. In every CTA helpers, threads that do not multiply, wait for all units, add the
// partial sums up in order, and keep them in shared memory. When the last weights are in flight, the warps multiply them
// with their channels of B (expand) into the accumulators. So the GEMM keeps its epilogues and no kernel is added. The first
// CTAs must be resident at the same time: all wait for them.
//
// A is [modules, rank, inputs], B [outputs, rank], both bfloat16; ranks are multiples of 16.
#pragma once
#include "device.cuh"

constexpr int RANK_STEP = 16;
constexpr int COLUMNS = 256;     // of a warp; as in gemm.py
constexpr int LOADS = COLUMNS / 32;
constexpr int TILE_TOKENS = 16;  // at most
constexpr u32 HELPERS_MEET = 3, SHRINK_MEETS = 4;  // barriers of the CTA

struct Adapters {
    const int4* tiles;  // slot (-1: no adapter), rank, first entry of the order, tokens
    const int* order;   // of the tokens
    const bf16* weights;
    const bf16* x;      // [tokens, inputs]
    float* partials;    // [parts, tokens, modules * most_rank]
    u32* arrivals;      // units that are done; 0 before
    i64 slot_stride;    // elements
    int a_offset, b_offset, end, following;  // elements per rank; so many of the next GEMM from the end on
    int num_tiles, modules, most_rank, inputs, parts, tokens, workers;  // CTAs that compute units
    int second, third;  // first channels of those modules
};

// 16 ranks and 256 columns of A: a lane has eight columns of two ranks, eight times.
struct Factor {
    uint4 low[LOADS], high[LOADS];
};

struct Unit {
    int tile, module, part;
    int4 of;  // the tile
    DEVICE Unit(const Adapters& all, int number) {
        part = number % all.parts;
        module = number / all.parts % all.modules;
        tile = number / all.parts / all.modules;
        of = tile < all.num_tiles ? all.tiles[tile] : int4{-1, 0, 0, 0};
    }
    DEVICE bool real() const { return of.x >= 0; }
};

DEVICE void load_factor(Factor& factor, const Adapters& all, const Unit& unit, int rank, int first) {
    const int lane = threadIdx.x % 32;
    const bf16* a = all.weights + unit.of.x * all.slot_stride + i64(unit.of.y) * all.a_offset +
                    i64(unit.module * unit.of.y + rank + lane / 4) * all.inputs;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int column = first + i * 32 + lane % 4 * 8;
        const bool there = column < all.inputs;
        factor.low[i] = there ? load_once(a + column) : uint4{0, 0, 0, 0};
        factor.high[i] = there ? load_once(a + 8 * i64(all.inputs) + column) : uint4{0, 0, 0, 0};
    }
}

// sums += 16 ranks of A x, for eight tokens and the columns of the factor. They are in another order than mma has them, in A
// and x alike.
DEVICE void multiply(float (&sums)[2][4], const Factor& factor, const Adapters& all, int token, bool there, int first) {
    uint4 x[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int column = first + i * 32 + threadIdx.x % 4 * 8;
        x[i] = {0, 0, 0, 0};
        if (there && column < all.inputs) x[i] = read_words(all.x + i64(token) * all.inputs + column);
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const uint4 low = factor.low[i], high = factor.high[i];
        const u32 even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
        mma_bf16(sums[0], even, x[i].x, x[i].y);
        mma_bf16(sums[1], odd, x[i].z, x[i].w);
    }
}

// The sums of 16 ranks for the tokens of a unit, over the columns of all warps. `scratch` is [warps, ranks, tokens].
DEVICE void shrink(const Adapters& all, const Unit& unit, int rank, int warp, int warps, float* scratch, bool& waited) {
    const int lane = threadIdx.x % 32, width = all.modules * all.most_rank, first = (unit.part * warps + warp) * COLUMNS;
    Factor factor;
    load_factor(factor, all, unit, rank, first);
    if (!waited) wait_for_previous();
    waited = true;
#pragma unroll
    for (int eight = 0; eight < TILE_TOKENS; eight += 8) {
        if (eight >= unit.of.w) break;
        const bool there = eight + lane / 4 < unit.of.w;
        float sums[2][4] = {};
        multiply(sums, factor, all, all.order[unit.of.z + (there ? eight + lane / 4 : 0)], there, first);
        float* to = scratch + (warp * RANK_STEP + lane / 4) * TILE_TOKENS + eight + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]);
        *reinterpret_cast<float2*>(to + 8 * TILE_TOKENS) = make_float2(sums[0][2] + sums[1][2], sums[0][3] + sums[1][3]);
    }
    sync_threads(SHRINK_MEETS, warps * 32);
    for (int item = threadIdx.x; item < unit.of.w * RANK_STEP; item += warps * 32) {
        const int token = all.order[unit.of.z + item / RANK_STEP], column = unit.module * all.most_rank + rank + item % RANK_STEP;
        float total = 0.0f;
        for (int of = 0; of < warps; of++) total += scratch[(of * RANK_STEP + item % RANK_STEP) * TILE_TOKENS + item / RANK_STEP];
        all.partials[i64(unit.part * all.tokens + token) * width + column] = total;
    }
    sync_threads(SHRINK_MEETS, warps * 32);
}

// By all warps that multiply, before they do. Waits for the previous kernel.
DEVICE void shrink_units(const Adapters& all, int warp, int warps, float* scratch) {
    const int units = blockIdx.x < all.workers ? all.num_tiles * all.modules * all.parts : 0;
    bool waited = false;
#pragma unroll 1
    for (int number = blockIdx.x; number < units; number += all.workers) {
        const Unit unit(all, number);
        if (!unit.real()) continue;
#pragma unroll 1
        for (int rank = 0; rank < unit.of.y; rank += RANK_STEP) shrink(all, unit, rank, warp, warps, scratch, waited);
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(all.arrivals, 1u);
        }
    }
    if (!waited) wait_for_previous();
}

// Shared memory of a CTA for its adapters. Threads that do not multiply, the helpers, fill it.
struct SharedAdapters {
    int4* tiles;   // [num_tiles]
    float* scratch;  // [warps, RANK_STEP, TILE_TOKENS], of the warps that multiply
    int* tile_of;  // [ROWS]: of the tokens; -1: no adapter
    bf16* shrunk;  // [GATED ? 2 : 1, ROWS, pitch]
    int pitch;
    DEVICE SharedAdapters(unsigned char* memory, const Adapters& all, int rows, int warps)
        : tiles(reinterpret_cast<int4*>(memory)), scratch(reinterpret_cast<float*>(tiles + all.num_tiles)),
          tile_of(reinterpret_cast<int*>(scratch + warps * RANK_STEP * TILE_TOKENS)),
          shrunk(reinterpret_cast<bf16*>(tile_of + rows)), pitch(all.most_rank + 4) {}
};

DEVICE void list_tiles(const SharedAdapters& shared, const Adapters& all, int rows, int helper, int helpers) {
    for (int row = helper; row < rows; row += helpers) shared.tile_of[row] = -1;
    sync_threads(HELPERS_MEET, helpers);
    for (int item = helper; item < all.num_tiles * TILE_TOKENS; item += helpers) {
        const int tile = item / TILE_TOKENS, i = item % TILE_TOKENS;
        const int4 of = all.tiles[tile];
        if (i == 0) shared.tiles[tile] = of;
        if (of.x >= 0 && i < of.w) shared.tile_of[all.order[of.z + i]] = tile;
    }
    sync_threads(HELPERS_MEET, helpers);
}

// Brings A and B of the next GEMM into L2: there, they would wait behind the weights that its ring asks for. They follow
// ours in the slots. All CTAs share the work.
DEVICE void prefetch_following(const SharedAdapters& shared, const Adapters& all, int helper, int helpers) {
    for (int tile = 0, before = -1; tile < all.num_tiles; tile++) {
        const int4 of = shared.tiles[tile];
        if (of.x < 0 || of.x == before) continue;
        before = of.x;
        const bf16* at = all.weights + of.x * all.slot_stride + i64(of.y) * all.end;
        for (int line = blockIdx.x * helpers + helper; line < of.y * all.following / 64; line += gridDim.x * helpers)
            prefetch_line(reinterpret_cast<u64>(at + i64(line) * 64));
    }
}

// Waits for all units and adds up the partial sums of `modules` modules from the first on.
DEVICE void gather_shrunk(const SharedAdapters& shared, const Adapters& all, int first, int modules, int rows, int helper, int helpers) {
    int used = 0, ranks = 0;
    for (int tile = 0; tile < all.num_tiles; tile++) {
        const int4 of = shared.tiles[tile];
        if (of.x >= 0) used++, ranks = max(ranks, of.y);
    }
    if (helper == 0) {
        while (poll_word(all.arrivals) < used * all.modules * all.parts) {
        }
        __threadfence();
    }
    sync_threads(HELPERS_MEET, helpers);
    const int quads = ranks / 4, width = all.modules * all.most_rank;
    for (int item = helper; item < modules * all.tokens * quads; item += helpers) {
        const int rank = item % quads * 4, token = item / quads % all.tokens, module = item / quads / all.tokens;
        const int tile = shared.tile_of[token];
        if (tile < 0 || rank >= shared.tiles[tile].y) continue;
        const float* at = all.partials + i64(token) * width + (first + module) * all.most_rank + rank;
        float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
        for (int part = 0; part < all.parts; part++) {
            const float4 more = read_float4(at + i64(part) * all.tokens * width);
            total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
        }
        *reinterpret_cast<uint2*>(shared.shrunk + (module * rows + token) * shared.pitch + rank) = {
            pack_bf16(total.x, total.y), pack_bf16(total.z, total.w)};
    }
}

// 16 ranks of B for the two channels of a lane: four ranks each.
struct Channels {
    uint2 low, high;
};

DEVICE Channels load_channels(const Adapters& all, int4 tile, int rank, int low, int high, bool low_there, bool high_there) {
    const bf16* b = all.weights + tile.x * all.slot_stride + i64(tile.y) * all.b_offset + rank + threadIdx.x % 4 * 4;
    return {low_there ? *reinterpret_cast<const uint2*>(b + i64(low) * tile.y) : uint2{0, 0},
            high_there ? *reinterpret_cast<const uint2*>(b + i64(high) * tile.y) : uint2{0, 0}};
}

// sums [16 channels, 8 tokens] += B x shrunk, for the tokens of that tile. Gated: gate channels with the first module, up
// channels with the second.
template <bool GATES>
DEVICE void expand(float (&sums)[4], const Channels& b, const SharedAdapters& shared, int tile, int rank, int first, int rows) {
    const int token = first + threadIdx.x % 32 / 4;
    const bool ours = shared.tile_of[token] == tile;
    if (__ballot_sync(0xffffffffu, ours) == 0) return;
    const bf16* at = shared.shrunk + token * shared.pitch + rank + threadIdx.x % 4 * 4;
    const uint2 s = ours ? *reinterpret_cast<const uint2*>(at) : uint2{0, 0};
    if (!GATES) {
        const u32 both[4] = {b.low.x, b.high.x, b.low.y, b.high.y};
        mma_bf16(sums, both, s.x, s.y);
        return;
    }
    const uint2 up = ours ? *reinterpret_cast<const uint2*>(at + rows * shared.pitch) : uint2{0, 0};
    const u32 gates[4] = {b.low.x, 0, b.low.y, 0}, ups[4] = {0, b.high.x, 0, b.high.y};
    mma_bf16(sums, gates, s.x, s.y);
    mma_bf16(sums, ups, up.x, up.y);
}
