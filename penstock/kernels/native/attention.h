// Attention over the paged KV cache: the part that all cache formats share.
//
// Rows are (token, head) pairs that share a key/value head.
#pragma once

#include "attention_bf16.h"
#include "attention_int8.h"

namespace PENSTOCK_ISA {

static void write_cache(const Cache& cache, int head, int32_t slot, const float* key, const float* value) {
    const auto write = cache.format == KV_INT8 ? write_int8 : write_bf16;
    write(cache, head, slot / cache.block_size, slot % cache.block_size, key, value);
}

static void attend(const Cache& cache, int kv_head, const AttentionTask& task, const AttentionBuffers& buffers) {
    const int dim = cache.head_dim, group = buffers.heads / cache.kv_heads, rows = task.num_tokens * group;
    const Workspace w(buffers.scratch, dim);
    int visible[MAX_ROWS][2];
    Softmax totals[MAX_ROWS];
    for (int r = 0; r < rows; r++) {
        const int position = task.first_position + r / group;
        visible[r][0] = task.window > 0 ? position - task.window + 1 : 0;
        visible[r][1] = position + 1 < task.key_end ? position + 1 : task.key_end;
        memcpy(w.queries + r * dim,
               buffers.q + (task.first_token + r / group) * buffers.q_stride + (kv_head * group + r % group) * dim,
               dim * sizeof(float));
    }
    const bool bytes = cache.format == KV_INT8;
    (bytes ? prepare_int8 : prepare_bf16)(w, rows, dim);
    const int oldest = visible[0][0] > 0 ? visible[0][0] / CHUNK * CHUNK : 0;
    for (int begin = task.key_begin, end, number = 0; begin < task.key_end; begin = end, number++) {
        end = range_end(begin) < task.key_end ? range_end(begin) : task.key_end;
        for (int r = 0; r < rows; r++) {
            w.peak[r] = NOTHING;
            store(w.weight + 16 * r, f32x16{});
        }
        memset(w.sums, 0, size_t(rows) * dim * sizeof(float));
        (bytes ? attend_int8 : attend_bf16)(cache, kv_head, task.table, {begin > oldest ? begin : oldest, end}, rows,
                                            visible, w);
        for (int r = 0; r < rows; r++) {
            const Softmax mine{w.peak[r], sum(load<f32x16>(w.weight + 16 * r))};
            if (task.partial >= 0) {
                const size_t slot = task.partial + r / group * task.partial_step + number;
                float* to = buffers.partials + (slot * buffers.heads + kv_head * group + r % group) * (dim + 2);
                memcpy(to, w.sums + r * dim, dim * sizeof(float));
                memcpy(to + dim, &mine, sizeof mine);
            } else if (number == 0) {
                memcpy(w.totals + r * dim, w.sums + r * dim, dim * sizeof(float));
                totals[r] = mine;
            } else {
                add_range(w.totals + r * dim, totals[r], w.sums + r * dim, mine, dim);
            }
        }
    }
    for (int r = 0; task.partial < 0 && r < rows; r++) {
        float* to = buffers.out + (task.first_token + r / group) * buffers.out_stride + (kv_head * group + r % group) * dim;
        const float factor = 1.f / totals[r].weight;
        for (int d = 0; d < dim; d += 16) store(to + d, load<f32x16>(w.totals + r * dim + d) * factor);
    }
}

// Add up `count` consecutive ranges of one token into its output row.
static void merge_partials(const float* partials, int count, int heads, int head_dim, float* out) {
    const size_t step = size_t(heads) * (head_dim + 2);
    for (int h = 0; h < heads; h++) {
        const float* part = partials + size_t(h) * (head_dim + 2);
        float* to = out + size_t(h) * head_dim;
        memcpy(to, part, head_dim * sizeof(float));
        Softmax total{part[head_dim], part[head_dim + 1]};
        for (int i = 1; i < count; i++) {
            const float* next = part + i * step;
            add_range(to, total, next, {next[head_dim], next[head_dim + 1]}, head_dim);
        }
        for (int d = 0; d < head_dim; d += 16) store(to + d, load<f32x16>(to + d) * (1.f / total.weight));
    }
}

}  // namespace PENSTOCK_ISA
