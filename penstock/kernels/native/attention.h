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
    for (int r = 0; r < rows; r++) {
        const int position = task.first_position + r / group;
        const int oldest = task.window > 0 ? position - task.window + 1 : 0;
        visible[r][0] = oldest > task.key_begin ? oldest : task.key_begin;
        visible[r][1] = position + 1 < task.key_end ? position + 1 : task.key_end;
        memcpy(w.queries + r * dim,
               buffers.q + (task.first_token + r / group) * buffers.q_stride + (kv_head * group + r % group) * dim,
               dim * sizeof(float));
        w.peak[r] = NOTHING;
        store(w.weight + 16 * r, f32x16{});
    }
    memset(w.sums, 0, size_t(rows) * dim * sizeof(float));
    if (cache.format == KV_INT8) {
        attend_int8(cache, kv_head, task, rows, visible, w);
    } else {
        attend_bf16(cache, kv_head, task, rows, visible, w);
    }
    for (int r = 0; r < rows; r++) {
        const int h = kv_head * group + r % group;
        const float weight = sum(load<f32x16>(w.weight + 16 * r));
        const bool whole = task.partial < 0;
        float* to = whole ? buffers.out + (task.first_token + r / group) * buffers.out_stride + h * dim
                          : buffers.partials + (size_t(task.partial + r / group * task.partial_step) * buffers.heads + h) * (dim + 2);
        const float factor = whole ? 1.f / weight : 1.f;
        for (int d = 0; d < dim; d += 16) store(to + d, load<f32x16>(w.sums + r * dim + d) * factor);
        if (!whole) {
            to[dim] = w.peak[r];
            to[dim + 1] = weight;
        }
    }
}

// Combine `count` consecutive partial results of one token into its output row.
static void merge_partials(const float* partials, int count, int heads, int head_dim, float* out) {
    const size_t step = size_t(heads) * (head_dim + 2);
    for (int h = 0; h < heads; h++) {
        const float* part = partials + size_t(h) * (head_dim + 2);
        float peak = NOTHING, total = 0;
        for (int i = 0; i < count; i++) peak = part[i * step + head_dim] > peak ? part[i * step + head_dim] : peak;
        float* to = out + size_t(h) * head_dim;
        memset(to, 0, head_dim * sizeof(float));
        for (int i = 0; i < count; i++) {
            const float* p = part + i * step;
            const float factor = exp2(splat(p[head_dim] - peak))[0];
            total += factor * p[head_dim + 1];
            for (int d = 0; d < head_dim; d += 16) store(to + d, load<f32x16>(to + d) + load<f32x16>(p + d) * factor);
        }
        for (int d = 0; d < head_dim; d += 16) store(to + d, load<f32x16>(to + d) / total);
    }
}

}  // namespace PENSTOCK_ISA
