// A step, run by all threads together: each function below is one phase and ends where its caller puts a barrier.
#include "model.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "pack.h"

namespace penstock {

namespace {

constexpr int ROW_BLOCK = 240;       // rows whose activations stay in L2 while panels pass
constexpr int STREAMING_ROWS = 16;   // up to here weights are read once, in order, each thread its own run
constexpr int TASK_ROWS = 48;        // (token, head) rows that share one unpacking of keys and values
constexpr int OWN_ROWS = 3;          // so few rows each thread norms and quantises all for itself: cheaper than to meet
constexpr int MIN_SPLIT_KEYS = 64;   // shorter key ranges are not worth a merge
constexpr int MIN_SHARED_KEYS = 128;  // the same of keys that several sequences read together

// Rows of an operand start in different cache sets even where the width is a power of two.
size_t operand_stride(size_t width) {
    const size_t stride = round_up(width, 64);
    return stride % 512 ? stride : stride + 64;
}

const Best NO_BEST = [] {
    Best best{};
    std::fill(std::begin(best.value), std::end(best.value), -INFINITY);
    return best;
}();

Range share(int count, int thread, int threads) {
    return {int(int64_t(count) * thread / threads), int(int64_t(count) * (thread + 1) / threads)};
}

}  // namespace

Model::Model(const ModelSpec& spec, const int32_t* windows, const float* inverse_frequencies, const Kernels& kernels)
    : spec_(spec),
      kernels_(&kernels),
      pool_(spec.threads),
      inverse_frequencies_(inverse_frequencies, inverse_frequencies + spec.head_dim / 2),
      layers_(spec.layers),
      counters_(size_t(spec.layers) * 5 + 1) {
    weights_ = Region(lay_out(nullptr));
    lay_out(weights_.data());
    for (int i = 0; i < spec.layers; i++) layers_[i].window = windows[i];
    has_windows_ = std::any_of(windows, windows + spec.layers, [](int32_t window) { return window > 0; });
    cache_ = Region(block_bytes() * spec.num_blocks);
    use(kernels);
}

void Model::use(const Kernels& kernels) {
    kernels_ = &kernels;
    scratch_stride_ = round_up(kernels.attention_scratch(spec_.head_dim), 64);
    scratch_ = Region(scratch_stride_ * spec_.threads * sizeof(float));
}

size_t Model::block_bytes() const {
    return size_t(spec_.layers) * spec_.kv_heads * cache_of(0).head_bytes();
}

Cache Model::cache_of(int layer) const {
    Cache cache{cache_.data(), KVFormat(spec_.kv_format), spec_.block_size, spec_.kv_heads, spec_.head_dim};
    cache.data += size_t(layer) * spec_.num_blocks * spec_.kv_heads * cache.head_bytes();
    return cache;
}

void Model::reserve(const Step& step) {
    // Behind the rows that threads share, copies of a few for each.
    const int rows = std::max({step.num_tokens, step.num_logits, OWN_ROWS * (pool_.size() + 1)});
    if (rows <= capacity_) return;
    capacity_ = std::max(rows, std::min(2 * capacity_, 8192));
    const size_t n = capacity_;
    const size_t q_width = size_t(spec_.heads) * spec_.head_dim, kv_width = size_t(spec_.kv_heads) * spec_.head_dim;
    hidden_stride_ = operand_stride(spec_.hidden);
    qkv_stride_ = operand_stride(q_width + 2 * kv_width);
    const size_t widths[3] = {hidden_stride_, operand_stride(q_width), operand_stride(spec_.intermediate)};
    const size_t cos_sin = round_up(spec_.head_dim, 16);

    size_t bytes = n * 4 * (hidden_stride_ + qkv_stride_ + cos_sin);
    for (size_t width : widths) bytes += n * (width * 5 + width / GROUP * 8 + 8) + 6 * 64;
    buffers_ = Region(bytes + 1024);
    uint8_t* at = buffers_.data();
    const auto take = [&](size_t size) { return std::exchange(at, at + round_up(size, 64)); };
    x_ = reinterpret_cast<float*>(take(n * hidden_stride_ * 4));
    qkv_ = reinterpret_cast<float*>(take(n * qkv_stride_ * 4));
    cos_sin_ = reinterpret_cast<float*>(take(n * cos_sin * 4));
    Activations* const operands[3] = {&hidden_, &attention_, &mlp_};
    for (int i = 0; i < 3; i++) {
        Activations& a = *operands[i];
        a.stride = widths[i];
        a.f = reinterpret_cast<float*>(take(n * a.stride * 4));
        a.q = reinterpret_cast<int8_t*>(take(n * a.stride));
        a.scale = reinterpret_cast<float*>(take(n * 4));
        a.sum = reinterpret_cast<float*>(take(n * 4));
        a.group_scale = reinterpret_cast<float*>(take(n * (a.stride / GROUP) * 4));
        a.group_sum = reinterpret_cast<float*>(take(n * (a.stride / GROUP) * 4));
    }
}

std::string Model::check(const Step& s) const {
    const auto outside = [](const int32_t* values, int count, int64_t limit) {
        return std::any_of(values, values + count, [&](int32_t v) { return v < 0 || v >= limit; });
    };
    if (s.num_tokens < 1) return "tokens must not be empty";
    if (outside(s.tokens, s.num_tokens, spec_.vocab)) return "tokens holds an id outside the vocabulary";
    if (outside(s.positions, s.num_tokens, INT32_MAX)) return "positions must not be negative";
    if (outside(s.slots, s.num_tokens, int64_t(spec_.num_blocks) * spec_.block_size)) return "slots lie outside the cache";
    if (outside(s.logit_rows, s.num_logits, s.num_tokens)) return "logit_rows must be indices of tokens";
    if (s.query_starts[0] != 0 || s.query_starts[s.num_sequences] != s.num_tokens)
        return "query_starts must run from 0 to the number of tokens";
    for (int i = 0; i < s.num_sequences; i++) {
        const int count = s.query_starts[i + 1] - s.query_starts[i];
        if (count < 1) return "query_starts must rise";
        if (s.contexts[i] < count || s.contexts[i] > int64_t(s.table_width) * spec_.block_size)
            return "contexts must cover a sequence's own tokens and fit its table";
        const int blocks = (s.contexts[i] + spec_.block_size - 1) / spec_.block_size;
        if (outside(s.tables + size_t(i) * s.table_width, blocks, spec_.num_blocks)) return "tables name unknown blocks";
    }
    return "";
}

// How many sequences from the first on, each decoding one token, have the same blocks at the beginning of their tables,
// and how many keys those hold: as many as the first two share, in whole chunks.
std::pair<int, int> Model::shared_run(const Step& s, int first) const {
    const auto common = [&](int other) {
        const int32_t *a = s.tables + size_t(first) * s.table_width, *b = s.tables + size_t(other) * s.table_width;
        const int limit = std::min(s.contexts[first], s.contexts[other]) - 1;  // the newest key is a sequence's own
        int keys = 0;
        while (keys + spec_.block_size <= limit && *a++ == *b++) keys += spec_.block_size;
        return keys / KEY_CHUNK * KEY_CHUNK;
    };
    const auto decodes = [&](int i) { return i < s.num_sequences && s.query_starts[i + 1] - s.query_starts[i] == 1; };
    if (has_windows_ || !decodes(first) || !decodes(first + 1)) return {1, 0};
    const int keys = common(first + 1);
    if (keys < MIN_SHARED_KEYS) return {1, 0};
    int last = first + 2;
    while (decodes(last) && common(last) >= keys) last++;
    return {last - first, keys};
}

// Cut the step into tasks of similar size: tiles of queries, and for few long sequences also ranges of keys. Sequences
// that decode after the same beginning attend to it in tiles, as the queries of a prompt do.
void Model::plan_attention(const Step& s) {
    tasks_.clear();
    merges_.clear();
    const int tile = std::max(1, TASK_ROWS / (spec_.heads / spec_.kv_heads));
    const int enough = (4 * spec_.threads + spec_.kv_heads - 1) / spec_.kv_heads;  // tasks of each key/value head
    int slots = 0;
    for (int i = 0, run; i < s.num_sequences; i += run) {
        const int32_t* table = s.tables + size_t(i) * s.table_width;
        const int first = s.query_starts[i], count = s.query_starts[i + 1] - first, start = s.contexts[i] - count;
        int shared;
        std::tie(run, shared) = shared_run(s, i);
        if (count > 1) {
            for (int q = 0; q < count; q += tile) {
                const int n = std::min(tile, count - q);
                tasks_.push_back({table, first + q, n, start + q, 0, start + q + n, 0, -1, 0});
            }
            continue;
        }
        const int longest = *std::max_element(s.contexts + i, s.contexts + i + run) - shared;
        const int tiles = (run + tile - 1) / tile, wanted = (enough + s.num_sequences - 1) / s.num_sequences;
        const int shared_parts = shared ? std::clamp(enough / tiles, 1, shared / MIN_SPLIT_KEYS) : 0;
        const int own_parts = std::clamp(longest / MIN_SPLIT_KEYS, 1, wanted), parts = shared_parts + own_parts;
        const auto cut = [&](int begin, int end, int part, int of) {
            const Range chunks = share((end - begin + KEY_CHUNK - 1) / KEY_CHUNK, part, of);
            return Range{begin + chunks.begin * KEY_CHUNK, std::min(begin + chunks.end * KEY_CHUNK, end)};
        };
        for (int p = 0; p < shared_parts; p++) {
            const Range keys = cut(0, shared, p, shared_parts);
            for (int q = 0; q < run; q += tile)
                tasks_.push_back({table, first + q, std::min(tile, run - q), shared, keys.begin, keys.end, 0,
                                  slots + q * parts + p, parts});
        }
        for (int r = 0; r < run; r++, table += s.table_width) {
            for (int p = 0; p < own_parts; p++) {
                const int context = s.contexts[i + r];
                const Range keys = cut(shared, context, p, own_parts);
                tasks_.push_back({table, first + r, 1, context - 1, keys.begin, keys.end, 0,
                                  parts > 1 ? slots + r * parts + shared_parts + p : -1, 0});
            }
            if (parts > 1) merges_.push_back({first + r, parts});
        }
        if (parts > 1) slots += run * parts;
    }
    std::stable_sort(tasks_.begin(), tasks_.end(), [](const AttentionTask& a, const AttentionTask& b) {
        return int64_t(a.key_end - a.key_begin) * a.num_tokens > int64_t(b.key_end - b.key_begin) * b.num_tokens;
    });
    partials_.resize(size_t(slots) * spec_.heads * (spec_.head_dim + 2));
}

std::string Model::forward(const Step& step) {
    if (std::string problem = check(step); !problem.empty()) return problem;
    reserve(step);
    plan_attention(step);
    best_.resize(std::max(best_.size(), size_t(step.num_logits) * pool_.size()));
    for (WorkCounter& counter : counters_) counter.next.store(0, std::memory_order_relaxed);
    pool_.run([&](int thread) { run(step, thread); });
    return "";
}

void Model::run(const Step& step, int thread) {
    const int tokens = step.num_tokens, q_width = spec_.heads * spec_.head_dim;
    int phase = 0;  // of those that hand out work; the same in all threads
    embed(step, thread);
    for (int i = 0; i < spec_.layers; i++) {
        const Layer& layer = layers_[i];
        const Cache cache = cache_of(i);
        pool_.barrier();
        normalize(layer.input_norm, layer.qkv.scheme, nullptr, tokens, thread);
        multiply(layer.qkv, hidden_, tokens, {STORE, qkv_, qkv_stride_}, thread, phase);
        pool_.barrier();
        rotate_and_cache(step, layer, cache, thread);
        pool_.barrier();
        attend(layer, cache, thread, phase);
        pool_.barrier();
        take_rows(attention_, tokens, q_width, thread);
        merge_attention(tokens, thread);
        quantize(attention_, tokens, q_width, 0, thread);
        multiply(layer.o, attention_, tokens, {ADD, x_, hidden_stride_}, thread, phase);
        pool_.barrier();
        normalize(layer.post_norm, layer.gate_up.scheme, nullptr, tokens, thread);
        multiply(layer.gate_up, hidden_, tokens, {SILU_MUL, mlp_.f, mlp_.stride}, thread, phase);
        pool_.barrier();
        take_rows(mlp_, tokens, spec_.intermediate, thread);
        quantize(mlp_, tokens, spec_.intermediate, spec_.mlp_rotation, thread);
        multiply(layer.down, mlp_, tokens, {ADD, x_, hidden_stride_}, thread, phase);
    }
    pool_.barrier();
    normalize(final_norm_, head_.scheme, step.logit_rows, step.num_logits, thread);
    Best* best = best_.data() + size_t(thread) * step.num_logits;
    std::fill(best, best + step.num_logits, NO_BEST);
    multiply(head_, hidden_, step.num_logits, {CHOOSE, step.logits, size_t(spec_.vocab), best}, thread, phase);
    pool_.barrier();
    const Range mine = share(step.num_logits, thread, pool_.size());
    for (int r = mine.begin; r < mine.end; r++)
        step.argmax[r] = kernels_->best_column(best_.data() + r, step.num_logits, pool_.size());
}

void Model::embed(const Step& step, int thread) {
    const int half = spec_.head_dim / 2;
    const size_t width = round_up(spec_.head_dim, 16);
    const Range mine = share(step.num_tokens, thread, pool_.size());
    for (int t = mine.begin; t < mine.end; t++) {
        const uint16_t* row = embedding_ + size_t(step.tokens[t]) * spec_.hidden;
        for (int i = 0; i < spec_.hidden; i++) x_[t * hidden_stride_ + i] = bf16_value(row[i]);
        for (int i = 0; i < half; i++) {
            const float angle = float(step.positions[t]) * inverse_frequencies_[i];
            cos_sin_[t * width + i] = std::cos(angle) * spec_.rope_magnitude;
            cos_sin_[t * width + half + i] = std::sin(angle) * spec_.rope_magnitude;
        }
    }
}

// The operand rows that a thread prepares before a product: a share of those that all read, or copies of its own.
Model::Own Model::own_rows(int count, int thread) const {
    if (count <= OWN_ROWS) return {{0, count}, (thread + 1) * count};
    return {share(count, thread, pool_.size()), 0};
}

// Into the copies, if the thread has its own.
void Model::take_rows(const Activations& x, int count, int width, int thread) {
    const Own own = own_rows(count, thread);
    for (int r = 0; own.offset && r < count; r++)
        std::copy_n(x.f + r * x.stride, width, x.f + (own.offset + r) * x.stride);
}

// Norm rows of x_ (all, or those listed) into hidden_, and quantise them while they are in L1.
void Model::normalize(const float* weight, Scheme scheme, const int32_t* rows, int count, int thread) {
    const Own own = own_rows(count, thread);
    for (int r = own.rows.begin; r < own.rows.end; r++) {
        const float* from = x_ + size_t(rows ? rows[r] : r) * hidden_stride_;
        const int to = own.offset + r;
        kernels_->rms_norm(from, weight, spec_.norm_eps, spec_.hidden, hidden_.f + to * hidden_.stride);
        kernels_->quantize_row(hidden_, to, spec_.hidden, scheme);
    }
}

void Model::quantize(const Activations& x, int count, int width, int rotation, int thread) {
    const Own own = own_rows(count, thread);
    for (int r = own.offset + own.rows.begin; r < own.offset + own.rows.end; r++) {
        if (rotation) kernels_->hadamard(x.f + r * x.stride, width, rotation);
        kernels_->quantize_row(x, r, width, Scheme(spec_.scheme));
    }
}

void Model::multiply(const Matrix& w, const Activations& x, int rows, const Output& out, int thread, int& phase) {
    WorkCounter& counter = counters_[phase++];
    const int offset = own_rows(rows, thread).offset;
    if (!offset) pool_.barrier();  // the operand's rows were prepared by all threads
    if (rows <= STREAMING_ROWS) {
        kernels_->gemm(w, x.from(offset), {0, rows}, share(w.num_panels(), thread, pool_.size()), out);
        return;
    }
    const int blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    const int runs = std::min(w.num_panels(), 8 * pool_.size());
    for (int i; (i = counter.take()) < blocks * runs;)
        kernels_->gemm(w, x, share(rows, i / runs, blocks), share(w.num_panels(), i % runs, runs), out);
}

void Model::rotate_and_cache(const Step& step, const Layer& layer, const Cache& cache, int thread) {
    const int dim = spec_.head_dim;
    const size_t width = round_up(dim, 16);
    const float scale = 1.44269504f / std::sqrt(float(dim));  // attention works in powers of two
    // One outlier would take the precision of a key's other values. Spread alike, queries and keys have the same products.
    const int spread = spec_.kv_format == KV_INT8 ? dim & -dim : 0;
    const int group = spec_.heads / spec_.kv_heads;
    const Range mine = share(step.num_tokens * spec_.kv_heads, thread, pool_.size());
    for (int i = mine.begin; i < mine.end; i++) {
        const int t = i / spec_.kv_heads, head = i % spec_.kv_heads;
        const float* turn = cos_sin_ + t * width;
        float* q = qkv_ + t * qkv_stride_;
        float* k = q + size_t(spec_.heads + head) * dim;
        const float* v = k + size_t(spec_.kv_heads) * dim;
        for (int h = head * group; h < (head + 1) * group; h++) {
            if (layer.q_norm) kernels_->rms_norm(q + h * dim, layer.q_norm, spec_.norm_eps, dim, q + h * dim);
            kernels_->rotate(q + h * dim, turn, dim, scale);
            if (spread) kernels_->hadamard(q + h * dim, dim, spread);
        }
        if (layer.k_norm) kernels_->rms_norm(k, layer.k_norm, spec_.norm_eps, dim, k);
        kernels_->rotate(k, turn, dim, 1.f);
        if (spread) kernels_->hadamard(k, dim, spread);
        kernels_->write_cache(cache, head, step.slots[t], k, v);
    }
}

void Model::attend(const Layer& layer, const Cache& cache, int thread, int& phase) {
    WorkCounter& counter = counters_[phase++];
    const AttentionBuffers buffers{qkv_,          qkv_stride_,      attention_.f,
                                   attention_.stride, partials_.data(), reinterpret_cast<float*>(scratch_.data()) + thread * scratch_stride_,
                                   spec_.heads};
    const int count = int(tasks_.size());
    for (int i; (i = counter.take()) < count * spec_.kv_heads;) {
        AttentionTask task = tasks_[i % count];
        if (layer.window > 0) {
            const int oldest = std::max(0, task.first_position - layer.window + 1) / KEY_CHUNK * KEY_CHUNK;
            task.key_begin = std::max(task.key_begin, oldest);
            task.window = layer.window;
        }
        kernels_->attend(cache, i / count, task, buffers);
    }
}

void Model::merge_attention(int count, int thread) {
    const Own own = own_rows(count, thread);
    size_t slot = 0;
    for (const auto& [token, parts] : merges_) {
        if (token >= own.rows.begin && token < own.rows.end)
            kernels_->merge_partials(partials_.data() + slot * spec_.heads * (spec_.head_dim + 2), parts, spec_.heads,
                                     spec_.head_dim, attention_.f + (own.offset + token) * attention_.stride);
        slot += parts;
    }
}

}  // namespace penstock
