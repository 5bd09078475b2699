// Where weights lie: one region, in the order a step reads them, so that a packed file is this region as it is.
#include <sys/mman.h>

#include <cstring>
#include <new>
#include <utility>

#include "model.h"

namespace penstock {

Region::Region(size_t bytes) : size_(round_up(bytes, size_t(2) << 20)) {
    void* at = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<uint8_t*>(at);
#if defined(MADV_HUGEPAGE)
    madvise(at, size_, MADV_HUGEPAGE);
#endif
}

Region::~Region() {
    if (data_) munmap(data_, size_);
}

Region::Region(Region&& other) noexcept { *this = std::move(other); }

Region& Region::operator=(Region&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

size_t Model::lay_out(uint8_t* base) {
    Cursor cursor{base};
    const ModelSpec& s = spec_;
    const size_t hidden = round_up(s.hidden, 64);
    const auto channels = [&](size_t count) { return s.scheme == INT8 ? cursor.take<float>(count) : nullptr; };
    const size_t kv = size_t(s.kv_heads) * s.head_dim;
    for (Layer& layer : layers_) {
        layer.input_norm = cursor.take<float>(hidden);
        layer.qkv = cursor.matrix(s.scheme, (s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden, s.attention_bias);
        layer.q_norm = s.qk_norm ? cursor.take<float>(s.head_dim) : nullptr;
        layer.k_norm = s.qk_norm ? cursor.take<float>(s.head_dim) : nullptr;
        layer.o = cursor.matrix(s.scheme, s.hidden, s.heads * s.head_dim, s.output_bias);
        layer.post_norm = cursor.take<float>(hidden);
        layer.gate_up = cursor.matrix(s.scheme, 2 * int(round_up(s.intermediate, 16)), s.hidden, s.mlp_bias);
        layer.down = cursor.matrix(s.scheme, s.hidden, s.intermediate, s.mlp_bias);
        layer.qkv_channels = channels(s.hidden);
        layer.key_channels = channels(kv);
        layer.value_channels = channels(kv);
        layer.gate_up_channels = channels(s.hidden);
        layer.down_channels = channels(s.intermediate);
    }
    final_norm_ = cursor.take<float>(hidden);
    exact_norm_ = s.scheme == INT8 ? cursor.take<float>(hidden) : final_norm_;
    head_ = cursor.matrix(s.scheme == INT4 ? INT8 : s.scheme, s.vocab, s.hidden, false);
    embedding_ = cursor.take<uint16_t>(size_t(s.vocab) * s.hidden);
    return cursor.used;
}

Model::Place Model::place_of(Tensor kind, int index) const {
    const ModelSpec& s = spec_;
    const int64_t q = int64_t(s.heads) * s.head_dim, kv = int64_t(s.kv_heads) * s.head_dim;
    const Layer& layer = layers_[index];
    const auto bias = [](int64_t rows, const Matrix& m, int first, bool paired = false) {
        return Place{rows, 1, nullptr, first, paired, m.bias};
    };
    switch (kind) {
        case EMBEDDING: return {s.vocab, s.hidden, nullptr, 0, false, nullptr, embedding_};
        case HEAD: return {s.vocab, s.hidden, &head_};
        case FINAL_NORM: return {s.hidden, 1, nullptr, 0, false, final_norm_};
        case INPUT_NORM: return {s.hidden, 1, nullptr, 0, false, layer.input_norm};
        case POST_NORM: return {s.hidden, 1, nullptr, 0, false, layer.post_norm};
        case Q: return {q, s.hidden, &layer.qkv};
        case K: return {kv, s.hidden, &layer.qkv, int(q)};
        case V: return {kv, s.hidden, &layer.qkv, int(q + kv)};
        case O: return {s.hidden, q, &layer.o};
        case GATE: return {s.intermediate, s.hidden, &layer.gate_up, 0, true};
        case UP: return {s.intermediate, s.hidden, &layer.gate_up, 16, true};
        case DOWN: return {s.hidden, s.intermediate, &layer.down};
        case Q_NORM: return {s.head_dim, 1, nullptr, 0, false, layer.q_norm};
        case K_NORM: return {s.head_dim, 1, nullptr, 0, false, layer.k_norm};
        case Q_BIAS: return bias(q, layer.qkv, 0);
        case K_BIAS: return bias(kv, layer.qkv, int(q));
        case V_BIAS: return bias(kv, layer.qkv, int(q + kv));
        case O_BIAS: return bias(s.hidden, layer.o, 0);
        case GATE_BIAS: return bias(s.intermediate, layer.gate_up, 0, true);
        case UP_BIAS: return bias(s.intermediate, layer.gate_up, 16, true);
        case DOWN_BIAS: return bias(s.hidden, layer.down, 0);
        case EXACT_NORM: return {s.hidden, 1, nullptr, 0, false, exact_norm_};
        case QKV_CHANNELS: return {s.hidden, 1, nullptr, 0, false, layer.qkv_channels};
        case KEY_CHANNELS: return {kv, 1, nullptr, 0, false, layer.key_channels};
        case VALUE_CHANNELS: return {kv, 1, nullptr, 0, false, layer.value_channels};
        case GATE_UP_CHANNELS: return {s.hidden, 1, nullptr, 0, false, layer.gate_up_channels};
        case DOWN_CHANNELS: return {s.intermediate, 1, nullptr, 0, false, layer.down_channels};
    }
    return {-1, -1};
}

std::string Model::set_tensor(Tensor kind, int index, const float* data, int64_t rows, int64_t columns) {
    if (index < 0 || index >= spec_.layers) return "layer " + std::to_string(index) + " does not exist";
    const Place place = place_of(kind, index);
    if (rows != place.rows || columns != place.columns)
        return "has shape [" + std::to_string(rows) + ", " + std::to_string(columns) + "], expected [" +
               std::to_string(place.rows) + ", " + std::to_string(place.columns) + "]";
    if (!place.matrix && !place.floats && !place.table) return "is not part of a model with this configuration";
    if (place.floats) {
        for (int64_t row = 0; row < rows; row++) place.floats[place.column(row)] = data[row];
        return "";
    }
    pool_.run([&](int thread) {
        const int64_t last = rows * (thread + 1) / pool_.size();
        for (int64_t row = rows * thread / pool_.size(); row < last; row++) {
            const float* from = data + row * columns;
            if (place.table)
                for (int64_t i = 0; i < columns; i++) place.table[row * columns + i] = round_to_bf16(from[i]);
            else
                pack_row(*place.matrix, place.column(row), from, int(columns));
        }
    });
    return "";
}

}  // namespace penstock
