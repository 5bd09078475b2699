// Sampling: one row of logits to a token, and log-probabilities. kernels/sampling_reference.py is the same in plain torch.
//
// Which tokens top-k, top-p and min-p keep is a matter of a threshold, and no sort is needed to find it. The k-th largest
// logit is found by bisection. For top-p a token is drawn first: it is among the kept if those with larger logits hold
// less than top-p. If it is not, neither are those below it, and another one is drawn among those above. What is left
// of the probability halves each time on average.
#include <algorithm>
#include <bit>
#include <cmath>

#include "model.h"

namespace penstock {

namespace {

// Floats as integers of the same order.
int32_t ordered(float f) {
    const int32_t bits = std::bit_cast<int32_t>(f);
    return bits ^ (bits >> 31 & 0x7fffffff);
}

float from_ordered(int32_t i) { return std::bit_cast<float>(i ^ (i >> 31 & 0x7fffffff)); }

float next_below(float f) { return std::nextafter(f, -INFINITY); }

// How far below the largest logit, in units of the temperature, nothing matters: the noise of two tokens differs by 20 at
// most, and a million tokens there have less of the probability than a float can tell from none.
constexpr double NEGLIGIBLE = 32;

// A row of logits with the largest of each block, by which passes over it skip what is too small.
struct Row {
    const Kernels& kernels;
    const float* logits;
    int n;
    const float* maxima;
    float peak;

    Row(const Kernels& kernels, const float* logits, int n, const std::vector<float>& maxima)
        : kernels(kernels),
          logits(logits),
          n(n),
          maxima(maxima.data()),
          peak(*std::max_element(maxima.begin(), maxima.end())) {}

    int32_t argmax() const {
        if (!(peak > -INFINITY)) return 0;
        int32_t token = 0;
        while (maxima[token / SAMPLING_BLOCK] != peak) token += SAMPLING_BLOCK;
        while (logits[token] != peak) token++;
        return token;
    }

    // The sums of e^((logit - peak) / temperature) over logits above two limits.
    Masses masses(float low, float high, double temperature) const {
        return kernels.masses(logits, maxima, n, low, high, peak, float(1 / temperature));
    }

    // -inf where fewer than k tokens are possible.
    float kth_largest(int k) const {
        int64_t low = ordered(-INFINITY), high = ordered(peak);  // fewer than k are above high
        if (kernels.count_above(logits, maxima, n, -INFINITY, k) < k) return -INFINITY;
        while (high - low > 1) {
            const int64_t middle = (low + high) >> 1;
            const bool few = kernels.count_above(logits, maxima, n, from_ordered(int32_t(middle)), k) < k;
            (few ? high : low) = middle;
        }
        return from_ordered(int32_t(high));
    }

    // The smallest logit that min-p keeps.
    float min_p_limit(const RowParams& p) const {
        if (!(p.min_p > 0)) return -INFINITY;
        const double limit = peak + p.temperature * std::log(p.min_p);
        const float nearest = float(limit);
        return nearest < limit ? std::nextafter(nearest, INFINITY) : nearest;
    }

    int32_t draw(const RowParams& p, int position) const {
        if (!(peak > -INFINITY)) return 0;
        float floor = p.min_p > 0 ? next_below(min_p_limit(p)) : -INFINITY;  // what is drawn is above it
        // With both, top-p is taken of what top-k leaves, renormalised.
        const float below_top_k = p.top_k > 0 && p.top_k < n ? next_below(kth_largest(p.top_k)) : -INFINITY;
        floor = std::max(floor, below_top_k);
        for (double enough = -1;;) {
            const int32_t token =
                kernels.draw(logits, maxima, n, floor, float(p.temperature), uint64_t(p.seed), uint32_t(position));
            const float logit = logits[token];
            if (p.top_p >= 1 || logit >= peak) return token;
            const float low = std::max(below_top_k, float(peak - NEGLIGIBLE * p.temperature));
            const Masses found = masses(enough < 0 ? low : logit, logit, p.temperature);
            if (enough < 0) enough = p.top_p * found.above_low;
            if (!(found.above_high >= enough)) return token;
            floor = logit;
        }
    }

    // The same before a mask is known: the token that it will be with any mask that allows this token, or UNDECIDED. The
    // best of all tokens is the best of those that a mask leaves. What top-k and min-p keep they also keep of fewer tokens;
    // top-p does for certain if it would with all smaller ones masked.
    int32_t draw_before_mask(const RowParams& p, int position) const {
        if (!(peak > -INFINITY)) return 0;
        const int32_t token =
            kernels.draw(logits, maxima, n, -INFINITY, float(p.temperature), uint64_t(p.seed), uint32_t(position));
        const float logit = logits[token];
        if (logit >= peak) return token;
        if (logit < min_p_limit(p)) return UNDECIDED;
        if (p.top_k > 0 && kernels.count_above(logits, maxima, n, logit, p.top_k) >= p.top_k) return UNDECIDED;
        if (p.top_p < 1) {
            constexpr double ROUNDING = 1e-4;  // far more than that of the sums
            const double above = masses(logit, logit, p.temperature).above_low * (1 + ROUNDING);
            if (!(above < p.top_p * (above + std::exp((logit - peak) / p.temperature)))) return UNDECIDED;
        }
        return token;
    }

    // The most probable tokens; returns what is to be subtracted from a logit to make it a log-probability.
    float score(int count, Score& out) const {
        const float total = peak + float(std::log(masses(-INFINITY, INFINITY, 1).above_low));
        if (count == 0) return total;
        const float smallest = kth_largest(std::min(count, n));
        std::vector<int32_t> found;
        for (int first = 0; first < n; first += SAMPLING_BLOCK)
            if (maxima[first / SAMPLING_BLOCK] >= smallest)
                for (int i = first; i < std::min(n, first + SAMPLING_BLOCK); i++)
                    if (logits[i] >= smallest) found.push_back(i);
        std::stable_sort(found.begin(), found.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
        for (int i = 0; i < std::min(count, int(found.size())); i++) {
            out.tokens[i] = found[i];
            out.logprobs[i] = logits[found[i]] - total;
        }
        return total;
    }
};

}  // namespace

SamplingRow::SamplingRow(const RowParams& params, int vocab) : params_(params) {
    const auto exists = [&](int32_t token) { return token >= 0 && token < vocab; };
    for (int i = 0; i < params.num_biases; i++)
        if (exists(params.bias_tokens[i])) biases_.push_back({params.bias_tokens[i], params.biases[i]});
    std::copy_if(params.stop_ids, params.stop_ids + params.num_stop_ids, std::back_inserter(stop_ids_), exists);
    if (!penalises()) return;
    std::vector<int32_t> tokens(params.tokens, params.tokens + params.num_tokens);
    std::sort(tokens.begin(), tokens.end());
    tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
    for (int32_t token : tokens)
        if (exists(token)) seen_.push_back({token, 0});
    for (int i = params.prompt_len; i < params.num_tokens; i++) count(params.tokens[i]);
}

bool SamplingRow::demanding() const {
    return params_.temperature > 0 || params_.logprobs >= 0 || penalises() || !biases_.empty() || params_.min_tokens > 0;
}

void SamplingRow::change_logits(float* logits, int position) const {
    for (const Bias& bias : biases_) logits[bias.token] += bias.value;
    for (const Seen& seen : seen_) {
        float& logit = logits[seen.token];
        logit = logit > 0 ? logit / params_.repetition : logit * params_.repetition;
        logit = logit - params_.frequency * float(seen.count) - (seen.count > 0 ? params_.presence : 0.f);
    }
    if (forbids(position))
        for (int32_t token : stop_ids_) logits[token] = -INFINITY;
}

void SamplingRow::update_maxima(const float* logits, int n, float* maxima) const {
    const auto update = [&](int32_t token) {
        const int block = token / SAMPLING_BLOCK, first = block * SAMPLING_BLOCK;
        maxima[block] = *std::max_element(logits + first, logits + std::min(n, first + SAMPLING_BLOCK));
    };
    for (const Bias& bias : biases_) update(bias.token);
    for (size_t i = 0; i < seen_.size(); i++)  // by token, hence by block
        if (i == 0 || seen_[i].token / SAMPLING_BLOCK != seen_[i - 1].token / SAMPLING_BLOCK) update(seen_[i].token);
    for (int32_t token : stop_ids_) update(token);
}

void SamplingRow::count(int32_t token) {
    if (!penalises()) return;
    const auto at = std::lower_bound(seen_.begin(), seen_.end(), token,
                                     [](const Seen& seen, int32_t wanted) { return seen.token < wanted; });
    if (at != seen_.end() && at->token == token)
        at->count++;
    else
        seen_.insert(at, {token, 1});
}

int32_t Model::sample_row(const Choice& choice, SamplingRow& row, int thread) {
    const int n = spec_.vocab, blocks = (n + SAMPLING_BLOCK - 1) / SAMPLING_BLOCK;
    const bool samples = choice.target < 0, random = samples && row.params().temperature > 0;
    const bool changes = samples && (choice.mask || row.changes_logits(choice.position));
    const int alternatives = samples ? row.params().logprobs : row.params().prompt_logprobs;
    int32_t token = samples ? choice.argmax : choice.target;
    if (token == NOT_A_NUMBER || (!random && !changes && alternatives < 0)) return token;
    auto& [maxima, copy] = sampling_scratch_[thread];
    maxima.assign(round_up(blocks, 16), -INFINITY);
    std::copy_n(choice.maxima, blocks, maxima.begin());
    float *logits = choice.logits, total = 0.f;
    if (alternatives >= 0) total = Row(*kernels_, logits, n, maxima).score(alternatives, *choice.score);
    if (changes && alternatives >= 0) {  // the log-probability is that of the logit as it was
        copy.assign(logits, logits + n);
        logits = copy.data();
    }
    if (changes) {
        row.change_logits(logits, choice.position);
        row.update_maxima(logits, n, maxima.data());
        const double margin = random ? NEGLIGIBLE * row.params().temperature : 0;
        if (choice.mask) kernels_->mask_logits(logits, n, choice.mask, maxima.data(), float(margin + 1));  // or equals are lost
    }
    if (random) {
        const Row drawn(*kernels_, logits, n, maxima);
        token = choice.target == UNDECIDED ? drawn.draw_before_mask(row.params(), choice.position)
                                           : drawn.draw(row.params(), choice.position);
    } else if (changes)
        token = Row(*kernels_, logits, n, maxima).argmax();
    if (token == UNDECIDED) return token;
    if (samples) row.count(token);
    if (alternatives >= 0) choice.score->logprob = choice.logits[token] - total;
    return token;
}

void Model::sample(SamplingRows& rows, const SampleCall& call) {
    const int n = spec_.vocab;
    sampling_scratch_.resize(pool_.size());
    WorkCounter counter;
    pool_.run([&](int thread) {
        std::vector<float> maxima(round_up((n + SAMPLING_BLOCK - 1) / SAMPLING_BLOCK, 16));
        for (int i; (i = counter.take()) < call.count;) {
            float* logits = call.logits + size_t(i) * n;
            kernels_->block_maxima(logits, n, maxima.data());
            const int32_t argmax = int32_t(std::max_element(logits, logits + n) - logits);
            const Choice choice{logits,          maxima.data(),   argmax,        call.positions[i],
                                call.targets[i], call.masks[i], call.scores + i};
            call.tokens[i] = sample_row(choice, rows.rows[call.rows[i]], thread);
        }
    });
}

}  // namespace penstock
