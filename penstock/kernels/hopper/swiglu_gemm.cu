// Persistent GEMM with a SwiGLU epilogue for many rows: out[rows, N / 2] = SiLU(gate) * up, where gate and up are the halves
// of x[rows, K] weight[N, K]^T. It is bound by the tensor cores, so these must never idle.
//
// One CTA per SM computes tile after tile of 128 rows and TILE channels, half of them of the gate and half of up. One
// producer warp copies, two warpgroups multiply 64 rows each. The copies run ahead into the next tile, and the first
// warpgroup ends its part of a tile before the second, so that one multiplies during the other's epilogue. Two CTAs are a
// cluster that loads what its tiles share once, half each (multicast). Tiles come in bands of rows that stay in L2 while
// the whole weight passes by.
//
// TILE     a multiple of 32                      FP8          e4m3 with scales of channels and rows, else bfloat16
// STAGES   steps of 128 bytes of K in flight,    COMMON_ROWS  the tiles of a pair have the same rows, else the same
//          of which there are no fewer                        channels
#define ROWS TILE  // the N side of wgmma.cuh: here channels
#include "cluster.cuh"
#include "common.cuh"
#include "wgmma.cuh"

constexpr int HEIGHT = 128;               // rows of a tile
constexpr int THREADS = 256;              // that multiply; 128 more, of which one copies
constexpr int DEPTH = FP8 ? 128 : 64;     // of K in a step
constexpr int X_BYTES = HEIGHT * 128;
constexpr int STAGE_BYTES = X_BYTES + TILE * 128;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int LEAD = STAGES - 2;          // steps that the first warpgroup is ahead in the end
constexpr int AHEAD = 1;                  // a barrier of sync_threads
constexpr int COLUMNS = TILE / 2;         // of out, in a tile
constexpr int PARTS = 2;                  // in which the epilogue stages a tile
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

// 8 channels of the gate interleaved with the same 8 of up, so that a thread gets both values of a column.
DEVICE void copy_step(unsigned char* to, const TensorMap* x, const TensorMap* weight, int step, int row, int channel,
                      int rank, u64* barrier) {
    unsigned char* weights = to + X_BYTES;
    const int depth = step * DEPTH;
    arrive_expecting(barrier, STAGE_BYTES);
    if (COMMON_ROWS) {
        copy_box_to_both(to + rank * (X_BYTES / 2), x, depth, row + rank * (HEIGHT / 2), barrier, EVICT_NORMAL);
        copy_box(weights, weight, depth, 0, 0, channel / 16, barrier, EVICT_NORMAL);
    } else {
        copy_box(to, x, depth, row, barrier, EVICT_NORMAL);
        copy_box_to_both(weights + rank * (TILE * 64), weight, depth, 0, 0, channel / 16 + rank * (TILE / 32), barrier,
                         EVICT_NORMAL);
    }
}

// Those of the gate, then those of up.
DEVICE void copy_scales(float* to, const float* from, int column, int width, u64* barrier) {
    const int bytes = max(0, min(COLUMNS, width - column)) * 4;
    arrive_expecting(barrier, 2 * bytes);
    if (bytes) {
        copy_bulk(to, from + column, bytes, barrier, EVICT_LAST);
        copy_bulk(to + COLUMNS, from + width + column, bytes, barrier, EVICT_LAST);
    }
}

// What a thread has of 8 channels: two of a row and two of the eighth row after it.
using Four = float[4];
DEVICE Four& four(float (&sums)[TILE / 2], int channels) { return *reinterpret_cast<Four*>(&sums[channels * 4]); }

DEVICE void scale(Four& sum, const float* of_channels, float of_row, float of_eighth) {
    const float2 by = *reinterpret_cast<const float2*>(of_channels);
    sum[0] *= by.x * of_row, sum[1] *= by.y * of_row;
    sum[2] *= by.x * of_eighth, sum[3] *= by.y * of_eighth;
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

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
swiglu_gemm(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map, bf16* out,
              const float* __restrict__ channel_scales, const float* __restrict__ row_scales, int rows, int width,
              int steps, int stride_out, int high, int wide, int band) {
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
                        copy_scales(scales + slot * SCALES, channel_scales, channel / 2, width, &scaled[slot]);
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
            const float of_row = FP8 && row + lane / 4 < rows ? row_scales[row + lane / 4] : 0.0f;
            const float of_eighth = FP8 && row + lane / 4 + 8 < rows ? row_scales[row + lane / 4 + 8] : 0.0f;
            float sums[TILE / 2];
#pragma unroll
            for (int i = 0; i < TILE / 2; i++) sums[i] = 0.0f;
            int previous = 0;
            for (int step = 0; step < steps; step++) {
                if (group == 1 && step == steps - LEAD) sync_threads(AHEAD, THREADS);
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

            if (FP8) await(&scaled[count % 2], count / 2 % 2);
            const float* of_channels = scales + count % 2 * SCALES + lane % 4 * 2;
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
#pragma unroll
                for (int chunk = part * CHUNKS; chunk < (part + 1) * CHUNKS; chunk++) {
                    Four &gate = four(sums, 2 * chunk), &up = four(sums, 2 * chunk + 1);
                    if (FP8) {
                        scale(gate, of_channels + chunk * 8, 0.5f * of_row, 0.5f * of_eighth);
                        scale(up, of_channels + COLUMNS + chunk * 8, of_row, of_eighth);
                        silu_times_roughly(gate, up);
                    } else {
                        silu_times(gate, up);
                    }
                }
                __syncwarp();
#pragma unroll
                for (int i = 0; i < CHUNKS; i++) {
                    const Four& value = four(sums, 2 * (part * CHUNKS + i));
                    mine[i * 4] = pack_bf16(value[0], value[1]);
                    mine[i * 4 + 8 * PITCH / 4] = pack_bf16(value[2], value[3]);
                }
                __syncwarp();
                const int column = channel / 2 + part * CHUNKS * 8;
#pragma unroll
                for (int i = 0; i < (CHUNKS + 1) / 2; i++) {
                    const int down = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
                    if (down < 16 && row + down < rows && column + chunk * 8 < width)
                        *reinterpret_cast<uint4*>(out + (row + down) * i64(stride_out) + column + chunk * 8) =
                            *reinterpret_cast<uint4*>(laid + down * PITCH + chunk * 16);
                }
            }
        }
    }
    sync_cluster_relaxed();  // no CTA exits while the other may still write to its shared memory
}
