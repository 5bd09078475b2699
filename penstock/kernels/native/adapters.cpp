// LoRA adapters in a model: where their factors lie, and how a step computes with them.
#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "model.h"
#include "pack.h"

namespace penstock {

namespace {

constexpr int STAGES = 4;
constexpr int STAGE_MODULES[STAGES] = {3, 1, 2, 1};  // q, k, v; o; gate, up; down

struct ModulePlace {
    int stage, module;
};

ModulePlace place_in_stage(Tensor kind) {
    switch (kind) {
        case Q: return {0, 0};
        case K: return {0, 1};
        case V: return {0, 2};
        case O: return {1, 0};
        case GATE: return {2, 0};
        case UP: return {2, 1};
        case DOWN: return {3, 0};
        default: return {-1, -1};
    }
}

// A row of weights as output `column` of a factor. Scales of zero, which memory begins with, are outputs of zero.
void pack_factor_row(const Factor& to, int column, const float* row, int width) {
    uint8_t* panel = to.panels + column / 16 * to.panel_bytes;
    const int lane = column % 16;
    if (to.format == BF16) {
        for (int k = 0; k < width; k++) {
            const uint16_t value = round_to_bf16(row[k]);
            std::memcpy(panel + k / 2 * 64 + lane * 4 + k % 2 * 2, &value, 2);
        }
        return;
    }
    // Integers that the compiler can take several of at a time: of magnitudes, and of floats whose last bits are units.
    constexpr float UNITS = 12582912.f;  // 1.5 * 2^23
    uint32_t largest = 0;
    for (int k = 0; k < width; k++) largest = std::max(largest, std::bit_cast<uint32_t>(row[k]) & 0x7fffffff);
    const float peak = std::bit_cast<float>(largest), scale = peak / 127.f, inverse = peak > 0 ? 127.f / peak : 0.f;
    int32_t total = 0;
    for (int k = 0; k < width; k += 4) {
        uint8_t four[4] = {};
        for (int i = 0; i < std::min(4, width - k); i++) {
            const int32_t level = std::bit_cast<int32_t>(row[k + i] * inverse + UNITS) - std::bit_cast<int32_t>(UNITS);
            four[i] = uint8_t(level + 128);
            total += level;
        }
        std::memcpy(panel + k / 4 * 64 + lane * 4, four, 4);
    }
    float* levels = reinterpret_cast<float*>(panel + 16 * to.inputs);
    levels[lane] = scale;
    if (to.has_totals) levels[16 + lane] = scale * float(total);
}

}  // namespace

// With modules of at most this rank, which are set one by one.
std::shared_ptr<PackedAdapter> Model::new_adapter(int rank) const {
    const Scheme format = spec_.scheme == INT8 ? INT8 : BF16;
    const int padded = int(round_up(rank, 16)), q_width = spec_.heads * spec_.head_dim;
    const int inputs[STAGES] = {spec_.hidden, q_width, spec_.hidden, spec_.intermediate};
    PackedAdapter made{padded, {}, std::vector<AdapterStage>(size_t(spec_.layers) * STAGES)};
    const auto lay_out = [&](uint8_t* base) {
        size_t used = 0;
        const auto factor = [&](int panels, int k, bool totals) {
            const size_t levels = format == INT8 ? (totals ? 128 : 64) : 0;
            Factor f{format, k, panels, size_t(k) * 16 * (format == INT8 ? 1 : 2) + levels, totals, base + used};
            used += panels * f.panel_bytes;
            return f;
        };
        for (int i = 0; i < spec_.layers; i++) {
            const Matrix* matrices[STAGES] = {&layers_[i].qkv, &layers_[i].o, &layers_[i].gate_up, &layers_[i].down};
            for (int s = 0; s < STAGES; s++) {
                AdapterStage& stage = made.stages[size_t(i) * STAGES + s];
                stage.a = factor(STAGE_MODULES[s] * padded / 16, int(round_up(inputs[s], 4)), true);
                stage.b = factor(int(round_up(matrices[s]->n, 16) / 16), padded, false);
            }
        }
        return used;
    };
    made.memory = Region(lay_out(nullptr));
    lay_out(made.memory.data());
    return std::make_shared<PackedAdapter>(std::move(made));
}

std::string Model::use_adapter(int slot, std::shared_ptr<const PackedAdapter> adapter) {
    if (slot < 0) return "an adapter needs a slot";
    if (slot >= int(adapters_.size())) adapters_.resize(slot + 1);
    adapters_[slot] = std::move(adapter);
    return "";
}

std::string Model::set_adapter(PackedAdapter& adapter, Tensor kind, int layer, const float* a, const float* b,
                               int rank) const {
    if (rank < 1 || rank > adapter.rank) return "the adapter has not been made for this rank";
    const auto [number, module] = place_in_stage(kind);
    if (number < 0 || layer < 0 || layer >= spec_.layers) return "is not a module that adapters may change";
    AdapterStage& stage = adapter.stages[size_t(layer) * STAGES + number];
    const Place place = place_of(kind, layer);
    stage.used = true;
    for (int r = 0; r < rank; r++)
        pack_factor_row(stage.a, module * adapter.rank + r, a + size_t(r) * place.columns, int(place.columns));
    for (int64_t row = 0; row < place.rows; row++) pack_factor_row(stage.b, place.column(row), b + row * rank, rank);
    return "";
}

// Tokens in the order of their adapters, so that those of one are neighbours.
void Model::plan_adapters(const Step& s) {
    adapter_runs_.clear();
    row_adapters_.assign(s.num_tokens, nullptr);
    order_.resize(s.num_sequences);
    for (int i = 0; i < s.num_sequences; i++) order_[i] = i;
    if (!s.adapters) return;
    const auto slot_of = [&](int sequence) { return s.adapters[s.rows[sequence]]; };
    if (std::none_of(order_.begin(), order_.end(), [&](int i) { return slot_of(i) >= 0; })) return;
    std::stable_sort(order_.begin(), order_.end(), [&](int i, int j) { return slot_of(i) < slot_of(j); });
    int token = 0, widest = 0;
    for (const int i : order_) {
        const int slot = slot_of(i), end = token + s.counts[i];
        if (slot >= 0 && !adapter_runs_.empty() && adapter_runs_.back().slot == slot)
            adapter_runs_.back().end = end;
        else if (slot >= 0)
            adapter_runs_.push_back({slot, token, end});
        if (slot >= 0) widest = std::max(widest, adapters_[slot]->rank);
        if (slot >= 0) std::fill(&row_adapters_[token], &row_adapters_[end], adapters_[slot]->stages.data());
        token = end;
    }
    const size_t rows = capacity_, stride = size_t(3) * widest;
    low_stride_ = stride;
    low_f_.resize(std::max(low_f_.size(), rows * stride));
    low_q_.resize(std::max(low_q_.size(), rows * stride));
    low_scale_.resize(std::max(low_scale_.size(), rows * MODULES));
    low_offset_.resize(std::max(low_offset_.size(), rows * MODULES));
    expand_streams_.resize(pool_.size());
}

template <class Work>
void Model::by_adapter(Range rows, int layer, int stage, const Work& work) {
    for (const AdapterRun& run : adapter_runs_) {
        const int begin = std::max(run.begin, rows.begin), end = std::min(run.end, rows.end);
        const AdapterStage& factors = adapters_[run.slot]->stages[size_t(layer) * STAGES + stage];
        if (begin < end && factors.used) work(factors, begin, end - begin);
    }
}

// A x for rows of x that have been prepared, with an adapter's rows at `to` + their number.
void Model::shrink(int layer, int stage, const Activations& x, Scheme scheme, Range rows, int to) {
    by_adapter(rows, layer, stage, [&](const AdapterStage& factors, int begin, int count) {
        kernels_->shrink(factors, x, scheme, to + begin, count, low_rank());
    });
}

// What memory is asked for while a stage's GEMM of so many panels computes: B of the same panels, and evenly A of the
// next stage.
void Model::line_up(Range rows, int layer, int stage, int panels, int thread) {
    std::vector<Expansion::Stream>& streams = expand_streams_[thread];
    streams.clear();
    const auto add = [&](const uint8_t* at, size_t bytes) { streams.push_back({at, bytes, int32_t((bytes + 63) / 64)}); };
    by_adapter(rows, layer, stage, [&](const AdapterStage& factors, int, int) {
        add(factors.b.panels, factors.b.panel_bytes * PANEL / 16);
    });
    const int next = layer * STAGES + stage + 1;
    if (next == spec_.layers * STAGES) return;
    by_adapter(rows, next / STAGES, next % STAGES, [&](const AdapterStage& factors, int, int) {
        add(factors.a.panels, round_up(factors.a.num_panels * factors.a.panel_bytes / panels, 64));
    });
}

// The GEMM of these rows and panels, with what adapters add.
void Model::multiply_adapted(const Matrix& w, const Activations& x, int layer, int stage, Range rows, Range panels,
                             const Output& out, int copies, int thread) {
    const std::vector<Expansion::Stream>& streams = expand_streams_[thread];
    const Expansion expansion{row_adapters_.data(),         layer * STAGES + stage, low_rank().from(copies),
                              stage_modules_[stage].data(), streams.data(),         int(streams.size())};
    Output to = out;
    to.expansion = &expansion;
    kernels_->gemm(w, x.from(copies), rows, panels, to);
}

// Which module of its stage the outputs of each 16 columns belong to.
void Model::lay_out_modules() {
    const int q = spec_.heads * spec_.head_dim, kv = spec_.kv_heads * spec_.head_dim;
    const Layer& layer = layers_[0];
    const Matrix* matrices[STAGES] = {&layer.qkv, &layer.o, &layer.gate_up, &layer.down};
    for (int s = 0; s < STAGES; s++)
        for (int column = 0; column < matrices[s]->n; column += 16)
            stage_modules_[s].push_back(s == 0 ? (column >= q) + (column >= q + kv) : s == 2 ? column / 16 % 2 : 0);
}

}  // namespace penstock
