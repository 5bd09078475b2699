// What rows ask of the sampler, and what has been sampled in them so far.
#pragma once

#include <cstdint>
#include <vector>

namespace penstock {

constexpr int MAX_LOGPROBS = 20;
constexpr int32_t SAMPLED = -1;
constexpr int32_t NOT_A_NUMBER = -2;  // in place of a sampled token: no logit is a number
// As a target: sample before a mask is known, for which the row may be sampled again. In place of the token: only the mask
// tells which one that is.
constexpr int32_t UNDECIDED = -3;

// The C ABI's view of a row's parameters; mirrored field by field in bindings.py. Arrays belong to the caller.
struct RowParams {
    int64_t seed;
    double temperature, top_p, min_p;               // 0: greedy; 1: off; 0: off
    float repetition, presence, frequency;          // penalties; 1, 0 and 0: off
    int32_t top_k;                                  // 0: off
    int32_t logprobs, prompt_logprobs;              // alternatives beside each token; -1: off
    int32_t min_tokens, prompt_len;
    int32_t num_biases, num_stop_ids, num_tokens;
    const int32_t* bias_tokens;
    const float* biases;
    const int32_t* stop_ids;
    const int32_t* tokens;                          // prompt and output; only where there are penalties
};

// Log-probabilities under the unmodified logits; of the alternatives as many are set as the row asks for.
struct Score {
    float logprob;
    int32_t tokens[MAX_LOGPROBS];
    float logprobs[MAX_LOGPROBS];
};

class SamplingRow {
  public:
    SamplingRow() : params_{.top_p = 1, .repetition = 1, .logprobs = -1, .prompt_logprobs = -1} {}
    SamplingRow(const RowParams& params, int vocab);

    const RowParams& params() const { return params_; }
    // Whether it wants anything but the argmax.
    bool demanding() const;
    bool changes_logits(int position) const { return !biases_.empty() || penalises() || forbids(position); }
    void change_logits(float* logits, int position) const;
    // After a change: the largest of each block of n logits that has changed.
    void update_maxima(const float* logits, int n, float* maxima) const;
    void count(int32_t token);

  private:
    struct Bias {
        int32_t token;
        float value;
    };
    struct Seen {
        int32_t token, count;  // how often it was sampled; 0 where it stands in the prompt only
    };
    bool penalises() const { return params_.repetition != 1 || params_.presence != 0 || params_.frequency != 0; }
    // Whether the output would be too short if it ended with a token at this position. A sequence that wants nothing but
    // the argmax may have a row that was set for another one, with a longer prompt.
    bool forbids(int position) const {
        return params_.min_tokens > 0 && position - params_.prompt_len < params_.min_tokens;
    }

    RowParams params_;  // without the arrays
    std::vector<Bias> biases_;
    std::vector<int32_t> stop_ids_;
    std::vector<Seen> seen_;  // by token; only where there are penalties
};

struct SamplingRows {
    SamplingRows(int rows, int vocab) : rows(rows), vocab(vocab) {}
    std::vector<SamplingRow> rows;
    int vocab;
};

}  // namespace penstock
