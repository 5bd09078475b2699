// Weight-streaming GEMM: out[rows, N] = x[rows, K] weight[N, K]^T for up to some hundred rows. TMA streams the weight,
// which is the M side of wgmma, so that few rows waste nothing.
//
// A CTA computes TILE channels of ROWS rows over its part of K; where there are more rows, CTAs that share a tile are
// neighbours, and all but the first find it in L2. One producer warp copies, TILE / 64 (at most 2) warpgroups multiply.
// The first weights are in flight before the previous kernel has ended (programmatic dependent launch). In the epilogue
// the sums go to shared memory, where the SPLITS CTAs that share a tile (a cluster; split-K) read each other's and finish
// some rows each: in a fixed order, without scratch memory.
//
// ROWS     of a CTA, a multiple of 16            FP8    e4m3 with scales of channels and rows, else bfloat16
// TILE     channels of a CTA: 64, 128, 256       GATED  SwiGLU epilogue: a tile has TILE / 2 channels of gate and of up
// STAGES   steps of 128 bytes of K in flight     ADD    residual epilogue: out is added to
// SPLITS   CTAs along K                          WIDE   out is float32, else bfloat16
// APPLIES_NORM  x has a deferred RMSNorm: it is not yet divided by its root mean square, and row_scales [slots, rows] are
//               sums of its squares
// DEFERS_NORM   (with ADD) defers the RMSNorm of out to the GEMM that reads it: deferred = out * gain, and its squares
// LORA          (bfloat16, one CTA along the rows) tokens have LoRA adapters; the channels of a tile are of one module
#include "adapters.cuh"
#include "cluster.cuh"
#include "common.cuh"
#include "deferred_norm.cuh"
#include "wgmma.cuh"

constexpr int GROUPS = TILE == 64 ? 1 : 2;        // warpgroups that multiply
constexpr int BLOCKS = TILE / 64 / GROUPS;        // of 64 channels, per warpgroup
constexpr int THREADS = GROUPS * 128;             // that multiply; one copies, but registers are moved by warpgroups
constexpr bool CROWDED = BLOCKS * ROWS > 256;     // more accumulators than registers, unless the producer gives its own
// Threads that neither copy nor multiply: those that sum squares, those that add adapters.
constexpr int NORM_HELPERS = !APPLIES_NORM ? 0 : LORA ? 32 : 96, HELPERS = NORM_HELPERS + (LORA ? ADAPTER_HELPERS : 0);
constexpr int COPIERS = LORA ? 32 + HELPERS : CROWDED || HELPERS ? 128 : 32;
static_assert(!(LORA && CROWDED), "registers are moved by warpgroups");
constexpr int WEIGHT_BYTES = TILE * 128;
constexpr int STAGE_BYTES = WEIGHT_BYTES + ROWS * 128;
constexpr int LAG = TILE < 256;                   // steps being multiplied while the next is issued
constexpr int DEPTH = FP8 ? 128 : 64;             // of K in a step
constexpr bool FACTORS = FP8 || APPLIES_NORM;     // each row is multiplied by one
constexpr bool GATES_FIRST = GATED && SPLITS == 1;
constexpr int PITCH = (GATES_FIRST ? TILE / 2 : TILE) + 4;  // of the sums: neither stores nor loads collide in banks
constexpr int SUMS_BYTES = ROWS * PITCH * 4;
constexpr int RING_BYTES = STAGES * STAGE_BYTES > SUMS_BYTES ? STAGES * STAGE_BYTES : SUMS_BYTES;
constexpr int WIDTH = GATED ? TILE / 2 : TILE;    // columns of out
constexpr int QUADS = WIDTH / 4;
constexpr int ITEMS = ((ROWS + SPLITS - 1) / SPLITS * QUADS + THREADS - 1) / THREADS;
constexpr int BATCH = ITEMS < 4 ? ITEMS : 4;

DEVICE void copy_weight(unsigned char* to, const TensorMap* map, int step, int tile, u64* barrier) {
    // Gated: 8 channels of the gate interleaved with the same 8 of up, so that a thread gets both values of a channel.
    if (GATED)
        copy_box(to, map, step * DEPTH, 0, 0, tile * (TILE / 16), barrier, EVICT_FIRST);
    else
        copy_box(to, map, step * DEPTH, tile * TILE, barrier, EVICT_FIRST);
}

// Other CTAs of the cluster read this one's shared memory until then.
DEVICE void leave() {
    __syncwarp();
    if (SPLITS > 1) sync_cluster_relaxed();
}

DEVICE float4 sum_over_ctas(const float* sums) {
    float4 parts[SPLITS];
#pragma unroll
    for (int block = 0; block < SPLITS; block++)
        parts[block] = SPLITS > 1 ? load_from_cta(sums, block) : *reinterpret_cast<const float4*>(sums);
    float4 total = parts[0];
#pragma unroll
    for (int block = 1; block < SPLITS; block++) {
        total.x += parts[block].x;
        total.y += parts[block].y;
        total.z += parts[block].z;
        total.w += parts[block].w;
    }
    return total;
}

// Epilogue: which four channels of which row are an item of a thread.
struct Place {
    int row, local, column;
    DEVICE Place(u32 item, int tile, int split)
        : row(item / QUADS * SPLITS + split), local(item % QUADS * 4), column(tile * WIDTH + local) {}
};

// Epilogue with ADD: loads the residual for the items of a thread.
DEVICE void load_before(uint2 (&before)[BATCH], const void* out, int begin, int tile, int split, int rows, int width, int stride) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        const Place at(begin + i * THREADS, tile, split);
        if (ADD && at.row < rows && at.column < width)
            before[i] = *reinterpret_cast<const uint2*>(static_cast<const bf16*>(out) + at.row * i64(stride) + at.column);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + COPIERS, 1)
gemm(const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap x_map, void* out,
     const float* __restrict__ channel_scales, const float* row_scales, const bf16* __restrict__ gain, bf16* deferred,
     float* squares, const __grid_constant__ Adapters adapters, int all_rows, int row_blocks, int width, int steps,
     int stride_out, int slots, float per_channel, float eps) {
    SHARED_MEMORY(ring);
    u64* full = reinterpret_cast<u64*>(ring + RING_BYTES);
    u64* empty = full + STAGES;
    float* factors = reinterpret_cast<float*>(empty + STAGES);  // of the rows
    const SharedAdapters shared_adapters(reinterpret_cast<unsigned char*>(factors + ROWS), adapters, ROWS, TILE, GATED ? 2 : 1);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tile = blockIdx.x / SPLITS / row_blocks, split = blockIdx.x % SPLITS;
    const int first_row = blockIdx.x / SPLITS % row_blocks * ROWS;
    const int rows = all_rows - first_row < ROWS ? all_rows - first_row : ROWS;
    out = static_cast<unsigned char*>(out) + i64(first_row) * stride_out * (WIDE ? 4 : 2);
    row_scales += first_row, squares += first_row;
    deferred += i64(first_row) * width;
    const int first = steps * split / SPLITS, count = steps * (split + 1) / SPLITS - first;
    const int ahead = count < STAGES ? count : STAGES;
    const bool copies = threadIdx.x == THREADS;
    const int helper = static_cast<int>(threadIdx.x) - THREADS - 32;
    const Listed listed(adapters, LORA ? helper - NORM_HELPERS : -1);

    if (copies) {
        for (int stage = 0; stage < STAGES; stage++) {
            init_barrier(&full[stage], 1);
            init_barrier(&empty[stage], GROUPS);
        }
        publish_barriers();
        fence_async_proxy();
        for (int i = 0; i < ahead; i++) {
            arrive_expecting(&full[i], STAGE_BYTES);
            copy_weight(ring + i * STAGE_BYTES, &weight_map, first + i, tile, &full[i]);
        }
        prefetch_map(&x_map);
        if (ahead == count) let_next_start();
    }
    __syncwarp();
    if (SPLITS > 1)
        sync_cluster_relaxed();
    else
        __syncthreads();

    if (warp >= GROUPS * 4) {
        if (CROWDED) give_registers<40>();
        if (copies) {
            wait_for_previous();
            for (int i = 0; i < ahead; i++)
                copy_box(ring + i * STAGE_BYTES + WEIGHT_BYTES, &x_map, (first + i) * DEPTH, first_row, &full[i], EVICT_LAST);
            int stage = 0;
            u32 parity = 0;
            for (int i = ahead; i < count; i++) {
                await(&empty[stage], parity);
                arrive_expecting(&full[stage], STAGE_BYTES);
                copy_weight(ring + stage * STAGE_BYTES, &weight_map, first + i, tile, &full[stage]);
                copy_box(ring + stage * STAGE_BYTES + WEIGHT_BYTES, &x_map, (first + i) * DEPTH, first_row, &full[stage], EVICT_LAST);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            let_next_start();  // the next kernel's weights follow ours: earlier they would compete
        }
        __syncwarp();
        if (HELPERS && helper >= 0) {
            if (helper < NORM_HELPERS) wait_for_previous();
            for (int row = helper; row < rows && helper < NORM_HELPERS; row += NORM_HELPERS)
                factors[row] = inverse_root(row_scales + row, all_rows, slots, per_channel, eps);
            if constexpr (LORA) {
                const Channels<TILE, GATED> channels{tile * WIDTH, width};
                const int module = GATED ? 0 : (tile * TILE >= adapters.second) + (tile * TILE >= adapters.third);
                if (helper >= NORM_HELPERS)
                    add_adapters<TILE, GATED, SPLITS>(shared_adapters, adapters, listed, channels, module, split, helper - NORM_HELPERS);
            }
            sync_threads(1, THREADS + HELPERS);
        }
        if (SPLITS > 1) sync_cluster();
        leave();
    } else {
        if (CROWDED) take_registers<232>();
        const int group = warp / 4;
        float sums[BLOCKS][ROWS / 2];
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) sums[block][i] = 0.0f;
        wait_for_previous();  // for what these threads read themselves
        for (int row = threadIdx.x; FP8 && row < rows; row += THREADS) factors[row] = row_scales[row];
        const u32 base = shared_address(ring);
        int stage = 0, previous = 0;
        u32 parity = 0;
        for (int i = 0; i < count; i++) {
            await(&full[stage], parity);
            const u32 weight = base + stage * STAGE_BYTES + group * (BLOCKS * 8192);
            const u32 x = base + stage * STAGE_BYTES + WEIGHT_BYTES;
            begin_wgmma();
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int block = 0; block < BLOCKS; block++)
                    wgmma(sums[block], swizzled_tile(weight + block * 8192 + k * 32), swizzled_tile(x + k * 32));
            commit_wgmma();
            await_wgmma<LAG>();
            if (LAG == 0) previous = stage;
            if (i >= LAG && threadIdx.x % 128 == 0) arrive(&empty[previous]);
            previous = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        await_wgmma<0>();
        sync_threads(1, THREADS + HELPERS);  // the ring has been read, what helpers compute is there

        float* laid = reinterpret_cast<float*>(ring);  // [ROWS, PITCH]
        uint2 before[BATCH];
        load_before(before, out, threadIdx.x, tile, split, rows, width, stride_out);
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            const int sixteen = (group * BLOCKS + block) * 4 + warp % 4;
            const int channel = (GATED ? sixteen * 8 : sixteen * 16) + lane / 4, second = GATED ? TILE / 2 : 8;
            const int column = tile * WIDTH + channel, second_column = column + (GATED ? width : 8);
            const float scale = FP8 && column < width ? channel_scales[column] : 1.0f;
            const float second_scale = FP8 && (GATED ? column : second_column) < width ? channel_scales[second_column] : 1.0f;
            float* at = laid + lane % 4 * 2 * PITCH + channel;
#pragma unroll
            for (int i = 0; i < ROWS / 8; i++) {
                float* sum = &sums[block][i * 4];
                if (LORA) {
                    const float* more = shared_adapters.added + (i * 8 + lane % 4 * 2) * (TILE + 4) + channel;
                    sum[0] += more[0], sum[1] += more[TILE + 4];
                    sum[2] += more[second], sum[3] += more[TILE + 4 + second];
                }
                if (FACTORS) {
                    const float2 factor = *reinterpret_cast<const float2*>(factors + i * 8 + lane % 4 * 2);
                    sum[0] *= scale * factor.x, sum[1] *= scale * factor.y;
                    sum[2] *= second_scale * factor.x, sum[3] *= second_scale * factor.y;
                }
                if (GATES_FIRST) {
                    at[i * 8 * PITCH] = silu_times(sum[0], sum[2]);
                    at[i * 8 * PITCH + PITCH] = silu_times(sum[1], sum[3]);
                } else {
                    at[i * 8 * PITCH] = sum[0];
                    at[i * 8 * PITCH + PITCH] = sum[1];
                    at[i * 8 * PITCH + second] = sum[2];
                    at[i * 8 * PITCH + PITCH + second] = sum[3];
                }
            }
        }
        if (SPLITS > 1)
            sync_cluster();
        else
            sync_threads(1, THREADS);

#pragma unroll 1
        for (int begin = threadIdx.x; begin < ITEMS * THREADS; begin += BATCH * THREADS) {
            if (begin >= BATCH * THREADS) load_before(before, out, begin, tile, split, rows, width, stride_out);
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const Place at(begin + i * THREADS, tile, split);
                const bool real = at.row < rows && at.column < width;
                float square = 0.0f;
                if (real) {
                    float4 value = sum_over_ctas(laid + at.row * PITCH + at.local);
                    if (GATED && !GATES_FIRST) {
                        const float4 up = sum_over_ctas(laid + at.row * PITCH + WIDTH + at.local);
                        value = {silu_times(value.x, up.x), silu_times(value.y, up.y), silu_times(value.z, up.z),
                                 silu_times(value.w, up.w)};
                    }
                    if (ADD) {
                        value.x += low_bf16(before[i].x), value.y += high_bf16(before[i].x);
                        value.z += low_bf16(before[i].y), value.w += high_bf16(before[i].y);
                    }
                    const i64 place = at.row * i64(stride_out) + at.column;
                    const uint2 rounded = {pack_bf16(value.x, value.y), pack_bf16(value.z, value.w)};
                    if (WIDE)
                        *reinterpret_cast<float4*>(static_cast<float*>(out) + place) = value;
                    else
                        *reinterpret_cast<uint2*>(static_cast<bf16*>(out) + place) = rounded;
                    if (DEFERS_NORM) square = defer_norm(deferred + i64(at.row) * width + at.column, rounded, gain + at.column);
                }
                if (DEFERS_NORM) {
                    square = sum_of_slot(square);
                    if (real && lane % SLOT_LANES == 0) squares[at.column / SLOT * all_rows + at.row] = square;
                }
            }
        }
        leave();
    }
}
