// The C ABI that native.py loads. Pointers are opaque; every function that can fail returns a message or null.
#include <cstring>
#include <exception>
#include <string>

#include "model.h"
#include "pack.h"

#define PENSTOCK_API extern "C" __attribute__((visibility("default")))

using namespace penstock;

namespace {

// In rising order of preference; the first is always usable.
const Kernels* usable(int index) {
    switch (index) {
        case 0: return &portable_kernels;
#if defined(__x86_64__)
        case 1: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &avx2_kernels : nullptr;
        case 2:
            return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
                       ? &avx512vnni_kernels
                       : nullptr;
#endif
        default: return nullptr;
    }
}

constexpr int LEVELS = 3;

const Kernels* best() {
    const Kernels* found = usable(0);
    for (int i = 1; i < LEVELS; i++)
        if (const Kernels* kernels = usable(i)) found = kernels;
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

PENSTOCK_API const char* penstock_model_forward(Model* model, const Step* step) {
    try {
        return answer(model->forward(*step));
    } catch (const std::exception& e) {
        return answer(e.what());
    }
}

PENSTOCK_API uint8_t* penstock_model_weights(Model* model) { return model->weights(); }
PENSTOCK_API uint64_t penstock_model_weight_bytes(Model* model) { return model->weight_bytes(); }
PENSTOCK_API uint8_t* penstock_model_cache(Model* model) { return reinterpret_cast<uint8_t*>(model->cache()); }
PENSTOCK_API uint64_t penstock_model_block_bytes(Model* model) { return model->block_bytes(); }
