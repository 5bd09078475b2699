// The GEMVs of layers.cu: one producer warp copies weights to the ring, the others multiply.
#pragma once
#include "layers_exchange.cuh"

// Copies that are issued too early delay all other memory traffic: no more are in flight than keep memory busy.
struct Producer {
    Ring ring, landed;
    int limit = IN_FLIGHT, in_flight = 0;

    // `copy` starts copies of so many bytes to a slot.
    template <class Copy>
    DEVICE void fill(int total, Copy copy) {
        Shared& shared = ring.shared;
        u64* full = shared.full + ring.slot;
        if (in_flight == limit) {
            wait(shared.full + landed.slot, landed.parity);
            landed.advance();
        } else {
            in_flight++;
        }
        wait(shared.empty + ring.slot, ring.parity ^ 1);
        if (threadIdx.x % 32 == 0) arrive_expecting(full, total);
        __syncwarp();
        copy(ring.slot, full);
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
                fill(count * bytes, [&](int slot, u64* full) {
                    if (lane < count) copy_bulk(ring.shared.slots[slot] + lane * STRIDE, from + at, bytes, full);
                });
            }
        }
    }
    DEVICE void stream(u64 weight, int row_bytes, const Rows& rows) {
        stream(weight, row_bytes, rows.first, rows.count, rows.count, 0);
    }

    // The layer's KV blocks begin at `first_block`; lanes 0 and 1 copy keys and values of a block, 2 and 3 of the next.
    DEVICE void stream_tokens(const TensorMap* keys, const TensorMap* values, i64 first_block, const int* table,
                              const Unit& unit) {
        constexpr int BYTES = 2 * BLOCK * D;
        const int lane = threadIdx.x % 32;
        for (int base = unit.start; base < unit.stop; base += SLOT_TOKENS) {
            const int token = base + lane / 2 * BLOCK, blocks = unit.stop - base > BLOCK ? 2 : 1;
            const bool copies = lane < 2 * blocks;
            const i64 block = first_block + (copies ? __ldg(table + token / BLOCK) : 0);
            const int row = static_cast<int>((block * KV_HEADS + unit.kv_head) * BLOCK);
            fill(2 * blocks * BYTES, [&](int slot, u64* full) {
                unsigned char* to = aligned_slot(ring.shared, slot) + lane % 2 * (2 * SLOT_TOKENS * D) + lane / 2 * BYTES;
                if (copies) copy_box(to, lane % 2 ? values : keys, 0, row, 0, full, EVICT_FIRST);
            });
        }
    }
};

// A tile of 8 rows is the 16 of an mma: every second word of a row counts as a row of its own, against a column that has the
// other words of the input. So what a lane reads of a row, in one go, is its part of the mma as it stands.
constexpr int PIECES = CHUNK / 128, EACH = PIECES / WARPS;  // of a chunk, and those that each warp takes
static_assert(PIECES % WARPS == 0, "warps share a chunk evenly");

template <bool QUANTIZED>
constexpr int X_WORDS = QUANTIZED ? 8 : 4;  // of the input, for one piece

// Two sums to add to, so that one need not wait for the other.
template <bool QUANTIZED>
DEVICE void multiply(float (&sums)[2][4], const uint4& low, const uint4& high, const u32 (&x)[X_WORDS<QUANTIZED>]) {
    const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if constexpr (QUANTIZED) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 first = words[2 * j], second = words[2 * j + 1];
            const u32 a[4] = {f16_of_e4m3(first & 0xFFFF), f16_of_e4m3(first >> 16), f16_of_e4m3(second & 0xFFFF),
                              f16_of_e4m3(second >> 16)};
            mma_f16(sums[j % 2], a, x[2 * j], x[2 * j + 1]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const u32 a[4] = {words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]};
            mma_bf16(sums[j], a, x[2 * j], x[2 * j + 1]);
        }
    }
}

// What a warp has of a slot: 16 bytes of a row for each lane and half of a piece.
struct Slice {
    uint4 low[EACH], high[EACH];
    DEVICE void read(const Ring& ring) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const unsigned char* from = ring.shared.slots[ring.slot] + lane / 4 * STRIDE + warp * 128 + lane % 4 * 16;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            low[i] = *reinterpret_cast<const uint4*>(from + i * WARPS * 128);
            high[i] = *reinterpret_cast<const uint4*>(from + i * WARPS * 128 + 64);
        }
    }
};

// GEMV of this CTA's rows of a weight, in at most so many tiles, with an input of K numbers in shared memory: the sums over
// the columns that each warp takes go to `sums` of shared memory.
//
// Up to MOST_HELD slots are read to registers before the input is there; of more, one slot is read ahead.
template <bool QUANTIZED, int K, int TILES, int MOST_HELD>
struct Gemv {
    static constexpr int BYTES = K * (QUANTIZED ? 1 : 2), CHUNKS = (BYTES + CHUNK - 1) / CHUNK;
    static constexpr bool KEEP = CHUNKS * EACH * X_WORDS<QUANTIZED> <= 32;  // the input in registers, for all tiles
    static constexpr int HELD = KEEP && TILES * CHUNKS <= MOST_HELD ? TILES : 0;

    Slice held[most(HELD, 1)][CHUNKS];

    DEVICE static bool inside(int chunk, int i) {  // of what lies beyond a row's end, nothing is multiplied
        return BYTES % CHUNK == 0 || chunk * CHUNK + (i * WARPS + static_cast<int>(threadIdx.x) / 32) * 128 < BYTES;
    }
    DEVICE static void load_input(u32 (&words)[X_WORDS<QUANTIZED>], const Shared& shared, int chunk, int i) {
        constexpr int HALF = X_WORDS<QUANTIZED> / 2;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int sixteen = (chunk * PIECES + i * WARPS + warp) * 8 + lane % 4;  // bytes of the weight
        const u32* x = reinterpret_cast<const u32*>(shared.x) + sixteen * 2 * HALF + lane / 4 % 2 * HALF;
#pragma unroll
        for (int j = 0; j < HALF; j++) {
            words[j] = x[j];
            words[HALF + j] = x[8 * HALF + j];
        }
    }
    DEVICE static void leave(Shared& shared, const float (&sums)[2][4], int tile) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane % 4 == 0) shared.sums[warp][tile + lane / 4] = (sums[0][0] + sums[1][0]) + (sums[0][3] + sums[1][3]);
    }

    // Call it before the input is there: reads the weights that registers can hold, and frees their slots.
    DEVICE void hold(Ring& ring, int rows) {
        if constexpr (HELD == 0) return;
        const int first = ring.slot, count = (rows + ROWS - 1) / ROWS * CHUNKS, lane = threadIdx.x % 32;
#pragma unroll
        for (int tile = 0; tile < HELD; tile++)
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                const bool more = tile * ROWS < rows;
                if (more) wait(ring.shared.full + ring.slot, ring.parity);
                held[tile][chunk].read(ring);  // garbage where there is no more
                if (more) ring.advance();
            }
        __syncwarp();
        const u32 last = held[HELD - 1][CHUNKS - 1].high[EACH - 1].w;
        if (lane < count) arrive_having(ring.shared.empty + ring.after(first, lane), last);
    }

    // Call it once the input is there; the first row's sum goes to place `to`.
    DEVICE void compute(Ring& ring, int rows, int to = 0) {
        Shared& shared = ring.shared;
        u32 kept[KEEP ? CHUNKS : 1][EACH][X_WORDS<QUANTIZED>];
        if constexpr (KEEP) {
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    if (inside(chunk, i)) load_input(kept[chunk][i], shared, chunk, i);
        }
        const auto multiply_slice = [&](float (&sums)[2][4], const Slice& slice, int chunk) {
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (inside(chunk, i)) multiply<QUANTIZED>(sums, slice.low[i], slice.high[i], kept[KEEP ? chunk : 0][i]);
        };
#pragma unroll
        for (int tile = 0; tile < HELD; tile++) {
            float sums[2][4] = {};
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++) multiply_slice(sums, held[tile][chunk], chunk);
            leave(shared, sums, to + tile * ROWS);
        }
        if constexpr (HELD > 0) return;
        Slice next;
        wait(shared.full + ring.slot, ring.parity);
        next.read(ring);
        for (int tile = 0; tile < rows; tile += ROWS) {
            float sums[2][4] = {};
#pragma unroll(KEEP ? CHUNKS : 1)
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                const Slice slice = next;
                u64* empty = shared.empty + ring.slot;
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    if (!KEEP && inside(chunk, i)) load_input(kept[0][i], shared, chunk, i);
                ring.advance();
                if (chunk + 1 < CHUNKS || tile + ROWS < rows) wait(shared.full + ring.slot, ring.parity);
                next.read(ring);  // garbage where there is no more
                multiply_slice(sums, slice, chunk);
                __syncwarp();
                if (threadIdx.x % 32 == 0) arrive(empty);
            }
            leave(shared, sums, to + tile);
        }
    }
};

DEVICE float total(const Shared& shared, int row) {
    float sums[2] = {};
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sums[warp % 2] += shared.sums[warp][row];
    return sums[0] + sums[1];
}
