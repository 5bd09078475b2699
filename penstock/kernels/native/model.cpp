// A step of the model on all threads: a sequence of phases, each of which hands out items to whoever is free and is over
// when all are done.
#include "model.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <tuple>
#include <utility>

#include "pack.h"

namespace penstock {

namespace {

constexpr int ROW_BLOCK = 240;       // rows whose activations stay in L2 while panels pass
constexpr int STREAMING_ROWS = 16;   // up to here weights are read once, in order
constexpr int RUN_PANELS = 8;        // that a thread then takes at a time, so that kernels may walk them side by side
constexpr int TASK_ROWS = 48;        // (token, head) rows that share one unpacking of keys and values
constexpr float NEAR = 2;            // logits this close to the largest: many times the error of int8
constexpr int OWN_ROWS = 3;          // so few rows each thread norms and quantises for itself: cheaper than a barrier

// By the stage of a layer, from the output projection (-1) on: what makes the operand of its GEMM, and the GEMM.
constexpr Kernel PREPARED_BY[] = {NORM, NORM, QUANTIZE, NORM, QUANTIZE};
constexpr Kernel GEMM_OF[] = {LM_HEAD, QKV, OUT, GATE_UP, DOWN_PROJ};

// Rows of an operand start in different cache sets even where the width is a power of two.
size_t operand_stride(size_t width) {
    const size_t stride = round_up(width, 64);
    return stride % 512 ? stride : stride + 64;
}

// Parts of nearly equal size, larger ones first: whoever takes a small one last has no more than the others.
Range share(int count, int part, int parts) {
    const int size = count / parts, larger = count % parts;
    const int begin = part * size + std::min(part, larger);
    return {begin, begin + size + (part < larger)};
}

// Ranges that so many keys reach into.
int ranges_of(int keys) {
    int count = 0;
    for (int end = 0; end < keys; end = range_end(end)) count++;
    return count;
}

// So many of the keys as make up whole ranges.
int whole_ranges(int keys) {
    int end = 0;
    while (range_end(end) <= keys) end = range_end(end);
    return end;
}

}  // namespace

Model::Model(const ModelSpec& spec, const int32_t* windows, const float* inverse_frequencies, const Kernels& kernels)
    : spec_(spec),
      kernels_(&kernels),
      pool_(spec.threads),
      inverse_frequencies_(inverse_frequencies, inverse_frequencies + spec.head_dim / 2),
      layers_(spec.layers) {
    const size_t phases = size_t(spec.layers) * 10 + 4;  // of a step with many rows
    for (Counters& c : counters_) c = {std::vector<WorkCounter>(phases), std::vector<WorkCounter>(phases * spec.threads)};
    weights_ = Region(lay_out(nullptr));
    lay_out(weights_.data());
    lay_out_modules();
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

Cache Model::cache_of(int layer) const {
    Cache cache{cache_.data(), KVFormat(spec_.kv_format), spec_.block_size, spec_.kv_heads, spec_.head_dim, 0};
    cache.block_bytes = spec_.layers * cache.layer_bytes();
    cache.data += layer * cache.layer_bytes();
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
    for (size_t width : widths) bytes += n * (width * 5 + width / GROUP * 8 + 12) + 7 * 64;
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
        a.middle = reinterpret_cast<float*>(take(n * 4));
        a.groups = reinterpret_cast<GroupLevel*>(take(n * (a.stride / GROUP) * sizeof(GroupLevel)));
    }
}

std::string Model::check(const Step& s) const {
    const auto outside = [](const int32_t* values, int count, int64_t limit) {
        return std::any_of(values, values + count, [&](int32_t v) { return v < 0 || v >= limit; });
    };
    if (s.num_tokens < 1) return "tokens must not be empty";
    if (s.layers < 0 || s.layers > spec_.layers) return "layers must not be more than there are";
    if (outside(s.rows, s.num_sequences, s.num_rows)) return "rows must be rows of the tables";
    if (outside(s.logit_rows, s.num_logits, s.num_tokens)) return "logit_rows must be indices of tokens";
    if (std::any_of(s.runs, s.runs + s.num_runs, [](int32_t length) { return length < 1; }) ||
        std::accumulate(s.runs, s.runs + s.num_runs, int64_t(0)) != s.num_logits)
        return "runs must be positive and make up all logit_rows";
    if (s.sampling && int(s.sampling->rows.size()) != s.num_rows) return "sampling must have a row for each table";
    if (s.targets && std::any_of(s.targets, s.targets + s.num_logits, [&](int32_t t) { return t >= spec_.vocab; }))
        return "targets holds an id outside the vocabulary";
    const auto empty_slot = [&](int32_t slot) { return slot >= int(adapters_.size()) || !adapters_[slot]; };
    int64_t at = 0;
    for (int i = 0; i < s.num_sequences; i++) {
        if (const int32_t slot = s.adapters ? s.adapters[s.rows[i]] : -1; slot >= 0 && empty_slot(slot))
            return "adapters names an empty slot";
        const int64_t count = s.counts[i], context = s.starts[i] + count;
        if (s.starts[i] < 0) return "starts must not be negative";
        if (count < 1 || (at += count) > s.num_tokens) return "counts must be positive and make up all tokens";
        if (context > int64_t(s.table_width) * spec_.block_size) return "a sequence must fit its table";
        for (int64_t t = at - count; t < at; t++) {
            const int32_t token = s.tokens[t] == SAMPLED ? s.last_tokens[s.rows[i]] : s.tokens[t];
            if (outside(&token, 1, spec_.vocab)) return "tokens holds an id outside the vocabulary";
        }
        const int blocks = int((context + spec_.block_size - 1) / spec_.block_size);
        if (outside(s.tables + size_t(s.rows[i]) * s.table_width, blocks, spec_.num_blocks))
            return "tables name unknown blocks";
    }
    return at == s.num_tokens ? "" : "counts must be positive and make up all tokens";
}

void Model::expand(const Step& s) {
    Batch& b = batch_;
    b.first.assign(1, 0);
    b.contexts.clear();
    b.tables.clear();
    b.tokens.resize(s.num_tokens);
    b.positions.resize(s.num_tokens);
    b.slots.resize(s.num_tokens);
    b.last_of.assign(s.num_tokens, -1);
    b.rows.resize(s.num_tokens);
    b.given.resize(s.num_sequences);
    for (int i = 0, token = 0; i < s.num_sequences; token += s.counts[i++]) b.given[i] = token;
    b.moved_to.resize(adapter_runs_.empty() ? 0 : s.num_tokens);
    for (const int i : order_) {
        const int first = b.first.back();
        const int32_t* table = s.tables + size_t(s.rows[i]) * s.table_width;
        for (int t = 0; t < s.counts[i]; t++) {
            const int position = s.starts[i] + t;
            const int32_t token = s.tokens[b.given[i] + t];
            b.tokens[first + t] = token == SAMPLED ? s.last_tokens[s.rows[i]] : token;
            if (!adapter_runs_.empty()) b.moved_to[b.given[i] + t] = first + t;
            b.positions[first + t] = position;
            b.rows[first + t] = s.rows[i];
            b.slots[first + t] = table[position / spec_.block_size] * spec_.block_size + position % spec_.block_size;
        }
        b.first.push_back(first + s.counts[i]);
        b.contexts.push_back(s.starts[i] + s.counts[i]);
        b.tables.push_back(table);
        b.last_of[b.first.back() - 1] = s.rows[i];
    }
}

// How many sequences from the first on, each decoding one token, have the same blocks at the beginning of their tables,
// and how many keys those hold: as many as the first two share, in whole ranges.
std::pair<int, int> Model::shared_run(int first) const {
    const Batch& b = batch_;
    const int sequences = int(b.tables.size());
    const auto common = [&](int other) {
        const int32_t *mine = b.tables[first], *its = b.tables[other];
        const int limit = std::min(b.contexts[first], b.contexts[other]) - 1;  // the newest key is a sequence's own
        int keys = 0;
        while (keys + spec_.block_size <= limit && *mine++ == *its++) keys += spec_.block_size;
        return whole_ranges(keys);
    };
    const auto decodes = [&](int i) { return i < sequences && b.first[i + 1] - b.first[i] == 1; };
    if (has_windows_ || !decodes(first) || !decodes(first + 1)) return {1, 0};
    const int keys = common(first + 1);
    if (!keys) return {1, 0};
    int last = first + 2;
    while (decodes(last) && common(last) >= keys) last++;
    return {last - first, keys};
}

// Add a task or, where its keys have enough ranges, as many as asked for, with a part of its keys each.
void Model::add_task(AttentionTask task, int parts) {
    const int first = ranges_of(task.key_begin), count = ranges_of(task.key_end) - first, end = task.key_end;
    parts = std::min(parts, count);
    if (task.partial >= 0) task.partial += first;  // the slot of range 0 so far
    for (int p = 0; p < parts; p++) {
        const Range mine = share(count, p, parts);
        task.key_end = task.key_begin;
        for (int i = mine.begin; i < mine.end; i++) task.key_end = std::min(range_end(task.key_end), end);
        tasks_.push_back(task);
        task.key_begin = task.key_end;
        task.partial += mine.end - mine.begin;
    }
}

// Divide the step into attention tasks of similar size: tiles of queries, and for few long sequences also ranges of keys.
// Sequences that decode after a shared prefix attend to it in tiles, as the queries of a prompt do (cascade attention).
void Model::plan_attention() {
    const Batch& b = batch_;
    const int sequences = int(b.tables.size());
    tasks_.clear();
    merges_.clear();
    const int tile = std::max(1, TASK_ROWS / (spec_.heads / spec_.kv_heads));
    const int enough = (4 * spec_.threads + spec_.kv_heads - 1) / spec_.kv_heads;  // tasks of each key/value head
    int slots = 0;
    for (int i = 0, run; i < sequences; i += run) {
        const int32_t* table = b.tables[i];
        const int first = b.first[i], count = b.first[i + 1] - first, start = b.contexts[i] - count;
        int shared;
        std::tie(run, shared) = shared_run(i);
        if (count > 1) {
            for (int q = 0; q < count; q += tile) {
                const int n = std::min(tile, count - q);
                tasks_.push_back({table, first + q, n, start + q, 0, start + q + n, 0, -1, 0});
            }
            continue;
        }
        const int longest = *std::max_element(b.contexts.begin() + i, b.contexts.begin() + i + run);
        const int tiles = (run + tile - 1) / tile, wanted = (enough + sequences - 1) / sequences;
        const int ranges = ranges_of(longest), own_parts = std::min(ranges - ranges_of(shared), wanted);
        const bool merged = shared || own_parts > 1;
        for (int q = 0; shared && q < run; q += tile)
            add_task({table, first + q, std::min(tile, run - q), shared, 0, shared, 0, slots + q * ranges, ranges},
                     std::max(1, enough / tiles));
        for (int r = 0; r < run; r++) {
            const int context = b.contexts[i + r];
            const int slot = merged ? slots + r * ranges : -1;
            add_task({b.tables[i + r], first + r, 1, context - 1, shared, context, 0, slot, 0}, own_parts);
            if (merged) merges_.push_back({first + r, slot, ranges_of(context)});
        }
        if (merged) slots += run * ranges;
    }
    std::stable_sort(tasks_.begin(), tasks_.end(), [](const AttentionTask& a, const AttentionTask& b) {
        return int64_t(a.key_end - a.key_begin) * a.num_tokens > int64_t(b.key_end - b.key_begin) * b.num_tokens;
    });
    partials_.resize(size_t(slots) * spec_.heads * (spec_.head_dim + 2));
}

std::string Model::forward(const Step& step) {
    times_.clear();
    if (timed_) began_ = std::chrono::steady_clock::now();
    if (std::string problem = check(step); !problem.empty()) return problem;
    reserve(step);
    plan_adapters(step);
    expand(step);
    plan_attention();
    sampled_runs_.clear();
    for (int i = 0, begin = 0; i < step.num_runs; begin = sampled_runs_[i++].end)
        sampled_runs_.push_back({begin, begin + step.runs[i]});
    peaks_.resize(size_t(step.num_logits) * head_.num_panels());
    row_logits_.resize(size_t(pool_.size()) * spec_.vocab);
    sampling_scratch_.resize(pool_.size());
    Step computed = step;
    logit_rows_.assign(step.logit_rows, step.logit_rows + step.num_logits);
    if (!adapter_runs_.empty())
        for (int32_t& row : logit_rows_) row = batch_.moved_to[row];
    computed.logit_rows = logit_rows_.data();
    logits_stride_ = spec_.vocab;
    if (!step.logits && needs_logits(computed)) {
        logits_stride_ = operand_stride(spec_.vocab);
        const size_t bytes = step.num_logits * logits_stride_ * sizeof(float);
        if (bytes > logits_.size()) logits_ = Region(bytes);
        computed.logits = reinterpret_cast<float*>(logits_.data());
    }
    last_ = computed;
    last_.targets = nullptr;  // not ours, and gone by then
    steps_++;
    mark(0, PLAN, -1);
    pool_.run([&](int thread) { run(computed, thread); });
    return "";
}

double Model::read_seconds(size_t bytes) {
    constexpr size_t RUN = 8;  // sums side by side, so that loads do not wait for additions
    const size_t words = std::min(bytes, weights_.size()) / sizeof(uint64_t) / RUN / pool_.size() * RUN;
    const uint64_t* data = reinterpret_cast<const uint64_t*>(weights_.data());
    std::atomic<uint64_t> total{0};  // used, so that the reads are not left out
    const auto began = std::chrono::steady_clock::now();
    pool_.run([&](int thread) {
        uint64_t sums[RUN] = {};
        for (const uint64_t *at = data + thread * words, *end = at + words; at < end; at += RUN)
            for (size_t i = 0; i < RUN; i++) sums[i] += at[i];
        total += std::accumulate(sums, sums + RUN, uint64_t(0));
    });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

bool Model::needs_logits(const Step& s) const {
    if (s.keeps_logits) return true;
    for (int i = 0; s.sampling && i < s.num_logits; i++)
        if (s.mask(i) || s.target(i) != SAMPLED || s.sampling->rows[batch_.rows[s.logit_rows[i]]].demanding()) return true;
    return false;
}

void Model::Counters::clear(int thread, int threads) {
    for (size_t i = thread; i < done.size(); i += threads) done[i].reset();
    for (size_t i = thread; i < queues.size(); i += threads) queues[i].reset();
}

// `each` items for every one of some units, of which each thread has its share. It takes the items of these first, so that
// what it wrote in the phase before is in its cache, what it reads next is known, and no counter goes to and fro; then those
// of others. work(part, i): item i of a thread's part. A thread that comes late, because the system had given its core to
// someone else, finds phases done and skips them.
template <class Work>
void Model::phase(Progress& at, int units, int each, const Work& work) {
    const int parts = pool_.size(), items = units * each;
    WorkCounter &counter = *at.done++, *queues = std::exchange(at.queues, at.queues + parts);
    if (counter.all_done(items)) return;
    int done = 0;
    for (int p = 0; p < parts; p++) {
        const int part = (at.thread + p) % parts, count = share(units, part, parts).size() * each;
        for (int i; (i = queues[part].take()) < count; done++) work(part, i);
    }
    counter.finish(done, items);
}

template <class Work>
void Model::phase(Progress& at, int items, const Work& work) {
    phase(at, items, 1, [&](int part, int i) { work(share(items, part, pool_.size()).begin + i); });
}

template <class Work>
void Model::by_rows(Progress& at, int rows, const Work& work) {
    const int parts = std::min(rows, 4 * pool_.size());
    phase(at, parts, [&](int i) {
        const Range mine = share(rows, i, parts);
        for (int row = mine.begin; row < mine.end; row++) work(row);
    });
}

void Model::run(const Step& step, int thread) {
    const int tokens = step.num_tokens, q_width = spec_.heads * spec_.head_dim;
    const int layers = step.layers ? step.layers : spec_.layers;
    Counters& counters = counters_[steps_ % 2];
    Progress at{thread, counters.done.data(), counters.queues.data()};
    counters_[(steps_ + 1) % 2].clear(thread, pool_.size());
    by_rows(at, tokens, [&](int token) { embed(token); });
    mark(thread, EMBED, -1);
    for (int i = 0; i < layers; i++) {
        const Layer& layer = layers_[i];
        const Cache cache = cache_of(i);
        multiply(layer.qkv, hidden_, tokens, {STORE, qkv_, qkv_stride_}, at, i, 0,
                 [&](int row, int to) { normalize(layer.input_norm, layer.qkv.scheme, row, to); });
        by_rows(at, tokens * spec_.kv_heads, [&](int item) {
            rotate_and_cache(layer, cache, item / spec_.kv_heads, item % spec_.kv_heads);
        });
        mark(thread, ROPE, i);
        attend(layer, cache, at);
        mark(thread, ATTENTION, i);
        multiply(layer.o, attention_, tokens, {ADD, x_, hidden_stride_}, at, i, 1, [&](int row, int to) {
            copy_row(attention_, row, to, q_width);
            merge_attention(row, to);
            quantize(attention_, to, q_width, 0);
        });
        multiply(layer.gate_up, hidden_, tokens, {SILU_MUL, mlp_.f, mlp_.stride}, at, i, 2,
                 [&](int row, int to) { normalize(layer.post_norm, layer.gate_up.scheme, row, to); });
        multiply(layer.down, mlp_, tokens, {ADD, x_, hidden_stride_}, at, i, 3, [&](int row, int to) {
            copy_row(mlp_, row, to, spec_.intermediate);
            quantize(mlp_, to, spec_.intermediate, spec_.mlp_transform);
        });
    }
    multiply(head_, hidden_, step.num_logits, {PEAKS, step.logits, logits_stride_, peaks_.data()}, at, -1, -1,
             [&](int row, int to) { normalize(final_norm_, head_.scheme, step.logit_rows[row], to); });
    phase(at, int(sampled_runs_.size()), [&](int run) { sample_run(step, sampled_runs_[run], thread); });
    mark(thread, SAMPLING, -1);
}

void Model::sample_run(const Step& step, Range rows, int thread) {
    std::fill(step.sampled + rows.begin, step.sampled + rows.end, SAMPLED);
    const int last_of = batch_.last_of[step.logit_rows[rows.end - 1]];
    for (int row = rows.begin; row < rows.end; row++) {
        int32_t& sampled = step.sampled[row] = choose(step, row, thread);
        if (step.sampling && step.logits) sampled = sample_logits(step, row, sampled, step.mask(row), thread);
        if (last_of >= 0) step.last_tokens[last_of] = std::max(sampled, 0);
        if (row + 1 < rows.end && batch_.tokens[step.logit_rows[row + 1]] != sampled) return;
    }
}

int32_t Model::sample_logits(const Step& step, int row, int32_t argmax, const int32_t* mask, int thread) {
    const int token = step.logit_rows[row];
    const Choice choice{step.logits + row * logits_stride_,
                        peaks_.data() + size_t(row) * head_.num_panels(),
                        argmax,
                        batch_.positions[token] + 1,
                        step.target(row),
                        mask,
                        step.scores + row};
    return sample_row(choice, step.sampling->rows[batch_.rows[token]], thread);
}

std::string Model::resample(int count, const int32_t* rows, const int32_t* const* masks, int32_t* sampled) {
    if (!last_.keeps_logits || !last_.sampling) return "the logits of the last step were not kept";
    if (std::any_of(rows, rows + count, [&](int32_t row) { return row < 0 || row >= last_.num_logits; }))
        return "rows must be logit rows of the last step";
    WorkCounter counter;
    pool_.run([&](int thread) {
        for (int i; (i = counter.take()) < count;) {
            sampled[i] = sample_logits(last_, rows[i], 0, masks[i], thread);
            if (const int row = batch_.last_of[last_.logit_rows[rows[i]]]; row >= 0) last_.last_tokens[row] = sampled[i];
        }
    });
    return "";
}

// The token of a row's largest logit, or NOT_A_NUMBER. Where an output projection in int8 is the embedding, which exists
// in bfloat16 too, logits near the largest are computed again from that. Logits that were not stored are computed once
// more, panel by panel: which tokens count as near depends on neither. Peaks are those of the stored logits in the end.
int Model::choose(const Step& step, int row, int thread) {
    const bool again = spec_.tied && head_.scheme != BF16;
    const int panels = head_.num_panels(), token = step.logit_rows[row];
    float* peaks = peaks_.data() + size_t(row) * panels;
    const float limit = *std::max_element(peaks, peaks + panels) - (again ? NEAR : 0.f);
    float* logits = step.logits ? step.logits + row * logits_stride_ : row_logits_.data() + size_t(thread) * spec_.vocab;
    float *normed = hidden_.f + row * hidden_.stride, best = -INFINITY;
    if (!step.logits) normalize(final_norm_, head_.scheme, token, row);
    if (again) kernels_->rms_norm(x_ + token * hidden_stride_, exact_norm_, spec_.norm_eps, spec_.hidden, normed);
    int chosen = NOT_A_NUMBER;
    for (int panel = 0; panel < panels; panel++) {
        if (peaks[panel] < limit) continue;
        if (!step.logits) kernels_->gemm(head_, hidden_.from(row), {0, 1}, {panel, panel + 1}, {STORE, logits, 0});
        for (int i = panel * PANEL; i < std::min(spec_.vocab, (panel + 1) * PANEL); i++) {
            if (again && logits[i] < limit) continue;
            if (again) logits[i] = kernels_->dot_bf16(normed, embedding_ + size_t(i) * spec_.hidden, spec_.hidden);
            if (logits[i] > best) best = logits[i], chosen = i;
        }
        if (again && step.logits)
            peaks[panel] = *std::max_element(logits + panel * PANEL, logits + std::min(spec_.vocab, (panel + 1) * PANEL));
    }
    return chosen;
}

void Model::embed(int token) {
    const int half = spec_.head_dim / 2;
    float* cos_sin = cos_sin_ + token * round_up(spec_.head_dim, 16);
    const uint16_t* row = embedding_ + size_t(batch_.tokens[token]) * spec_.hidden;
    float* x = x_ + size_t(token) * hidden_stride_;
    for (int i = 0; i < spec_.hidden; i++) x[i] = bf16_value(row[i]);
    for (size_t i = spec_.hidden; i < hidden_stride_; i++) x[i] = 0;  // residuals are added to the padding, too
    for (int i = 0; i < half; i++) {
        const float angle = float(batch_.positions[token]) * inverse_frequencies_[i];
        cos_sin[i] = std::cos(angle) * spec_.rope_magnitude;
        cos_sin[half + i] = std::sin(angle) * spec_.rope_magnitude;
    }
}

// Norm a row of x_ into one of hidden_, and quantise it while it is in L1.
void Model::normalize(const float* weight, Scheme scheme, int row, int to) {
    const float* from = x_ + size_t(row) * hidden_stride_;
    float* normed = hidden_.f + to * hidden_.stride;
    kernels_->rms_norm(from, weight, spec_.norm_eps, spec_.hidden, normed);
    if (spec_.hidden_transform) kernels_->hadamard(normed, spec_.hidden, spec_.hidden_transform);
    kernels_->quantize_row(hidden_, to, spec_.hidden, scheme);
}

void Model::copy_row(const Activations& x, int row, int to, int width) {
    if (row != to) std::copy_n(x.f + row * x.stride, width, x.f + to * x.stride);
}

void Model::quantize(const Activations& x, int row, int width, int transform) {
    if (transform) kernels_->hadamard(x.f + row * x.stride, width, transform);
    kernels_->quantize_row(x, row, width, Scheme(spec_.scheme));
}

// Into how many runs of panels a thread's part of a GEMM is divided. Some may be empty.
int Model::runs_of(const Matrix& w, int rows) const {
    const int panels = (w.num_panels() + pool_.size() - 1) / pool_.size();
    return std::min(panels, rows <= STREAMING_ROWS ? (panels + RUN_PANELS - 1) / RUN_PANELS : 8);
}

// prepare(row, to) makes row `to` of the operand. Many rows are prepared by all threads together; of a few, each thread
// makes copies for itself behind the shared ones, once it has a part of the GEMM. Adapters change this GEMM as that of a
// stage of a layer, unless the stage is negative.
template <class Prepare>
void Model::multiply(const Matrix& w, const Activations& x, int rows, const Output& out, Progress& at, int layer, int stage,
                     const Prepare& prepare) {
    const int thread = at.thread;
    const bool adapted = stage >= 0 && !adapter_runs_.empty();
    const int copies = rows <= OWN_ROWS ? (thread + 1) * rows : 0;
    const auto prepare_rows = [&](Range mine) {
        for (int row = mine.begin; row < mine.end; row++) prepare(row, copies + row);
        if (adapted) shrink(layer, stage, x, w.scheme, mine, copies);
    };
    const int parts = std::min(rows, 4 * pool_.size());
    if (!copies) phase(at, parts, [&](int i) { prepare_rows(share(rows, i, parts)); });
    if (!copies) mark(thread, PREPARED_BY[stage + 1], layer);
    bool prepared = !copies;
    const int own = runs_of(w, rows), runs = own * pool_.size(), blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    int lined_up = -1;  // the block of rows
    phase(at, runs, blocks, [&](int part, int i) {
        if (!prepared) prepare_rows({0, rows});
        prepared = true;
        const int block = i / own;
        const Range mine = share(rows, block, blocks), panels = share(w.num_panels(), part * own + i % own, runs);
        if (adapted && std::exchange(lined_up, block) != block) line_up(mine, layer, stage, w.num_panels(), thread);
        if (adapted)
            multiply_adapted(w, x, layer, stage, mine, panels, out, copies, thread);
        else
            kernels_->gemm(w, x.from(copies), mine, panels, out);
    });
    mark(thread, GEMM_OF[stage + 1], layer);
}

void Model::rotate_and_cache(const Layer& layer, const Cache& cache, int token, int head) {
    const int dim = spec_.head_dim, group = spec_.heads / spec_.kv_heads;
    const float scale = 1.44269504f / std::sqrt(float(dim));  // attention works in powers of two
    // One outlier would take the precision of a key's other values. Spread alike, queries and keys keep their dot products.
    const int spread = spec_.kv_format == KV_INT8 ? dim & -dim : 0;
    const float* cos_sin = cos_sin_ + token * round_up(dim, 16);
    float* q = qkv_ + token * qkv_stride_;
    float* k = q + size_t(spec_.heads + head) * dim;
    const float* v = k + size_t(spec_.kv_heads) * dim;
    for (int h = head * group; h < (head + 1) * group; h++) {
        if (layer.q_norm) kernels_->rms_norm(q + h * dim, layer.q_norm, spec_.norm_eps, dim, q + h * dim);
        kernels_->rotate(q + h * dim, cos_sin, dim, scale);
        if (spread) kernels_->hadamard(q + h * dim, dim, spread);
    }
    if (layer.k_norm) kernels_->rms_norm(k, layer.k_norm, spec_.norm_eps, dim, k);
    kernels_->rotate(k, cos_sin, dim, 1.f);
    if (spread) kernels_->hadamard(k, dim, spread);
    kernels_->write_cache(cache, head, batch_.slots[token], k, v);
}

void Model::attend(const Layer& layer, const Cache& cache, Progress& at) {
    const AttentionBuffers buffers{qkv_,          qkv_stride_,      attention_.f,
                                   attention_.stride, partials_.data(), reinterpret_cast<float*>(scratch_.data()) + at.thread * scratch_stride_,
                                   spec_.heads};
    const int count = int(tasks_.size());
    phase(at, count, spec_.kv_heads, [&](int part, int i) {
        const int own = share(count, part, pool_.size()).size();
        const auto task_of = [&](int i) { return tasks_[part + i % own * pool_.size()]; };  // the longest come first
        AttentionTask task = task_of(i);
        task.window = layer.window;
        UpcomingKeys next;
        if (i + 1 < own * spec_.kv_heads) {
            const AttentionTask following = task_of(i + 1);
            const int oldest = layer.window > 0 ? following.first_position - layer.window + 1 : 0;
            next = {following.table, (i + 1) / own, std::max(following.key_begin, oldest), following.key_end};
        }
        kernels_->attend(cache, i / own, task, next, buffers);
    });
}

// Where the keys of a token were split: put the parts together, into row `to`.
void Model::merge_attention(int token, int to) {
    const auto merge = std::lower_bound(merges_.begin(), merges_.end(), token,
                                        [](const Merge& m, int wanted) { return m.token < wanted; });
    if (merge == merges_.end() || merge->token != token) return;
    kernels_->merge_partials(partials_.data() + size_t(merge->slot) * spec_.heads * (spec_.head_dim + 2), merge->parts,
                             spec_.heads, spec_.head_dim, attention_.f + to * attention_.stride);
}

}  // namespace penstock
