// Shared-prefix (cascade) attention: all queries of a decode batch over the prefix that they share, in pieces, with float32
// results of each piece and the base-2 logarithm of their denominators.
#include "attention.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefix(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,
           const __grid_constant__ TensorMap values, float* out, float* lse, const int* table, const int* length,
           int sequences, int heads, int pieces, float scale) {
    SHARED_MEMORY(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const auto place = [=](int piece, int sequence, int head) {
        return (i64(piece) * sequences + sequence) * heads * GROUP + head;
    };
    const auto give_tiles = [&] {
        Producer producer(shared, &queries, &keys, table, 0);
        wait_for_previous();
        const int tokens = *length, key_tiles = (tokens + KEYS - 1) / KEYS, lane = threadIdx.x % 32;
        const int items = (sequences + BLOCK_Q - 1) / BLOCK_Q * heads;
        for (int drawn = blockIdx.x; drawn < items * pieces; drawn += gridDim.x) {
            const int piece = drawn / items, head = drawn % heads, first = drawn % items / heads * BLOCK_Q;
            const int here = min(BLOCK_Q, sequences - first);
            const int from = key_tiles * piece / pieces, to = key_tiles * (piece + 1) / pieces;
            if (from < to)
                producer.give({first, here, tokens, tokens, 0, head, from, to, piece, pieces, 0}, [] {});
            else  // nothing to see
                for (int row = lane; row < here * GROUP; row += 32) {
                    const i64 at = place(piece, first + row / GROUP, head * GROUP + row % GROUP);
                    lse[at] = __int_as_float(0xFF800000);
                    for (int i = 0; i < DIM; i++) out[at * DIM + i] = 0.0f;
                }
        }
        producer.end();
    };
    const auto finish = [&](Consumer& consumer, const Work& work, u32 slot, float (&sum)[64], Softmax& state) {
        complete_totals(state);
        const int lane = threadIdx.x % 32, column = lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = consumer.group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4 + i * 8;
            if (row / GROUP >= work.queries) continue;
            const i64 at = place(work.piece, work.first + row / GROUP, work.head * GROUP + row % GROUP);
            const float inverse = reciprocal_approx(state.total[i]);
            if (column == 0) lse[at] = state.peak[i] * scale + log2_approx(state.total[i]);
            float2* to = reinterpret_cast<float2*>(out + at * DIM + column);
#pragma unroll
            for (int j = 0; j < 16; j++)
                to[j * 4] = make_float2(sum[4 * j + 2 * i] * inverse, sum[4 * j + 2 * i + 1] * inverse);
        }
    };
    attend(shared, &values, table, 0, scale, give_tiles, finish);
}
