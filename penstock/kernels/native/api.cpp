// The C ABI that bindings.py loads. Pointers are opaque; every function that can fail returns a message or null.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "encoder.h"
#include "model.h"
#include "pack.h"

#define PENSTOCK_API extern "C" __attribute__((visibility("default")))

using namespace penstock;

namespace {

#if defined(__x86_64__)
bool has_avx512vnni() {
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// VNNI on registers of 256 bits, as laptops have it; not all compilers know its name.
bool has_avxvnni() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}

// The CPU has tiles, the system saves them, and lets this process have them.
bool has_amx() {
#if defined(__linux__)
    constexpr unsigned BF16_TILES_INT8 = 1u << 22 | 1u << 24 | 1u << 25, STATE = 1u << 17 | 1u << 18, OSXSAVE = 1u << 27;
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & BF16_TILES_INT8) != BF16_TILES_INT8) return false;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & STATE) == STATE && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}
#endif

// In rising order of speed; the first is always usable.
const Kernels* usable(int index) {
    switch (index) {
        case 0: return &portable_kernels;
#if defined(__x86_64__)
        case 1: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &avx2_kernels : nullptr;
        case 2: return usable(1) && has_avxvnni() ? &avxvnni_kernels : nullptr;
        case 3: return has_avx512vnni() ? &avx512vnni_kernels : nullptr;
        case 4: return has_avx512vnni() && __builtin_cpu_supports("avx512bf16") ? &avx512bf16_kernels : nullptr;
        case 5: return usable(4) && has_amx() ? &amx_kernels : nullptr;
#endif
        default: return nullptr;
    }
}

constexpr int LEVELS = 6;

// On Intel's cores the bfloat16 dot product takes longer than the two fused multiplies it replaces (measured on Emerald
// Rapids: 0.74 times the speed).
bool worth_while(const Kernels* kernels) {
#if defined(__x86_64__)
    return kernels != &avx512bf16_kernels || !__builtin_cpu_is("intel");
#else
    return true;
#endif
}

const Kernels* best() {
    const Kernels* found = usable(0);
    for (int i = 1; i < LEVELS; i++)
        if (const Kernels* kernels = usable(i); kernels && worth_while(kernels)) found = kernels;
    return found;
}

const Kernels* active = best();

thread_local std::string message;

const char* answer(std::string text) {
    message = std::move(text);
    return message.empty() ? nullptr : message.c_str();
}

}  // namespace

PENSTOCK_API const char* penstock_isa() { return active->name; }

// Choose the kernels of models made from now on; false where this CPU or build lacks them.
PENSTOCK_API bool penstock_set_isa(const char* name) {
    for (int i = 0; i < LEVELS; i++) {
        const Kernels* kernels = usable(i);
        if (kernels && std::strcmp(kernels->name, name) == 0) {
            active = kernels;
            return true;
        }
    }
    return false;
}

// In place, on contiguous rows.
PENSTOCK_API void penstock_hadamard(float* rows, int64_t count, int32_t width, int32_t block) {
    for (int64_t i = 0; i < count; i++) active->hadamard(rows + i * width, width, block);
}

// One GEMM by itself, for tests: packs w [n, k], quantises x [rows, k] as a step would, gives y [rows, n].
// Operands begin with a cache line, as a model's do. Returns the shortest of the times, in seconds, that the GEMM
// alone took one thread.
PENSTOCK_API double penstock_matmul(const float* x, const float* w, const float* bias, int32_t scheme, int32_t rows,
                                    int32_t n, int32_t k, int32_t times, float* y) {
    Matrix m{Scheme(scheme), n, k, int32_t(round_up(k, GROUP)), nullptr, nullptr};
    const size_t columns = size_t(m.num_panels()) * PANEL, stride = round_up(k, 64);
    const Region panels(m.num_panels() * m.panel_bytes()), f(rows * stride * sizeof(float)), q(rows * stride);
    std::vector<float> biases(columns), row_scale(rows), sum(rows), middle(rows);
    std::vector<GroupLevel> groups(rows * stride / GROUP);
    m.panels = panels.data();
    m.bias = bias ? biases.data() : nullptr;
    clear(m);
    for (int i = 0; i < n; i++) pack_row(m, i, w + size_t(i) * k, k);
    if (bias) std::copy(bias, bias + n, biases.data());
    const Activations a{reinterpret_cast<float*>(f.data()), reinterpret_cast<int8_t*>(q.data()), row_scale.data(),
                        sum.data(), middle.data(), groups.data(), stride};
    for (int r = 0; r < rows; r++) {
        std::copy(x + size_t(r) * k, x + size_t(r + 1) * k, a.f + r * stride);
        active->quantize_row(a, r, k, Scheme(scheme));
    }
    std::chrono::duration<double> shortest{INFINITY};
    for (int i = 0; i < times; i++) {
        const auto begin = std::chrono::steady_clock::now();
        active->gemm(m, a, {0, rows}, {0, m.num_panels()}, {STORE, y, size_t(n)});
        shortest = std::min<std::chrono::duration<double>>(shortest, std::chrono::steady_clock::now() - begin);
    }
    return shortest.count();
}

// Attention of one sequence by itself, for tests: writes k and v [context, kv_heads, head_dim] to a cache of blocks in
// falling order, lets the last `tokens` positions ask with q [tokens, heads, head_dim], gives out of the same shape.
PENSTOCK_API void penstock_attention(const float* q, const float* k, const float* v, int32_t format, int32_t tokens,
                                     int32_t context, int32_t heads, int32_t kv_heads, int32_t head_dim,
                                     int32_t block_size, int32_t window, float* out) {
    const int blocks = (context + block_size - 1) / block_size, width = heads * head_dim;
    Cache cache{nullptr, KVFormat(format), block_size, kv_heads, head_dim, 0};
    cache.block_bytes = cache.layer_bytes();
    std::vector<uint8_t> bytes(blocks * cache.block_bytes, 0xff);  // a NaN where nothing is written
    cache.data = bytes.data();
    std::vector<int32_t> table(blocks);
    for (int i = 0; i < blocks; i++) table[i] = blocks - 1 - i;
    for (int t = 0; t < context; t++)
        for (int h = 0; h < kv_heads; h++) {
            const size_t at = (size_t(t) * kv_heads + h) * head_dim;
            active->write_cache(cache, h, table[t / block_size] * block_size + t % block_size, k + at, v + at);
        }
    std::vector<float> scratch(active->attention_scratch(head_dim));
    const AttentionBuffers buffers{q, size_t(width), out, size_t(width), nullptr, scratch.data(), heads};
    const int tile = std::max(1, MAX_QUERY_ROWS / (heads / kv_heads));
    for (int first = 0; first < tokens; first += tile) {
        const int count = std::min(tile, tokens - first), position = context - tokens + first;
        for (int h = 0; h < kv_heads; h++)
            active->attend(cache, h, {table.data(), first, count, position, 0, position + count, window, -1}, {}, buffers);
    }
}

PENSTOCK_API Model* penstock_model_new(const ModelSpec* spec, const int32_t* windows, const float* frequencies,
                                       const char** error) {
    try {
        return new Model(*spec, windows, frequencies, *active);
    } catch (const std::exception& e) {
        *error = answer(e.what());
        return nullptr;
    }
}

PENSTOCK_API void penstock_model_free(Model* model) { delete model; }

PENSTOCK_API const char* penstock_model_set(Model* model, int32_t kind, int32_t layer, const float* data, int64_t rows,
                                            int64_t columns) {
    return answer(model->set_tensor(Tensor(kind), layer, data, rows, columns));
}

PENSTOCK_API const float* penstock_model_floats(Model* model, int32_t kind, int32_t layer) {
    return model->floats(Tensor(kind), layer);
}

// An adapter whose modules, set one by one, have at most this rank; null where there is no memory for it.
PENSTOCK_API std::shared_ptr<PackedAdapter>* penstock_adapter_new(const Model* model, int32_t rank) {
    try {
        return new std::shared_ptr<PackedAdapter>(model->new_adapter(rank));
    } catch (const std::exception&) {
        return nullptr;
    }
}

PENSTOCK_API void penstock_adapter_free(std::shared_ptr<PackedAdapter>* adapter) { delete adapter; }

PENSTOCK_API const char* penstock_adapter_set(const Model* model, std::shared_ptr<PackedAdapter>* adapter, int32_t kind,
                                              int32_t layer, const float* a, const float* b, int32_t rank) {
    return answer(model->set_adapter(**adapter, Tensor(kind), layer, a, b, rank));
}

// The slot holds the adapter from now on, until another is used in its place.
PENSTOCK_API const char* penstock_adapter_use(Model* model, int32_t slot, std::shared_ptr<PackedAdapter>* adapter) {
    return answer(model->use_adapter(slot, *adapter));
}

PENSTOCK_API const char* penstock_model_forward(Model* model, const Step* step) {
    try {
        return answer(model->forward(*step));
    } catch (const std::exception& e) {
        return answer(e.what());
    }
}

PENSTOCK_API const char* penstock_model_resample(Model* model, int32_t count, const int32_t* rows,
                                                 const int32_t* const* masks, int32_t* sampled) {
    return answer(model->resample(count, rows, masks, sampled));
}

PENSTOCK_API void penstock_model_hidden_states(Model* model, const int32_t* tokens, int32_t count, float* out) {
    model->hidden_states(tokens, count, out);
}

PENSTOCK_API void penstock_model_set_timed(Model* model, bool timed) { model->set_timed(timed); }
PENSTOCK_API double penstock_model_read_seconds(Model* model, uint64_t bytes) { return model->read_seconds(bytes); }

// Of the last step: valid until the next one.
PENSTOCK_API const KernelTime* penstock_model_times(Model* model, uint64_t* count) {
    *count = model->times().size();
    return model->times().data();
}

PENSTOCK_API SamplingRows* penstock_sampling_new(int32_t rows, int32_t vocab) { return new SamplingRows(rows, vocab); }
PENSTOCK_API void penstock_sampling_free(SamplingRows* sampling) { delete sampling; }

PENSTOCK_API void penstock_sampling_set(SamplingRows* sampling, int32_t row, const RowParams* params) {
    sampling->rows[row] = SamplingRow(*params, sampling->vocab);
}

PENSTOCK_API void penstock_sampling_count(SamplingRows* sampling, int32_t row, const int32_t* tokens, int32_t count) {
    for (int i = 0; i < count; i++) sampling->rows[row].count(tokens[i]);
}

PENSTOCK_API void penstock_model_sample(Model* model, SamplingRows* sampling, const SampleCall* call) {
    model->sample(*sampling, *call);
}

PENSTOCK_API void penstock_model_pin_caller(Model* model) { model->pin_caller(); }
PENSTOCK_API uint8_t* penstock_model_weights(Model* model) { return model->weights(); }
PENSTOCK_API uint64_t penstock_model_weight_bytes(Model* model) { return model->weight_bytes(); }
PENSTOCK_API uint8_t* penstock_model_cache(Model* model) { return model->cache(); }
PENSTOCK_API uint64_t penstock_model_block_bytes(Model* model) { return model->block_bytes(); }

PENSTOCK_API Encoder* penstock_encoder_new(const EncoderSpec* spec, const char** error) {
    try {
        return new Encoder(*spec, *active);
    } catch (const std::exception& e) {
        *error = answer(e.what());
        return nullptr;
    }
}

PENSTOCK_API void penstock_encoder_free(Encoder* encoder) { delete encoder; }

PENSTOCK_API const char* penstock_encoder_set(Encoder* encoder, int32_t kind, int32_t layer, const float* data,
                                              int64_t rows, int64_t columns) {
    return answer(encoder->set_tensor(EncoderTensor(kind), layer, data, rows, columns));
}

PENSTOCK_API const char* penstock_encoder_encode(Encoder* encoder, const EncoderStep* step) {
    try {
        return answer(encoder->encode(*step));
    } catch (const std::exception& e) {
        return answer(e.what());
    }
}

PENSTOCK_API void penstock_encoder_pin_caller(Encoder* encoder) { encoder->pin_caller(); }
PENSTOCK_API uint64_t penstock_encoder_weight_bytes(Encoder* encoder) { return encoder->weight_bytes(); }
