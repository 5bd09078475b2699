// A BERT-family encoder: packed weights, and one call for the vectors of some texts.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "region.h"
#include "threadpool.h"

namespace penstock {

enum Pooling : int32_t { POOL_CLS = 0, POOL_MEAN = 1, POOL_LAST = 2 };

// The C ABI's view of an encoder; mirrored field by field in encoder.py.
struct EncoderSpec {
    int32_t layers, hidden, heads, intermediate, vocab, positions, types;
    int32_t scheme;            // of the layers
    int32_t transform, inner;  // blocks of the Hadamard transform that INT8 matrices expect of what they read: the hidden
                               // space, and the down projection's input; 0 for none
    int32_t pooling;
    int32_t labels;  // of a classification head over the pooled vector; 0: the vector itself is the result
    int32_t threads;
    float eps;
};

enum EncoderTensor : int32_t {
    WORDS, POSITIONS, TYPES, EMBEDDING_SCALE, EMBEDDING_SHIFT,
    QUERY, QUERY_BIAS, KEY, KEY_BIAS, VALUE, VALUE_BIAS, ATTENTION_OUT, ATTENTION_OUT_BIAS,
    ATTENTION_SCALE, ATTENTION_SHIFT, INTERMEDIATE, INTERMEDIATE_BIAS, OUTPUT, OUTPUT_BIAS, OUTPUT_SCALE, OUTPUT_SHIFT,
    HEAD_DENSE, HEAD_DENSE_BIAS, HEAD_OUT, HEAD_OUT_BIAS,
};

// Sequences, one after the other. All arrays belong to the caller.
struct EncoderStep {
    int32_t num_tokens, num_sequences;
    const int32_t* tokens;   // [num_tokens]
    const int32_t* counts;   // [num_sequences]
    const int32_t* seconds;  // [num_sequences]: where the second of two texts begins; at or behind the end: there is one
    float* out;              // [num_sequences, labels or hidden]
};

struct EncoderLayer {
    Matrix qkv, attention_out, intermediate, output;
    float *attention_scale, *attention_shift, *output_scale, *output_shift;
};

class Encoder {
  public:
    Encoder(const EncoderSpec& spec, const Kernels& kernels);

    // Both return an empty string, or what is wrong with the arguments.
    std::string set_tensor(EncoderTensor kind, int layer, const float* data, int64_t rows, int64_t columns);
    std::string encode(const EncoderStep& step);

    size_t weight_bytes() const { return weights_.size(); }
    void pin_caller() const { pool_.pin_caller(); }

  private:
    class Team;
    struct Place;
    struct Group {
        int first, last;  // sequences
        Range rows;       // their tokens
    };
    size_t lay_out(uint8_t* base);
    Place place_of(EncoderTensor kind, int layer);
    std::string check(const EncoderStep& step) const;
    void reserve(const EncoderStep& step);
    void divide(const EncoderStep& step);
    void run(const EncoderStep& step, const Group& group, Team& team);
    void multiply(Team& team, const Matrix& w, const Activations& x, Range rows, const Output& out);
    void embed(const EncoderStep& step, int sequence, int row);
    void normalize(int row, const float* scale, const float* shift);
    void quantize(const Activations& x, int row, int width, int transform);
    void attend(int sequence, int head, int thread);
    void pool(const EncoderStep& step, int sequence);

    EncoderSpec spec_;
    const Kernels* kernels_;
    ThreadPool pool_;
    std::vector<EncoderLayer> layers_;
    Matrix dense_, head_;
    uint16_t* rounded_words_ = nullptr;  // one of these two: of an F32 model words are not rounded
    float* words_ = nullptr;
    float *positions_ = nullptr, *types_ = nullptr, *embedding_scale_ = nullptr, *embedding_shift_ = nullptr;
    Region weights_, buffers_, scratch_;

    int capacity_ = 0, longest_ = 0;  // that the buffers are for: tokens of a step, tokens of a sequence
    size_t qkv_stride_ = 0, scratch_stride_ = 0;
    float *x_ = nullptr, *qkv_ = nullptr;
    Activations hidden_{}, attention_{}, inner_{};
    std::vector<int32_t> first_;     // [num_sequences + 1]: first token
    std::vector<int32_t> sequence_;  // [num_tokens]
    std::vector<Group> groups_;
    bool together_ = false;  // all threads work on one group at a time
    WorkCounter next_group_;
    std::vector<WorkCounter> counters_;
};

}  // namespace penstock
