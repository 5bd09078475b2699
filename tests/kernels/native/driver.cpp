// Runs steps of small random models through every kernel set, for the address and undefined-behaviour sanitizers.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "model.h"

using namespace penstock;

namespace {

std::mt19937 generator(7);

std::vector<float> noise(size_t n) {
    std::normal_distribution<float> normal(0.f, 0.1f);
    std::vector<float> values(n);
    for (float& v : values) v = normal(generator);
    return values;
}

// Rows that ask for everything, one of them with a token mask, and one that is only scored.
bool sampled_well(Model& model, std::vector<float> logits, int vocab) {
    const std::vector<int32_t> seen = {1, 5, 5, 202}, bias_tokens = {0, 202, 999}, targets = {SAMPLED, SAMPLED, 7};
    const std::vector<float> biases = {1.f, -2.f, 3.f};
    const std::vector<int32_t> bits(7, 0x55555555), rows = {0, 1, 1}, positions = {4, 5, 6};
    const std::vector<const int32_t*> masks = {nullptr, bits.data(), nullptr};
    SamplingRows sampling(2, vocab);
    for (int row = 0; row < 2; row++) {
        const RowParams params{77, row ? 0.7 : 0., 0.8, 0.01, 1.2f, 0.5f, 0.1f, row * 20, 5, 20, 3, 2, 3, 1, 4,
                               bias_tokens.data(), biases.data(), seen.data(), seen.data()};
        sampling.rows[row] = SamplingRow(params, vocab);
    }
    std::vector<int32_t> tokens(3);
    std::vector<Score> scores(3);
    model.sample(sampling, {3, logits.data(), rows.data(), positions.data(), targets.data(), masks.data(), tokens.data(),
                            scores.data()});
    for (int i = 0; i < 3; i++)
        if (tokens[i] < 0 || tokens[i] >= vocab || !(scores[i].logprob <= 0)) return false;
    return tokens[1] % 2 == 0 && tokens[2] == 7;
}

// Two sequences, one of 70 tokens prefilled in two chunks beside one that decodes, then both decode; odd widths leave
// ragged panels.
int run(const Kernels& kernels, Scheme scheme, KVFormat format, int heads, int kv_heads, int threads) {
    const bool int8 = scheme == INT8;
    const int hidden = int8 ? 80 : 84, inner = int8 ? 112 : 100, vocab = 203, dim = 48, block = 16;
    const int transform = int8 ? 16 : 0;  // divides both widths
    const ModelSpec spec{2,      hidden, heads, kv_heads, dim,    inner,     vocab,     1,      1,   1, 1, int8,
                         scheme, block,  12,    threads,  format, transform, transform, 1e-5f, 1.f};
    const int windows[2] = {0, 20};
    const std::vector<float> frequencies(dim / 2, 0.1f);
    Model model(spec, windows, frequencies.data(), kernels);
    const int q = heads * dim, kv = kv_heads * dim;
    const struct { Tensor kind; int rows, columns; } shapes[] = {
        {EMBEDDING, vocab, hidden}, {HEAD, vocab, hidden}, {FINAL_NORM, hidden, 1}, {INPUT_NORM, hidden, 1},
        {POST_NORM, hidden, 1}, {Q, q, hidden}, {K, kv, hidden}, {V, kv, hidden}, {O, hidden, q},
        {GATE, inner, hidden}, {UP, inner, hidden}, {DOWN, hidden, inner}, {Q_NORM, dim, 1}, {K_NORM, dim, 1},
        {Q_BIAS, q, 1}, {K_BIAS, kv, 1}, {V_BIAS, kv, 1}, {O_BIAS, hidden, 1}, {GATE_BIAS, inner, 1},
        {UP_BIAS, inner, 1}, {DOWN_BIAS, hidden, 1}};
    const auto exact = noise(hidden);
    if (int8 && !model.set_tensor(EXACT_NORM, 0, exact.data(), hidden, 1).empty()) return 1;
    for (int layer = 0; layer < 2; layer++)
        for (const auto& s : shapes) {
            const auto values = noise(size_t(s.rows) * s.columns);
            if (!model.set_tensor(s.kind, layer, values.data(), s.rows, s.columns).empty()) return 1;
        }
    // An adapter of every module, and one of some, whose rank is more than a panel.
    for (const auto& [slot, rank] : {std::pair{0, 5}, std::pair{1, 20}}) {
        const std::shared_ptr<PackedAdapter> adapter = model.new_adapter(rank);
        for (const auto& s : shapes)
            if (s.kind >= Q && s.kind <= (slot ? K : DOWN)) {
                const auto a = noise(size_t(rank) * s.columns), b = noise(size_t(s.rows) * rank);
                if (!model.set_adapter(*adapter, s.kind, 1, a.data(), b.data(), rank).empty()) return 7;
            }
        if (!model.use_adapter(slot, adapter).empty()) return 7;
    }
    const std::vector<int32_t> tables = {1, 2, 3, 4, 5, 11, 0, 0, 0, 0};
    const std::vector<int32_t> adapters[3] = {{-1, 0}, {1, 0}, {0, -1}};  // of the sequences, step by step
    const int counts[3] = {37, 33, 1}, firsts[3] = {0, 37, 70};
    for (int step = 0; step < 3; step++) {
        const int count = counts[step], first = firsts[step], tokens = count + 1;
        std::vector<int32_t> ids(tokens), rows = {0, count - 1, count}, last = {0, vocab - 1};
        for (int i = 0; i < count; i++) ids[i] = (first + i) * 7 % vocab;
        ids[count] = SAMPLED;
        const std::vector<int32_t> sequences = {0, 1}, starts = {first, step}, lengths = {count, 1}, runs = {1, 1, 1};
        std::vector<float> logits(rows.size() * vocab);
        std::vector<int32_t> argmax(rows.size());
        const Step call{.num_tokens = tokens,
                        .num_sequences = 2,
                        .num_rows = 2,
                        .table_width = 5,
                        .num_logits = int32_t(rows.size()),
                        .num_runs = int32_t(runs.size()),
                        .tokens = ids.data(),
                        .rows = sequences.data(),
                        .starts = starts.data(),
                        .counts = lengths.data(),
                        .logit_rows = rows.data(),
                        .runs = runs.data(),
                        .tables = tables.data(),
                        .last_tokens = last.data(),
                        .logits = logits.data(),
                        .sampled = argmax.data()};
        if (!model.forward(call).empty()) return 2;
        for (float v : logits)
            if (!std::isfinite(v)) return 3;
        if (!sampled_well(model, logits, vocab)) return 4;
        Step greedy = call;
        greedy.logits = nullptr;
        last = {0, vocab - 1};
        std::vector<int32_t> again(rows.size());
        greedy.sampled = again.data();
        if (!model.forward(greedy).empty()) return 5;
        // Near ties of an int8 head are settled by the embedding, which here is noise of its own.
        if (!int8 && again != argmax) return 6;
        SamplingRows plain(2, vocab);
        Step checked = greedy;
        checked.sampling = &plain;
        checked.keeps_logits = 1;
        if (!model.forward(checked).empty()) return 10;
        std::vector<int32_t> mask((vocab + 31) / 32);
        mask[1] = 1 << 4;
        const std::vector<int32_t> refused = {2, 0};
        const std::vector<const int32_t*> masks = {mask.data(), mask.data()};
        if (!model.resample(2, refused.data(), masks.data(), again.data()).empty()) return 11;
        if (again[0] != 36 || again[1] != 36) return 12;
        for (int layers : {1, 0}) {  // a draft by the first layer, and then all layers
            Step adapted = call;
            adapted.adapters = adapters[step].data();
            adapted.layers = layers;
            last = {0, vocab - 1};
            if (!model.forward(adapted).empty()) return 8;
            for (float v : logits)
                if (!std::isfinite(v)) return 9;
        }
    }
    return 0;
}

}  // namespace

int main() {
    std::vector<const Kernels*> sets = {&portable_kernels};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) sets.push_back(&avx2_kernels);
    if (__builtin_cpu_supports("avx512vnni")) sets.push_back(&avx512vnni_kernels);
    if (&avx512bf16_kernels) sets.push_back(&avx512bf16_kernels);
    if (&amx_kernels) sets.push_back(&amx_kernels);  // emulated
#endif
    for (const Kernels* kernels : sets)
        for (const auto& [scheme, format] : {std::pair{BF16, KV_BF16}, {BF16, KV_INT8}, {INT8, KV_INT8}, {INT4, KV_BF16}})
            for (int threads : {1, 3})
                for (const auto& [heads, kv_heads] : {std::pair{3, 1}, std::pair{5, 5}, std::pair{7, 1}})
                    if (int failure = run(*kernels, scheme, format, heads, kv_heads, threads)) {
                        std::printf("%s scheme %d, cache %d: failure %d\n", kernels->name, scheme, format, failure);
                        return 1;
                    }
    std::puts("clean");
}
