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

// Let rows begin a range of keys: they have seen none of it.
static void begin_range(const Workspace& w, int rows, int dim) {
    for (int r = 0; r < rows; r++) {
        w.peak[r] = NOTHING;
        store(w.weight + 16 * r, f32x16{});
    }
    memset(w.sums, 0, size_t(rows) * dim * sizeof(float));
}

// Add what rows have summed over a range to their totals.
static void add_range(const Workspace& w, int rows, int dim) {
    for (int first = 0; first < rows; first += 16) {
        const f32x16 peak = load<f32x16>(w.peak + first), total_peak = load<f32x16>(w.total_peak + first);
        const Factors factors(total_peak, peak);
        alignas(64) float before[16], now[16];
        store(before, factors.before);
        store(now, factors.now);
        store(w.total_peak + first, vmax(peak, total_peak));
        for (int i = 0, r = first; i < 16 && r < rows; i++, r++) {
            const float weight = sum(load<f32x16>(w.weight + 16 * r));
            w.total_weight[r] = w.total_weight[r] * before[i] + weight * now[i];
            add_scaled(w.totals + r * dim, before[i], w.sums + r * dim, now[i], dim);
        }
    }
}

static void attend(const Cache& cache, int kv_head, const AttentionTask& task, const UpcomingKeys& next,
                   const AttentionBuffers& buffers) {
    const int dim = cache.head_dim, group = buffers.heads / cache.kv_heads, rows = task.num_tokens * group;
    const Workspace w(buffers.scratch, dim);
    const KeysAhead ahead(cache, kv_head, task, next);
    int visible[MAX_ROWS][2];
    for (int r = 0; r < rows; r++) {
        const int position = task.first_position + r / group;
        visible[r][0] = task.window > 0 ? position - task.window + 1 : 0;
        visible[r][1] = position + 1 < task.key_end ? position + 1 : task.key_end;
        memcpy(w.queries + r * dim,
               buffers.q + (task.first_token + r / group) * buffers.q_stride + (kv_head * group + r % group) * dim,
               dim * sizeof(float));
        w.total_peak[r] = NOTHING;
        w.total_weight[r] = 0;
    }
    memset(w.totals, 0, size_t(rows) * dim * sizeof(float));
    const bool bytes = cache.format == KV_INT8, whole = task.partial < 0;
    (bytes ? prepare_int8 : prepare_bf16)(w, rows, dim);
    const int oldest = visible[0][0] > 0 ? visible[0][0] / CHUNK * CHUNK : 0;
    for (int begin = task.key_begin, end, number = 0; begin < task.key_end; begin = end, number++) {
        end = range_end(begin) < task.key_end ? range_end(begin) : task.key_end;
        const Range keys{begin > oldest ? begin : oldest, end};
        begin_range(w, rows, dim);
        (bytes ? attend_int8 : attend_bf16)(cache, kv_head, task.table, keys, rows, visible, w, ahead);
        if (whole) add_range(w, rows, dim);
        for (int r = 0; !whole && r < rows; r++) {
            const size_t slot = task.partial + r / group * task.partial_step + number;
            float* to = buffers.partials + (slot * buffers.heads + kv_head * group + r % group) * (dim + 2);
            memcpy(to, w.sums + r * dim, dim * sizeof(float));
            to[dim] = w.peak[r];
            to[dim + 1] = sum(load<f32x16>(w.weight + 16 * r));
        }
    }
    for (int r = 0; whole && r < rows; r++) {
        float* to = buffers.out + (task.first_token + r / group) * buffers.out_stride + (kv_head * group + r % group) * dim;
        const float factor = 1.f / w.total_weight[r];
        for (int d = 0; d < dim; d += 16) store(to + d, load<f32x16>(w.totals + r * dim + d) * factor);
    }
}

// Add up `count` consecutive ranges of one token into its output row.
static void merge_partials(const float* partials, int count, int heads, int head_dim, float* out) {
    const size_t step = size_t(heads) * (head_dim + 2);
    memset(out, 0, size_t(heads) * head_dim * sizeof(float));
    for (int h = 0; h < heads; h++, out += head_dim) {
        float peak = NOTHING, weight = 0;
        for (int i = 0; i < count; i++) {
            const float* next = partials + i * step + size_t(h) * (head_dim + 2);
            const Factors factors(splat(peak), splat(next[head_dim]));
            const float before = factors.before[0], now = factors.now[0];
            peak = next[head_dim] > peak ? next[head_dim] : peak;
            weight = weight * before + next[head_dim + 1] * now;
            add_scaled(out, before, next, now, head_dim);
        }
        for (int d = 0; d < head_dim; d += 16) store(out + d, load<f32x16>(out + d) * (1.f / weight));
    }
}

}  // namespace PENSTOCK_ISA
