// One call of an encoder. Its sequences are divided into groups of a few hundred tokens, and a thread takes a group through
// all layers by itself: threads never wait for each other, and a group's activations stay in L2. Where there are too few
// sequences for that, all threads go through the layers together, phase by phase, as in model.cpp.
#include "encoder.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace penstock {

namespace {

constexpr int GROUP_ROWS = 160;    // tokens of a group, at most, unless one sequence has more
constexpr int BLOCK_ROWS = 240;    // rows whose activations stay in L2 while panels pass
constexpr int PHASES = 9;          // of a layer

// Rows of an operand start in different cache sets even where the width is a power of two.
size_t operand_stride(size_t width) {
    const size_t stride = round_up(width, 64);
    return stride % 512 ? stride : stride + 64;
}

Range share(int count, int part, int parts) {
    return {int(int64_t(count) * part / parts), int(int64_t(count) * (part + 1) / parts)};
}

}  // namespace

// The threads that take a group through the layers: one alone, or all of them with a counter for each phase.
class Encoder::Team {
  public:
    Team(int thread, int size, WorkCounter* counters) : thread(thread), size(size), counters_(counters) {}

    template <class Work>
    void phase(int items, const Work& work) {
        if (size == 1) {
            for (int i = 0; i < items; i++) work(i);
            return;
        }
        WorkCounter& counter = *counters_++;
        if (counter.all_done(items)) return;
        int done = 0;
        for (int i; (i = counter.take()) < items; done++) work(i);
        counter.finish(done, items);
    }

    template <class Work>
    void by_rows(Range rows, const Work& work) {
        const int count = rows.end - rows.begin, parts = size == 1 ? 1 : std::min(count, 4 * size);
        phase(parts, [&](int i) {
            const Range mine = share(count, i, parts);
            for (int row = mine.begin; row < mine.end; row++) work(rows.begin + row);
        });
    }

    const int thread, size;

  private:
    WorkCounter* counters_;
};

Encoder::Encoder(const EncoderSpec& spec, const Kernels& kernels)
    : spec_(spec),
      kernels_(&kernels),
      pool_(spec.threads),
      layers_(spec.layers),
      counters_(size_t(spec.layers) * PHASES + 2) {
    weights_ = Region(lay_out(nullptr));
    lay_out(weights_.data());
}

size_t Encoder::lay_out(uint8_t* base) {
    Cursor cursor{base};
    const EncoderSpec& s = spec_;
    for (EncoderLayer& layer : layers_) {
        layer.qkv = cursor.matrix(s.scheme, 3 * s.hidden, s.hidden, true);
        layer.attention_out = cursor.matrix(s.scheme, s.hidden, s.hidden, true);
        layer.attention_scale = cursor.take<float>(s.hidden);
        layer.attention_shift = cursor.take<float>(s.hidden);
        layer.intermediate = cursor.matrix(s.scheme, s.intermediate, s.hidden, true);
        layer.output = cursor.matrix(s.scheme, s.hidden, s.intermediate, true);
        layer.output_scale = cursor.take<float>(s.hidden);
        layer.output_shift = cursor.take<float>(s.hidden);
    }
    if (s.labels) {
        dense_ = cursor.matrix(F32, s.hidden, s.hidden, true);
        head_ = cursor.matrix(F32, s.labels, s.hidden, true);
    }
    embedding_scale_ = cursor.take<float>(s.hidden);
    embedding_shift_ = cursor.take<float>(s.hidden);
    types_ = cursor.take<float>(size_t(s.types) * s.hidden);
    positions_ = cursor.take<float>(size_t(s.positions) * s.hidden);
    if (s.scheme == F32)
        words_ = cursor.take<float>(size_t(s.vocab) * s.hidden);
    else
        rounded_words_ = cursor.take<uint16_t>(size_t(s.vocab) * s.hidden);
    return cursor.used;
}

// The shape a tensor must have and where it goes: rows of a matrix, or floats.
struct Encoder::Place {
    int64_t rows, columns;
    Matrix* matrix = nullptr;
    int first = 0;  // output column of the first row
    float* floats = nullptr;
    uint16_t* rounded = nullptr;
};

Encoder::Place Encoder::place_of(EncoderTensor kind, int index) {
    const EncoderSpec& s = spec_;
    const int64_t hidden = s.hidden, inner = s.intermediate, labels = s.labels;
    EncoderLayer& layer = layers_[index];
    const auto weight = [](Matrix& m, int64_t rows, int first = 0) { return Place{rows, m.k, &m, first}; };
    const auto bias = [](Matrix& m, int64_t rows, int64_t first = 0) {
        return Place{rows, 1, nullptr, 0, m.bias ? m.bias + first : nullptr};
    };
    const auto floats = [](int64_t rows, int64_t columns, float* to) { return Place{rows, columns, nullptr, 0, to}; };
    switch (kind) {
        case WORDS: return {s.vocab, hidden, nullptr, 0, words_, rounded_words_};
        case POSITIONS: return floats(s.positions, hidden, positions_);
        case TYPES: return floats(s.types, hidden, types_);
        case EMBEDDING_SCALE: return floats(hidden, 1, embedding_scale_);
        case EMBEDDING_SHIFT: return floats(hidden, 1, embedding_shift_);
        case QUERY: return weight(layer.qkv, hidden);
        case QUERY_BIAS: return bias(layer.qkv, hidden);
        case KEY: return weight(layer.qkv, hidden, s.hidden);
        case KEY_BIAS: return bias(layer.qkv, hidden, hidden);
        case VALUE: return weight(layer.qkv, hidden, 2 * s.hidden);
        case VALUE_BIAS: return bias(layer.qkv, hidden, 2 * hidden);
        case ATTENTION_OUT: return weight(layer.attention_out, hidden);
        case ATTENTION_OUT_BIAS: return bias(layer.attention_out, hidden);
        case ATTENTION_SCALE: return floats(hidden, 1, layer.attention_scale);
        case ATTENTION_SHIFT: return floats(hidden, 1, layer.attention_shift);
        case INTERMEDIATE: return weight(layer.intermediate, inner);
        case INTERMEDIATE_BIAS: return bias(layer.intermediate, inner);
        case OUTPUT: return weight(layer.output, hidden);
        case OUTPUT_BIAS: return bias(layer.output, hidden);
        case OUTPUT_SCALE: return floats(hidden, 1, layer.output_scale);
        case OUTPUT_SHIFT: return floats(hidden, 1, layer.output_shift);
        case HEAD_DENSE: return labels ? weight(dense_, hidden) : Place{-1, -1};
        case HEAD_DENSE_BIAS: return labels ? bias(dense_, hidden) : Place{-1, -1};
        case HEAD_OUT: return labels ? weight(head_, labels) : Place{-1, -1};
        case HEAD_OUT_BIAS: return labels ? bias(head_, labels) : Place{-1, -1};
    }
    return {-1, -1};
}

std::string Encoder::set_tensor(EncoderTensor kind, int index, const float* data, int64_t rows, int64_t columns) {
    if (index < 0 || index >= spec_.layers) return "layer " + std::to_string(index) + " does not exist";
    const Place place = place_of(kind, index);
    if (rows != place.rows || columns != place.columns)
        return "has shape [" + std::to_string(rows) + ", " + std::to_string(columns) + "], expected [" +
               std::to_string(place.rows) + ", " + std::to_string(place.columns) + "]";
    if (place.floats) std::copy_n(data, rows * columns, place.floats);
    if (place.rounded)
        for (int64_t i = 0; i < rows * columns; i++) place.rounded[i] = round_to_bf16(data[i]);
    if (place.matrix)
        pool_.run([&](int thread) {
            const int64_t last = rows * (thread + 1) / pool_.size();
            for (int64_t row = rows * thread / pool_.size(); row < last; row++)
                pack_row(*place.matrix, place.first + int(row), data + row * columns, int(columns));
        });
    return "";
}

std::string Encoder::check(const EncoderStep& s) const {
    int64_t at = 0;
    for (int i = 0; i < s.num_sequences; i++) {
        if (s.counts[i] < 1) return "counts must be positive";
        if (s.counts[i] > spec_.positions) return "a sequence has more tokens than there are positions";
        at += s.counts[i];
    }
    if (at != s.num_tokens) return "counts must make up all tokens";
    for (int i = 0; i < s.num_tokens; i++)
        if (s.tokens[i] < 0 || s.tokens[i] >= spec_.vocab) return "tokens holds an id outside the vocabulary";
    return "";
}

void Encoder::reserve(const EncoderStep& step) {
    const int longest = step.num_sequences ? *std::max_element(step.counts, step.counts + step.num_sequences) : 0;
    if (longest > longest_) {
        longest_ = longest;
        scratch_stride_ = round_up(kernels_->dense_scratch(longest, spec_.hidden / spec_.heads), 64);
        scratch_ = Region(scratch_stride_ * pool_.size() * sizeof(float));
    }
    if (step.num_tokens <= capacity_) return;
    const size_t n = capacity_ = std::max(step.num_tokens, std::min(2 * capacity_, 8192));
    qkv_stride_ = operand_stride(3 * spec_.hidden);
    Activations* const operands[3] = {&hidden_, &attention_, &inner_};
    const size_t widths[3] = {size_t(spec_.hidden), size_t(spec_.hidden), size_t(spec_.intermediate)};
    const auto lay_out = [&](uint8_t* base) {
        Cursor cursor{base};
        x_ = cursor.take<float>(n * operand_stride(spec_.hidden));
        qkv_ = cursor.take<float>(n * qkv_stride_);
        for (int i = 0; i < 3; i++) {
            Activations& a = *operands[i];
            a = Activations{};
            a.stride = operand_stride(widths[i]);
            a.f = cursor.take<float>(n * a.stride);
            a.q = cursor.take<int8_t>(n * a.stride);
            a.scale = cursor.take<float>(n);
            a.sum = cursor.take<float>(n);
            a.middle = cursor.take<float>(n);
        }
        return cursor.used;
    };
    buffers_ = Region(lay_out(nullptr));
    lay_out(buffers_.data());
}

// Groups of nearly equal size, several rounds of them for each thread where there is much to do.
void Encoder::divide(const EncoderStep& step) {
    const int threads = pool_.size(), rounds = (step.num_tokens + threads * GROUP_ROWS - 1) / (threads * GROUP_ROWS);
    const int target = (step.num_tokens + threads * rounds - 1) / (threads * rounds);
    groups_.clear();
    int largest = 0;
    for (int first = 0, last; first < step.num_sequences; first = last) {
        const int begin = first_[first];
        last = first + 1;
        while (last < step.num_sequences && first_[last + 1] - begin <= target + step.counts[last] / 2) last++;
        groups_.push_back({first, last, {begin, first_[last]}});
        largest = std::max(largest, first_[last] - begin);
    }
    // Alone, the thread with the largest group would work on while the others have nothing left.
    together_ = threads > 1 && int64_t(largest) * threads * 2 > int64_t(step.num_tokens) * 3;
    if (together_) groups_.assign(1, {0, step.num_sequences, {0, step.num_tokens}});
}

std::string Encoder::encode(const EncoderStep& step) {
    if (std::string problem = check(step); !problem.empty()) return problem;
    if (!step.num_sequences) return "";
    reserve(step);
    first_.assign(1, 0);
    sequence_.resize(step.num_tokens);
    for (int i = 0; i < step.num_sequences; i++) {
        std::fill_n(sequence_.begin() + first_.back(), step.counts[i], i);
        first_.push_back(first_.back() + step.counts[i]);
    }
    divide(step);
    next_group_.reset();
    for (WorkCounter& counter : counters_) counter.reset();
    pool_.run([&](int thread) {
        if (together_) {
            Team team(thread, pool_.size(), counters_.data());
            return run(step, groups_[0], team);
        }
        Team alone(thread, 1, nullptr);
        for (int i; (i = next_group_.take()) < int(groups_.size());) run(step, groups_[i], alone);
    });
    return "";
}

void Encoder::run(const EncoderStep& step, const Group& group, Team& team) {
    const Range rows = group.rows;
    const int sequences = group.last - group.first, hidden = spec_.hidden;
    const size_t stride = operand_stride(hidden);
    team.by_rows(rows, [&](int row) {
        embed(step, sequence_[row], row);
        normalize(row, embedding_scale_, embedding_shift_);
    });
    for (const EncoderLayer& layer : layers_) {
        multiply(team, layer.qkv, hidden_, rows, {STORE, qkv_, qkv_stride_});
        team.phase(sequences * spec_.heads, [&](int i) { attend(group.first + i / spec_.heads, i % spec_.heads, team.thread); });
        team.by_rows(rows, [&](int row) { quantize(attention_, row, hidden, 0); });
        multiply(team, layer.attention_out, attention_, rows, {ADD, x_, stride});
        team.by_rows(rows, [&](int row) { normalize(row, layer.attention_scale, layer.attention_shift); });
        multiply(team, layer.intermediate, hidden_, rows, {GELU, inner_.f, inner_.stride});
        team.by_rows(rows, [&](int row) { quantize(inner_, row, spec_.intermediate, spec_.inner); });
        multiply(team, layer.output, inner_, rows, {ADD, x_, stride});
        team.by_rows(rows, [&](int row) { normalize(row, layer.output_scale, layer.output_shift); });
    }
    team.phase(sequences, [&](int i) { pool(step, group.first + i); });
}

void Encoder::multiply(Team& team, const Matrix& w, const Activations& x, Range rows, const Output& out) {
    const int count = rows.end - rows.begin, blocks = (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int runs = team.size == 1 ? 1 : std::min(w.num_panels(), 8 * team.size);
    team.phase(blocks * runs, [&](int i) {
        const Range block = share(count, i / runs, blocks);
        kernels_->gemm(w, x, {rows.begin + block.begin, rows.begin + block.end}, share(w.num_panels(), i % runs, runs), out);
    });
}

void Encoder::embed(const EncoderStep& step, int sequence, int row) {
    const int hidden = spec_.hidden, position = row - first_[sequence];
    const size_t at = size_t(step.tokens[row]) * hidden;
    const float* place = positions_ + size_t(position) * hidden;
    const float* type = types_ + (spec_.types > 1 && position >= step.seconds[sequence] ? hidden : 0);
    float* x = x_ + row * operand_stride(hidden);
    for (int i = 0; i < hidden; i++) x[i] = (words_ ? words_[at + i] : bf16_value(rounded_words_[at + i])) + type[i] + place[i];
}

// LayerNorm a row of x_ in place, and make an operand of it.
void Encoder::normalize(int row, const float* scale, const float* shift) {
    float *x = x_ + row * operand_stride(spec_.hidden), *to = hidden_.f + row * hidden_.stride;
    kernels_->layer_norm(x, scale, shift, spec_.eps, spec_.hidden, x);
    std::copy_n(x, spec_.hidden, to);
    quantize(hidden_, row, spec_.hidden, spec_.transform);
}

void Encoder::quantize(const Activations& x, int row, int width, int transform) {
    if (transform) kernels_->hadamard(x.f + row * x.stride, width, transform);
    kernels_->quantize_row(x, row, width, Scheme(spec_.scheme));
}

void Encoder::attend(int sequence, int head, int thread) {
    const int dim = spec_.hidden / spec_.heads, row = first_[sequence];
    const float* q = qkv_ + row * qkv_stride_ + head * dim;
    kernels_->attend_dense({q, q + spec_.hidden, q + 2 * spec_.hidden, qkv_stride_, first_[sequence + 1] - row, dim,
                            reinterpret_cast<float*>(scratch_.data()) + thread * scratch_stride_,
                            attention_.f + row * attention_.stride + head * dim, attention_.stride});
}

// The vector of a sequence, or what the classification head makes of it. Rows of hidden_ and attention_ are free by now.
void Encoder::pool(const EncoderStep& step, int sequence) {
    const int hidden = spec_.hidden, begin = first_[sequence], end = first_[sequence + 1];
    const size_t stride = operand_stride(hidden);
    float* out = step.out + size_t(sequence) * (spec_.labels ? spec_.labels : hidden);
    float* pooled = spec_.labels ? hidden_.f + begin * hidden_.stride : out;
    if (spec_.pooling == POOL_MEAN) {
        std::fill_n(pooled, hidden, 0.f);
        for (int row = begin; row < end; row++)
            for (int i = 0; i < hidden; i++) pooled[i] += x_[row * stride + i];
        for (int i = 0; i < hidden; i++) pooled[i] /= float(end - begin);
    } else {
        std::copy_n(x_ + (spec_.pooling == POOL_CLS ? begin : end - 1) * stride, hidden, pooled);
    }
    if (!spec_.labels) return;
    float* dense = attention_.f + begin * attention_.stride;
    kernels_->gemm(dense_, hidden_, {begin, begin + 1}, {0, dense_.num_panels()}, {STORE, attention_.f, attention_.stride});
    for (int i = 0; i < hidden; i++) dense[i] = std::tanh(dense[i]);
    kernels_->gemm(head_, attention_.from(begin), {0, 1}, {0, head_.num_panels()}, {STORE, out, size_t(spec_.labels)});
}

}  // namespace penstock
