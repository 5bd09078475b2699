// A dense transformer of the Llama family: packed weights, the paged cache, and one call per step.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "region.h"
#include "sampling_rows.h"
#include "threadpool.h"

namespace penstock {

// The C ABI's view of a model; mirrored field by field in bindings.py.
struct ModelSpec {
    int32_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocab;
    int32_t qk_norm, attention_bias, output_bias, mlp_bias, tied;
    int32_t scheme;       // of the layers; the output projection is int8 where this is int4
    int32_t block_size, num_blocks, threads;
    int32_t kv_format;
    // Blocks of the Hadamard transform that matrices expect of what they read, the hidden space behind a norm and the
    // down projection's input; 0 for none.
    int32_t hidden_transform, mlp_transform;
    float norm_eps;
    float rope_magnitude;
};

enum Tensor : int32_t {
    EMBEDDING, HEAD, FINAL_NORM, INPUT_NORM, POST_NORM, Q, K, V, O, GATE, UP, DOWN,
    Q_NORM, K_NORM, Q_BIAS, K_BIAS, V_BIAS, O_BIAS, GATE_BIAS, UP_BIAS, DOWN_BIAS,
    EXACT_NORM,  // FINAL_NORM as the embedding, read as an output projection, expects it; of INT8 models
    // What balancing multiplied channels of INT8 models by (rotation.py): adapters are changed alike.
    QKV_CHANNELS, KEY_CHANNELS, VALUE_CHANNELS, GATE_UP_CHANNELS, DOWN_CHANNELS,
};

// One step: tokens of several sequences, one after the other. All arrays belong to the caller. A sequence has a row in
// the tables of blocks and among the last tokens.
struct Step {
    int32_t num_tokens, num_sequences, num_rows, table_width, num_logits, num_runs;
    int32_t layers;                          // so many from the first on are computed, then norm and head; 0: all
    int32_t keeps_logits;                    // whether rows may be sampled again afterwards
    const int32_t* tokens;                   // [num_tokens]; SAMPLED: the last token of the sequence's row
    const int32_t *rows, *starts, *counts;   // [num_sequences]: row, first position and number of tokens
    const int32_t* logit_rows;               // [num_logits]: indices of the tokens whose logits are wanted
    // [num_runs]: lengths of runs of logit rows. The rows of a run follow one another in a sequence and are sampled in
    // order, until a token is sampled that is not the one that follows in the step (a draft); the rest are not sampled.
    const int32_t* runs;
    const int32_t* targets;                  // [num_logits]: SAMPLED, UNDECIDED or a token to score; null: SAMPLED
    const int32_t* const* masks;             // [num_logits]: one bit per token that may be sampled, or null; or null
    const int32_t* tables;                   // [num_rows, table_width]
    int32_t* last_tokens;                    // [num_rows]: set to what is sampled after a sequence's last token
    SamplingRows* sampling;                  // what the rows ask for; null: the argmax of all logits
    const int32_t* adapters;                 // [num_rows]: the slot of a row's adapter, or -1; null: no row has one
    float* logits;                           // [num_logits, vocab]; null: they are not wanted
    int32_t* sampled;                        // [num_logits]; SAMPLED where a run ended before
    Score* scores;                           // [num_logits]: of those whose rows ask for it

    int32_t target(int i) const { return targets ? targets[i] : SAMPLED; }
    const int32_t* mask(int i) const { return masks ? masks[i] : nullptr; }
};

// What a step does, one after the other, as profiles name it (KERNELS in timers.py). Norms, quantising and the merging of
// split attention are of their own only where a step has more than a few rows; else they belong to the GEMM behind them.
enum Kernel : int32_t { PLAN, EMBED, NORM, QUANTIZE, QKV, ROPE, ATTENTION, OUT, GATE_UP, DOWN_PROJ, LM_HEAD, SAMPLING };

struct KernelTime {
    int64_t end;  // in nanoseconds since the call began; it began when the one before it ended
    int32_t kernel, layer;
};

// What follows from a step, token by token and sequence by sequence.
struct Batch {
    std::vector<int32_t> tokens, positions, slots;  // [num_tokens]; slot: block * block_size + offset
    std::vector<int32_t> first, contexts;           // [num_sequences + 1]: first token; [num_sequences]: tokens after it
    std::vector<const int32_t*> tables;             // [num_sequences]
    std::vector<int32_t> last_of;                   // [num_tokens]: the row of which this is the last token, or -1
    std::vector<int32_t> rows;                      // [num_tokens]
    std::vector<int32_t> given;                     // [num_sequences]: first token in the order of the step
    std::vector<int32_t> moved_to;                  // [num_tokens], by the step's order; empty: they were not moved
};

// One row of logits that is to be sampled or scored.
struct Choice {
    float* logits;        // may be changed
    const float* maxima;  // of each block of logits
    int32_t argmax;
    int32_t position;     // where the token will stand
    int32_t target;
    const int32_t* mask;  // or null
    Score* score;
};

// Sampling by itself, for tests: rows of logits, and for each what a step would know.
struct SampleCall {
    int32_t count;
    float* logits;
    const int32_t *rows, *positions, *targets;
    const int32_t* const* masks;
    int32_t* tokens;
    Score* scores;
};

// Which rows of a step use the adapter in a slot.
struct AdapterRun {
    int32_t slot, begin, end;
};

// An adapter as steps read it.
struct PackedAdapter {
    int32_t rank;  // padded
    Region memory;
    std::vector<AdapterStage> stages;  // of each layer: q, k, v; o; gate, up; down
};

struct Layer {
    float *input_norm, *post_norm, *q_norm, *k_norm;
    float *qkv_channels, *key_channels, *value_channels, *gate_up_channels, *down_channels;  // of INT8 models
    Matrix qkv, o, gate_up, down;
    int32_t window;
};

class Model {
  public:
    Model(const ModelSpec& spec, const int32_t* windows, const float* inverse_frequencies, const Kernels& kernels);

    // These return an empty string, or what is wrong with the arguments.
    std::string set_tensor(Tensor kind, int layer, const float* data, int64_t rows, int64_t columns);
    std::string use_adapter(int slot, std::shared_ptr<const PackedAdapter> adapter);
    std::string forward(const Step& step);
    // Rows of the last step's logits, which must be as the model gave them: unless they ask for penalties or biases.
    std::string resample(int count, const int32_t* rows, const int32_t* const* masks, int32_t* sampled);

    // These two from any thread, also during a step.
    std::shared_ptr<PackedAdapter> new_adapter(int rank) const;
    std::string set_adapter(PackedAdapter& adapter, Tensor kind, int layer, const float* a, const float* b, int rank) const;

    // Of a tensor that is kept in floats; else null.
    const float* floats(Tensor kind, int layer) const { return place_of(kind, layer).floats; }

    void sample(SamplingRows& rows, const SampleCall& call);

    // Final hidden states of some tokens of the last step, by their indices in it: [count, hidden], behind the norm.
    void hidden_states(const int32_t* tokens, int count, float* out) const {
        std::vector<float> normed(round_up(spec_.hidden, 64));
        for (int i = 0; i < count; i++, out += spec_.hidden) {
            kernels_->rms_norm(x_ + tokens[i] * hidden_stride_, exact_norm_, spec_.norm_eps, spec_.hidden, normed.data());
            std::copy_n(normed.data(), spec_.hidden, out);
        }
    }

    // Whether the times of kernels are taken in steps from now on, and those of the last step that was timed.
    void set_timed(bool timed) { timed_ = timed; }
    const std::vector<KernelTime>& times() const { return times_; }

    // Seconds that all threads together need to read so many bytes of the weights.
    double read_seconds(size_t bytes);

    uint8_t* weights() const { return weights_.data(); }
    size_t weight_bytes() const { return weights_.size(); }
    size_t block_bytes() const { return cache_of(0).block_bytes; }
    uint8_t* cache() const { return cache_.data(); }
    void use(const Kernels& kernels);
    void pin_caller() const { pool_.pin_caller(); }

  private:
    // The shape a tensor must have and where it goes: rows of a matrix, or floats.
    struct Place {
        int64_t rows, columns;
        const Matrix* matrix = nullptr;
        int first = 0;        // output column of the first row
        bool paired = false;  // gate and up alternate in runs of 16 outputs
        float* floats = nullptr;
        uint16_t* table = nullptr;

        int column(int64_t row) const { return first + int(paired ? row / 16 * PANEL + row % 16 : row); }
    };
    size_t lay_out(uint8_t* base);
    Cache cache_of(int layer) const;
    Place place_of(Tensor kind, int layer) const;
    void reserve(const Step& step);
    std::string check(const Step& step) const;
    void expand(const Step& step);
    std::pair<int, int> shared_run(int first) const;
    void add_task(AttentionTask task, int parts);
    void plan_attention();

    // Of the phases of a step. While it runs, each thread clears its part of those for the next one.
    struct Counters {
        std::vector<WorkCounter> done;    // [phase]
        std::vector<WorkCounter> queues;  // [phase][thread]
        void clear(int thread, int threads);
    };
    // How far a thread is in a step: the counters of the phases to come.
    struct Progress {
        const int thread;
        WorkCounter *done, *queues;
    };
    int runs_of(const Matrix& w, int rows) const;
    template <class Work>
    void phase(Progress& at, int units, int each, const Work& work);
    template <class Work>
    void phase(Progress& at, int items, const Work& work);
    template <class Work>
    void by_rows(Progress& at, int rows, const Work& work);
    template <class Prepare>
    void multiply(const Matrix& w, const Activations& x, int rows, const Output& out, Progress& at, int layer, int stage,
                  const Prepare& prepare);

    void lay_out_modules();
    void plan_adapters(const Step& step);
    LowRank low_rank() { return {low_f_.data(), low_q_.data(), low_scale_.data(), low_offset_.data(), low_stride_}; }
    template <class Work>
    void by_adapter(Range rows, int layer, int stage, const Work& work);
    void shrink(int layer, int stage, const Activations& x, Scheme scheme, Range rows, int to);
    void line_up(Range rows, int layer, int stage, int panels, int thread);
    void multiply_adapted(const Matrix& w, const Activations& x, int layer, int stage, Range rows, Range panels,
                          const Output& out, int copies, int thread);

    void mark(int thread, Kernel kernel, int layer) {
        if (timed_ && thread == 0) times_.push_back({(std::chrono::steady_clock::now() - began_).count(), kernel, layer});
    }
    void run(const Step& step, int thread);
    void sample_run(const Step& step, Range rows, int thread);
    int32_t sample_logits(const Step& step, int row, int32_t argmax, const int32_t* mask, int thread);
    int choose(const Step& step, int row, int thread);
    bool needs_logits(const Step& step) const;
    int32_t sample_row(const Choice& choice, SamplingRow& row, int thread);
    void embed(int token);
    void normalize(const float* weight, Scheme scheme, int row, int to);
    void copy_row(const Activations& x, int row, int to, int width);
    void quantize(const Activations& x, int row, int width, int transform);
    void rotate_and_cache(const Layer& layer, const Cache& cache, int token, int head);
    void attend(const Layer& layer, const Cache& cache, Progress& at);
    void merge_attention(int token, int to);

    ModelSpec spec_;
    const Kernels* kernels_;
    ThreadPool pool_;
    std::vector<float> inverse_frequencies_;
    std::vector<Layer> layers_;
    Matrix head_;
    float *final_norm_ = nullptr, *exact_norm_ = nullptr;
    uint16_t* embedding_ = nullptr;
    Region weights_, cache_, buffers_, scratch_;

    // Buffers of a step, regrown when a step needs more; widths in floats, padded with zeros to 64.
    int capacity_ = 0;
    size_t hidden_stride_ = 0, qkv_stride_ = 0;
    float *x_ = nullptr, *qkv_ = nullptr, *cos_sin_ = nullptr;
    Activations hidden_{}, attention_{}, mlp_{};
    Batch batch_;
    std::vector<float> partials_;
    size_t scratch_stride_ = 0;
    bool has_windows_ = false;
    std::vector<AttentionTask> tasks_;
    struct Merge {
        int32_t token, slot, parts;  // the first of its slots
    };
    std::vector<Merge> merges_;  // by token
    std::vector<std::shared_ptr<const PackedAdapter>> adapters_;  // by slot; null: it is empty
    std::vector<uint8_t> stage_modules_[4];          // of each stage, by 16 outputs: their module
    std::vector<AdapterRun> adapter_runs_;           // of a step
    std::vector<int32_t> order_, logit_rows_;        // of a step: its sequences by adapter; logit rows as that moves them
    Step last_{};                                    // its logits, and what is needed to sample them again
    std::vector<float> low_f_, low_scale_;           // LowRank
    std::vector<int8_t> low_q_;
    std::vector<int32_t> low_offset_;
    size_t low_stride_ = 0;
    std::vector<const AdapterStage*> row_adapters_;  // of a step, by row: the stages of its adapter, or null
    std::vector<std::vector<Expansion::Stream>> expand_streams_;  // per thread
    Counters counters_[2];                      // of a step and of the next one
    uint64_t steps_ = 0;
    std::vector<Range> sampled_runs_;           // of logit rows that are sampled in order
    std::vector<float> peaks_;                  // [logit row][panel of the output projection]
    std::vector<float> row_logits_;             // per thread: of one row
    Region logits_;                             // of rows that ask for more than their argmax
    size_t logits_stride_ = 0;
    struct SamplingScratch {
        std::vector<float> maxima, logits;
    };
    std::vector<SamplingScratch> sampling_scratch_;  // per thread
    bool timed_ = false;
    std::chrono::steady_clock::time_point began_;  // these two: of the last step that was timed
    std::vector<KernelTime> times_;
};

}  // namespace penstock
