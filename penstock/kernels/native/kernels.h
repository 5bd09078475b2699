// The interface between a model and its kernels; one `Kernels` table exists per instruction set.
//
// Plain data only: this header is compiled both with and without vector flags.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

enum Scheme : int32_t { BF16 = 0, INT8 = 1, INT4 = 2, F32 = 3 };

constexpr int PANEL = 32;  // output columns packed side by side
constexpr int GROUP = 32;  // inputs that share one int4 scale; inputs are padded to a multiple of it

constexpr size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }

// y = W x for W [n, k], stored as panels of 32 outputs so that one thread streams its bytes in order:
//   INT8  k/4 steps of [32 outputs][4 inputs] bytes q in 0..255, where w = scale * (q - zero); then [32 outputs] float
//         scale and [32 outputs] zero | total << 8, total being the sum of q - zero over the inputs
//   INT4  k/32 groups of [32 outputs](scale, minimum) bfloat16 pairs, then 4 x [32 outputs][4 inputs] bytes
//         whose low nibbles are inputs 8j..8j+3 and high nibbles inputs 8j+4..8j+7
//   BF16  k/2 steps of [32 outputs][2 inputs] bfloat16
//   F32   k steps of [32 outputs] float
struct Matrix {
    Scheme scheme;
    int32_t n, k, padded_k;
    uint8_t* panels;
    float* bias;  // per output, padded to whole panels; null when the layer has none
    size_t panel_bytes() const {
        const size_t weights = size_t(PANEL) * padded_k;
        if (scheme == INT8) return weights + 8 * PANEL;
        if (scheme == F32) return weights * 4;
        return scheme == BF16 ? weights * 2 : weights / 2 + weights / GROUP * 4;
    }
    // Scale, zero and total of a panel; they lie behind its weights, where the stream of these has brought them in.
    uint8_t* levels(int panel) const { return panels + panel * panel_bytes() + size_t(PANEL) * padded_k; }
    int num_panels() const { return int(round_up(n, PANEL) / PANEL); }
};

// Of 32 int8 values: their scale, and their sum times this, which multiplies the minimum of int4 weights.
struct GroupLevel {
    float scale, sum;
};

// The left operand: float rows, and the same rows as int8.
struct Activations {
    float* f;            // for BF16 weights bfloat16 in the first half of a row, where there are instructions for it
    int8_t* q;
    float* scale;        // for INT8 weights, as the next two: per row, whose values are scale * q + middle
    float* sum;          // of the row's int8 values, times scale; multiplies the zero of the weights
    float* middle;       // multiplies the total of the weights
    GroupLevel* groups;  // for INT4 weights: [row][stride / 32]
    size_t stride;       // elements per row, a multiple of 64, zero beyond the width

    GroupLevel* groups_of(size_t row) const { return groups + row * (stride / GROUP); }

    Activations from(size_t row) const {
        return {f + row * stride, q + row * stride, scale + row, sum + row,
                middle + row,     groups_of(row),   stride};
    }
};

enum Epilogue : int32_t {
    STORE = 0,     // out = y
    ADD = 1,       // out += y
    SILU_MUL = 2,  // columns 0..15 of a panel are gates, 16..31 ups: out = silu(gate) * up, half as wide
    PEAKS = 3,     // the largest y of each panel goes to `peaks`, and out = y unless data is null
    GELU = 4,      // out = gelu(y), by the error function
};

struct Range {
    int begin, end;
    int size() const { return end - begin; }
};

constexpr int MODULES = 4;  // that a stage of a layer may have, rounded up: query, key and value

// One of the two factors of a LoRA adapter, for all modules of a stage, as panels of 16 outputs, each of one module:
//   INT8  inputs/4 steps of [16 outputs][4 inputs] bytes w / scale + 128, then [16 outputs] float scale and, where x may
//         have a middle, [16 outputs] float sum of the weights
//   BF16  inputs/2 steps of [16 outputs][2 inputs] bfloat16
struct Factor {
    Scheme format;
    int32_t inputs, num_panels;
    size_t panel_bytes;
    bool has_totals;
    uint8_t* panels;
};

// The factors of an adapter for one GEMM of a layer.
struct AdapterStage {
    Factor a{}, b{};
    bool used = false;  // whether it has any of the modules
};

// A x of the rows of a step: `rank` floats for each module of a stage, and the same as int8 with a scale for each module.
struct LowRank {
    float* f;         // [row][stride]
    int8_t* q;        // [row][stride]
    float* scale;     // [row][MODULES]
    int32_t* offset;  // [row][MODULES]: -128 times the sum of the int8 values, for the 128 in the weights
    size_t stride;

    LowRank from(size_t row) const {
        return {f + row * stride, q + row * stride, scale + row * MODULES, offset + row * MODULES, stride};
    }
};

// What LoRA adapters add to the outputs of a GEMM, before its epilogue: B h.
struct Expansion {
    // What memory is asked for while a panel of the GEMM computes: so many cache lines, where they are for its first panel,
    // and the way to the next one's.
    struct Stream {
        const uint8_t* at;
        size_t step;
        int32_t lines;
    };
    const AdapterStage* const* adapters;  // [row]: the stages of its adapter; null: it has none
    int32_t stage;                        // which of them this GEMM is
    LowRank h;
    const uint8_t* modules;  // of each 16 outputs
    const Stream* streams;
    int32_t num_streams;
};

struct Output {
    Epilogue epilogue;
    float* data;
    size_t stride;
    float* peaks = nullptr;                // [row][panel]; PEAKS only
    const Expansion* expansion = nullptr;  // null: no row has an adapter
};

enum KVFormat : int32_t { KV_BF16 = 0, KV_INT8 = 1 };

// Keys and values of one layer. A block of the cache holds those of all layers, so that memory is taken in proportion to
// the blocks in use; of each layer it holds, per key/value head,
//   KV_BF16  K [head_dim/2][block_size][2], V [block_size/2][head_dim][2], bfloat16
//   KV_INT8  K [head_dim/4][block_size][4], V [block_size/4][head_dim][4], bytes holding k + 128 and v, then the
//            bfloat16 scales of the block_size keys and of as many values
// In all of them the vector lanes run over what the dot product does not sum, so attention needs no horizontal sums.
struct Cache {
    uint8_t* data;
    KVFormat format;
    int32_t block_size, kv_heads, head_dim;
    size_t block_bytes;  // of all layers
    size_t plane_bytes() const { return size_t(block_size) * head_dim * (format == KV_BF16 ? 2 : 1); }
    size_t head_bytes() const { return 2 * plane_bytes() + (format == KV_INT8 ? 4 * block_size : 0); }
    size_t layer_bytes() const { return kv_heads * head_bytes(); }
    uint8_t* keys(int32_t block, int head) const { return data + block * block_bytes + head * head_bytes(); }
    uint8_t* values(int32_t block, int head) const { return keys(block, head) + plane_bytes(); }
    uint16_t* key_scales(int32_t block, int head) const {
        return reinterpret_cast<uint16_t*>(values(block, head) + plane_bytes());
    }
    uint16_t* value_scales(int32_t block, int head) const { return key_scales(block, head) + block_size; }
};

constexpr int KEY_CHUNK = 64;       // keys per softmax update
constexpr int KEY_RANGE = 256;      // keys that attention sums up by themselves, at the least
constexpr int MAX_QUERY_ROWS = 64;  // (token, head) rows of one attention task

// Where the range ends that a key is in. The sums of a range start from zero and ranges are added in order, so a result
// does not depend on how they are divided into tasks. They grow with the position: a long text has at least 8 to divide
// and few to add.
constexpr int range_end(int key) {
    int size = KEY_RANGE;
    while (key >= 16 * size) size *= 2;
    return (key / size + 1) * size;
}

// The queries of some consecutive tokens, and the keys one pass over the cache covers. The tokens are of one sequence, or
// one each of sequences with a shared prefix, and then all these keys come before all of them.
struct AttentionTask {
    const int32_t* table;
    int32_t first_token, num_tokens;   // rows of the step
    int32_t first_position;            // of first_token; the others follow
    int32_t key_begin, key_end;        // key_begin is the beginning of a range
    int32_t window;                    // keys visible to a query, 0 for all
    int32_t partial;                   // -1: write the result; else the slot of first_token's sums of the first range
    int32_t partial_step;              // from a token's slot to the next one's
};

// The keys that a thread reads next, after those of a task. Without a table it is not known which.
struct UpcomingKeys {
    const int32_t* table = nullptr;
    int32_t kv_head = 0, begin = 0, end = 0;
};

struct AttentionBuffers {
    const float* q;    // scaled and rotated queries: [token][q_stride], head h at h * head_dim
    size_t q_stride;
    float* out;        // [token][out_stride]
    size_t out_stride;
    float* partials;   // [slot][heads][head_dim + 2]: sums, running maximum, running denominator
    float* scratch;    // of this thread, attention_scratch floats
    int32_t heads;
};

// One head of an encoder: every token attends to all tokens of its sequence. `q`, `k` and `v` point to the head's values of
// the first token; those of the next one are `stride` floats further.
struct DenseAttention {
    const float *q, *k, *v;
    size_t stride;
    int32_t tokens, head_dim;
    float* scratch;  // dense_scratch floats
    float* out;
    size_t out_stride;
};

constexpr int SAMPLING_BLOCK = PANEL;  // logits of which sampling knows the largest; one word of a token mask

struct Masses {
    double above_low, above_high;
};

struct Kernels {
    const char* name;
    void (*gemm)(const Matrix& w, const Activations& x, Range rows, Range panels, const Output& out);
    void (*quantize_row)(const Activations& x, int row, int width, Scheme scheme);
    void (*hadamard)(float* x, int width, int block);
    void (*rms_norm)(const float* x, const float* weight, float eps, int width, float* out);
    void (*rotate)(float* head, const float* cos_sin, int head_dim, float scale);
    void (*write_cache)(const Cache& cache, int head, int32_t slot, const float* key, const float* value);
    size_t (*attention_scratch)(int head_dim);
    void (*attend)(const Cache& cache, int kv_head, const AttentionTask& task, const UpcomingKeys& next,
                   const AttentionBuffers& buffers);
    void (*merge_partials)(const float* partials, int count, int heads, int head_dim, float* out);
    float (*dot_bf16)(const float* x, const uint16_t* w, int width);
    // In lora.h.
    void (*shrink)(const AdapterStage& factors, const Activations& x, Scheme scheme, int row, int count, const LowRank& h);
    // Of encoders, in encoder_ops.h; widths and head sizes are multiples of 16.
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int width, float* out);
    size_t (*dense_scratch)(int tokens, int head_dim);
    void (*attend_dense)(const DenseAttention& head);
    // Of n logits and the largest of each block of them, in sampling.h.
    void (*block_maxima)(const float* logits, int n, float* maxima);
    void (*mask_logits)(float* logits, int n, const int32_t* mask, float* maxima, float margin);
    int (*count_above)(const float* logits, const float* maxima, int n, float limit, int enough);
    Masses (*masses)(const float* logits, const float* maxima, int n, float low, float high, float peak, float scale);
    int32_t (*draw)(const float* logits, const float* maxima, int n, float limit, float temperature, uint64_t seed,
                    uint32_t position);
};

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels __attribute__((weak));  // of these, those the compiler knew
extern const Kernels avxvnni_kernels __attribute__((weak));
extern const Kernels avx512vnni_kernels __attribute__((weak));
extern const Kernels avx512bf16_kernels __attribute__((weak));
extern const Kernels amx_kernels __attribute__((weak));
#endif

}  // namespace penstock
