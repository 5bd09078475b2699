// Persistent GEMM for many rows: out[rows, N] = x[rows, K] weight[N, K]^T, or with a SwiGLU epilogue SiLU(gate) * up, where
// gate and up are the halves of that. It is bound by the tensor cores, so these must never idle.
//
// One CTA per SM computes tile after tile of 128 rows and TILE channels, with SwiGLU half of them of the gate and half of
// up. One producer warp copies, two warpgroups multiply 64 rows each. The copies run ahead into the next tile, and the first
// warpgroup ends its part of a tile before the second, so that one multiplies during the other's epilogue. Two CTAs are a
// cluster that loads what its tiles share once, half each (multicast). Tiles come in bands of rows that stay in L2 while
// the whole weight passes by.
//
// TILE     a multiple of 32                      FP8          e4m3 with scales of channels and rows, else bfloat16
// STAGES   steps of 128 bytes of K in flight,    COMMON_ROWS  the tiles of a pair have the same rows, else the same
//          of which there are no fewer                        channels
// GATED    SwiGLU epilogue                       ADD          residual epilogue: out is added to
// SPLITS   parts of K that are summed apart      APPLIES_NORM x has a deferred RMSNorm: row_scales are sums of its squares
// EXACT    every number is rounded as in gemm.cu with as many SPLITS, so that a row has the same bits from either kernel
#define ROWS TILE  // the N side of wgmma.cuh: here channels
#include "cluster.cuh"
#include "common.cuh"
#include "deferred_norm.cuh"
#include "wgmma.cuh"

constexpr int HEIGHT = 128;               // rows of a tile
constexpr int THREADS = 256;              // that multiply; 128 more, of which one copies
constexpr int DEPTH = FP8 ? 128 : 64;     // of K in a step
constexpr int X_BYTES = HEIGHT * 128;
constexpr int STAGE_BYTES = X_BYTES + TILE * 128;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int LEAD = STAGES - 2;          // steps that the first warpgroup is ahead in the end
constexpr int AHEAD = 1;                  // a barrier of sync_threads
constexpr int COLUMNS = GATED ? TILE / 2 : TILE;  // of out, in a tile
constexpr int PARTS = COLUMNS * 4 / TILE;  // in which the epilogue stages a tile
constexpr int CHUNKS = COLUMNS / PARTS / 8;  // of 8 columns or 16 bytes, in a part
constexpr int PITCH = (CHUNKS | 1) * 16;  // bytes: neither stores nor loads collide in banks
constexpr int SCALES = FP8 ? TILE : 0;    // of the channels of a tile: of this one and of the next

// The pairs of tiles: in a band all rows of a column of tiles, then the next column.
struct Order {
    int high, wide, band;
    DEVICE int count() const { return high * wide; }
    DEVICE void place(int number, int rank, int& row, int& channel) const {
        const int first = number / (band * wide) * band, within = number - first * wide;
        const int height = min(band, high - first), down = first + within % height, right = within / height;
        row = (COMMON_ROWS ? down : down * 2 + rank) * HEIGHT;
        channel = (COMMON_ROWS ? right * 2 + rank : right) * TILE;
    }
};

struct Stage {
    int index = 0;
    u32 parity = 0;
    DEVICE void next() {
        if (++index == STAGES) index = 0, parity ^= 1;
    }
};

// Gated: 8 channels of the gate interleaved with the same 8 of up, so that a thread gets both values of a column.
DEVICE void copy_step(unsigned char* to, const TensorMap* x, const TensorMap* weight, int step, int row, int channel,
                      int rank, u64* barrier) {
    unsigned char* weights = to + X_BYTES;
    const int depth = step * DEPTH;
    arrive_expecting(barrier, STAGE_BYTES);
    if (COMMON_ROWS) {
        copy_box_to_both(to + rank * (X_BYTES / 2), x, depth, row + rank * (HEIGHT / 2), barrier, EVICT_NORMAL);
        if (GATED)
            copy_box(weights, weight, depth, 0, 0, channel / 16, barrier, EVICT_NORMAL);
        else
            copy_box(weights, weight, depth, channel, barrier, EVICT_NORMAL);
    } else {
        unsigned char* half = weights + rank * (TILE * 64);
        copy_box(to, x, depth, row, barrier, EVICT_NORMAL);
        if (GATED)
            copy_box_to_both(half, weight, depth, 0, 0, channel / 16 + rank * (TILE / 32), barrier, EVICT_NORMAL);
        else
            copy_box_to_both(half, weight, depth, channel + rank * (TILE / 2), barrier, EVICT_NORMAL);
    }
}

// Gated: those of the gate, then those of up.
DEVICE void copy_scales(float* to, const float* from, int column, int width, u64* barrier) {
    const int bytes = max(0, min(COLUMNS, width - column)) * 4;
    arrive_expecting(barrier, (GATED ? 2 : 1) * bytes);
    if (bytes) {
        copy_bulk(to, from + column, bytes, barrier, EVICT_LAST);
        if (GATED) copy_bulk(to + COLUMNS, from + width + column, bytes, barrier, EVICT_LAST);
    }
}

// What a thread has of 8 channels: two of a row and two of the eighth row after it.
using Four = float[4];
DEVICE Four& four(float (&sums)[TILE / 2], int channels) { return *reinterpret_cast<Four*>(&sums[channels * 4]); }

DEVICE void scale(Four& sum, const float* of_channels, float of_row, float of_eighth) {
    const float2 by = *reinterpret_cast<const float2*>(of_channels);
    sum[0] = rounded_product(sum[0], by.x * of_row), sum[1] = rounded_product(sum[1], by.y * of_row);
    sum[2] = rounded_product(sum[2], by.x * of_eighth), sum[3] = rounded_product(sum[3], by.y * of_eighth);
}
DEVICE void scale(Four& sum, float of_row, float of_eighth) {
    sum[0] = rounded_product(sum[0], of_row), sum[1] = rounded_product(sum[1], of_row);
    sum[2] = rounded_product(sum[2], of_eighth), sum[3] = rounded_product(sum[3], of_eighth);
}
// One reciprocal serves four, since special functions would take longer than all the rest. Beyond 2^30 the denominators
// do not matter any more.
DEVICE void silu_times(Four& gate, const Four& up) {
    Four d;
#pragma unroll
    for (int i = 0; i < 4; i++) d[i] = 1.0f + exp2_approx(fminf(gate[i] * -1.4426950408889634f, 30.0f));
    const float left = d[0] * d[1], right = d[2] * d[3], inverse = reciprocal_approx(left * right);
    const float of_left = inverse * right, of_right = inverse * left;
    gate[0] *= of_left * d[1] * up[0], gate[1] *= of_left * d[0] * up[1];
    gate[2] *= of_right * d[3] * up[2], gate[3] *= of_right * d[2] * up[3];
}
// The same from half of the gate, to 2^-12 of the gate: enough for what is rounded to e4m3 next.
DEVICE void silu_times_roughly(Four& half, const Four& up) {
#pragma unroll
    for (int i = 0; i < 4; i++) half[i] = (half[i] * tanh_approx(half[i]) + half[i]) * up[i];
}
// Each by itself, as in gemm.cu.
DEVICE void silu_times_apart(Four& gate, const Four& up) {
#pragma unroll
    for (int i = 0; i < 4; i++) gate[i] = silu_times(gate[i], up[i]);
}

// Copies what a warp has staged of its 16 rows and a part of a tile's columns to `out`, or from there.
template <bool LOADS>
DEVICE void copy_part(unsigned char* laid, bf16* out, int row, int column, int rows, int width, int stride_out, int lane) {
#pragma unroll
    for (int i = 0; i < (CHUNKS + 1) / 2; i++) {
        const int down = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
        if (down < 16 && row + down < rows && column + chunk * 8 < width) {
            uint4* there = reinterpret_cast<uint4*>(out + (row + down) * i64(stride_out) + column + chunk * 8);
            uint4* here = reinterpret_cast<uint4*>(laid + down * PITCH + chunk * 16);
            if (LOADS)
                *here = *there;
            else
                *there = *here;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
persistent_gemm(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map, bf16* out,
                const float* __restrict__ channel_scales, const float* __restrict__ row_scales, int rows, int width,
                int steps, int stride_out, int high, int wide, int band, float per_channel, float eps) {
    SHARED_MEMORY(ring);
    unsigned char* staging = ring + RING_BYTES;                          // [128, PITCH]
    float* scales = reinterpret_cast<float*>(staging + HEIGHT * PITCH);  // [2, SCALES]
    u64* full = reinterpret_cast<u64*>(scales + 2 * SCALES);
    u64* empty = full + STAGES;
    u64* scaled = empty + STAGES;  // [2]

    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // all lanes know the warp
    const int rank = blockIdx.x % 2, pair = blockIdx.x / 2, pairs = gridDim.x / 2;
    const Order order = {high, wide, band};

    if (threadIdx.x == THREADS) {
        for (int stage = 0; stage < STAGES; stage++) {
            init_barrier(&full[stage], 1);
            init_barrier(&empty[stage], 4);  // the warpgroups of both CTAs, as both fill it
        }
        init_barrier(&scaled[0], 1);
        init_barrier(&scaled[1], 1);
        publish_barriers();
        fence_async_proxy();
        prefetch_map(&x_map);
        prefetch_map(&weight_map);
    }
    __syncwarp();
    sync_cluster_relaxed();

    if (warp >= THREADS / 32) {
        give_registers<40>();
        if (threadIdx.x == THREADS) {
            wait_for_previous();
            Stage stage;
            for (int number = pair, slot = 0; number < order.count(); number += pairs, slot ^= 1) {
                int row, channel;
                order.place(number, rank, row, channel);
                for (int step = 0; step < steps; step++) {
                    await(&empty[stage.index], stage.parity ^ 1);
                    copy_step(ring + stage.index * STAGE_BYTES, &x_map, &weight_map, step, row, channel, rank,
                              &full[stage.index]);
                    // Their slot is free: the last tile but one ended STAGES steps ago at the least.
                    if (FP8 && step == 0)
                        copy_scales(scales + slot * SCALES, channel_scales, GATED ? channel / 2 : channel, width, &scaled[slot]);
                    stage.next();
                }
            }
            let_next_start();
        }
        __syncwarp();
    } else {
        take_registers<232>();
        const int group = warp / 4;
        const u64 x_tile = swizzled_tile(shared_address(ring) + group * 8192);
        const u64 weight_tile = swizzled_tile(shared_address(ring) + X_BYTES);
        unsigned char* laid = staging + warp * 16 * PITCH;
        u32* mine = reinterpret_cast<u32*>(laid + lane / 4 * PITCH + lane % 4 * 4);
        const auto release = [&](int stage) {
            if (threadIdx.x % 128 < 2) arrive_at(&empty[stage], threadIdx.x % 128);
        };
        Stage stage;
        wait_for_previous();  // for the scales of the rows
        for (int number = pair, count = 0; number < order.count(); number += pairs, count++) {
            int row, channel;
            order.place(number, rank, row, channel);
            row += warp * 16;
            const auto factor_of = [&](int row) {
                if (!(FP8 || APPLIES_NORM) || row >= rows) return 0.0f;
                return FP8 ? row_scales[row] : inverse_root(row_scales + row, rows, 1, per_channel, eps);
            };
            const float of_row = factor_of(row + lane / 4), of_eighth = factor_of(row + lane / 4 + 8);
            const float* of_channels = scales + count % 2 * SCALES + lane % 4 * 2;
            float sums[TILE / 2], total[SPLITS > 1 ? TILE / 2 : 1];
#pragma unroll
            for (int i = 0; i < TILE / 2; i++) sums[i] = 0.0f;
            const auto apply_scales = [&](int eight) {
                Four& sum = four(sums, eight);
                if (FP8)
                    scale(sum, of_channels + (GATED ? eight % 2 * COLUMNS + eight / 2 * 8 : eight * 8), of_row, of_eighth);
                else if (APPLIES_NORM)
                    scale(sum, of_row, of_eighth);
            };
            const auto await_scales = [&] {
                if (FP8) await(&scaled[count % 2], count / 2 % 2);
            };
            int previous = 0, part = 0;
            for (int step = 0; step < steps; step++) {
                if (group == 1 && step == steps - LEAD) sync_threads(AHEAD, THREADS);
                if (SPLITS > 1 && step == steps * (part + 1) / SPLITS) {
                    await_wgmma<0>();
                    keep_in_place(sums);
                    await_scales();
#pragma unroll
                    for (int eight = 0; eight < TILE / 8; eight++) apply_scales(eight);
#pragma unroll
                    for (int i = 0; i < TILE / 2; i++) {
                        total[SPLITS > 1 ? i : 0] = part ? total[SPLITS > 1 ? i : 0] + sums[i] : sums[i];
                        sums[i] = 0.0f;
                    }
                    part++;
                }
                await(&full[stage.index], stage.parity);
                const u32 offset = stage.index * STAGE_BYTES;
                begin_wgmma();
#pragma unroll
                for (int k = 0; k < 4; k++)
                    wgmma(sums, x_tile + (offset + k * 32) / 16, weight_tile + (offset + k * 32) / 16);
                commit_wgmma();
                await_wgmma<1>();
                if (step > 0) release(previous);
                previous = stage.index;
                stage.next();
            }
            if (group == 0) arrive_threads(AHEAD, THREADS);
            await_wgmma<0>();
            release(previous);

            await_scales();
#pragma unroll
            for (int piece = 0; piece < PARTS; piece++) {
                const int column = (GATED ? channel / 2 : channel) + piece * CHUNKS * 8;
                if (ADD) {
                    __syncwarp();
                    copy_part<true>(laid, out, row, column, rows, width, stride_out, lane);
                }
#pragma unroll
                for (int chunk = piece * CHUNKS; chunk < (piece + 1) * CHUNKS; chunk++) {
                    if (GATED && FP8 && !EXACT) {
                        Four &gate = four(sums, 2 * chunk), &up = four(sums, 2 * chunk + 1);
                        scale(gate, of_channels + chunk * 8, 0.5f * of_row, 0.5f * of_eighth);
                        scale(up, of_channels + COLUMNS + chunk * 8, of_row, of_eighth);
                        silu_times_roughly(gate, up);
                        continue;
                    }
#pragma unroll
                    for (int eight = GATED ? 2 * chunk : chunk; eight <= (GATED ? 2 * chunk + 1 : chunk); eight++) {
                        apply_scales(eight);
#pragma unroll
                        for (int i = eight * 4; SPLITS > 1 && i < eight * 4 + 4; i++) sums[i] = total[i] + sums[i];
                    }
                    if (GATED && EXACT)
                        silu_times_apart(four(sums, 2 * chunk), four(sums, 2 * chunk + 1));
                    else if (GATED)
                        silu_times(four(sums, 2 * chunk), four(sums, 2 * chunk + 1));
                }
                __syncwarp();
#pragma unroll
                for (int i = 0; i < CHUNKS; i++) {
                    const Four& value = four(sums, (GATED ? 2 : 1) * (piece * CHUNKS + i));
                    u32 &upper = mine[i * 4], &lower = mine[i * 4 + 8 * PITCH / 4];
                    if (ADD) {
                        upper = pack_bf16(value[0] + low_bf16(upper), value[1] + high_bf16(upper));
                        lower = pack_bf16(value[2] + low_bf16(lower), value[3] + high_bf16(lower));
                    } else {
                        upper = pack_bf16(value[0], value[1]);
                        lower = pack_bf16(value[2], value[3]);
                    }
                }
                __syncwarp();
                copy_part<false>(laid, out, row, column, rows, width, stride_out, lane);
            }
        }
    }
    sync_cluster_relaxed();  // no CTA exits while the other may still write to its shared memory
}
