// Drawing tokens: which ones may be drawn, and the draw among few. runner/sampler.py is the same in plain torch.
#include <algorithm>
#include <cmath>

#include "model.h"

namespace penstock {

namespace {

uint32_t philox_word(uint64_t seed, uint32_t position, uint32_t token) {
    uint32_t c[4] = {token / 4, position, 0, 0}, key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t product0 = uint64_t(c[0]) * 0xD2511F53u, product1 = uint64_t(c[2]) * 0xCD9E8D57u;
        const uint32_t next[4] = {uint32_t(product1 >> 32) ^ c[1] ^ key0, uint32_t(product1),
                                  uint32_t(product0 >> 32) ^ c[3] ^ key1, uint32_t(product0)};
        std::copy(next, next + 4, c);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c[token % 4];
}

float gumbel(const Draw& draw, int32_t token) {
    const uint32_t word = philox_word(uint64_t(draw.seed), uint32_t(draw.position), uint32_t(token));
    return -std::log(-std::log((float(word >> 9) + 0.5f) * 0x1p-23f));
}

// Puts the tokens that top-k, top-p and min-p leave at the front of `likely`, in descending order; returns how many.
int filter(const Kernels& kernels, const Draw& draw, const float* v, int n, float peak, int32_t* likely) {
    const double total = kernels.total_mass(v, n, peak);
    const float farthest = draw.min_p > 0 ? -std::log(draw.min_p) : INFINITY;
    // With both, top-p is taken of what top-k leaves, renormalised, so all of top-k must be seen.
    const bool both = draw.top_k > 0 && draw.top_p < 1;
    const float needed = both ? INFINITY : farthest;
    const auto mass = [&](int32_t token) { return std::exp(double(v[token]) - peak); };
    int count = 0;
    // Sorting a vocabulary is slow; what is kept nearly always lies close to the peak.
    for (float distance = 4;; distance = distance < 64 ? 2 * distance : INFINITY) {
        count = kernels.at_least(v, n, peak - std::min(distance, needed), likely);
        if (distance >= needed || distance == INFINITY || (draw.top_k > 0 && count >= draw.top_k)) break;
        double reached = 0;
        for (int i = 0; i < count; i++) reached += mass(likely[i]);
        if (draw.top_p < 1 && !both && reached >= draw.top_p * total) break;
    }
    std::sort(likely, likely + count, [&](int32_t a, int32_t b) { return v[a] != v[b] ? v[a] > v[b] : a < b; });
    const int limit = draw.top_k > 0 ? std::min(draw.top_k, n) : n;
    double within = both ? 0 : total;
    for (int i = 0; both && i < std::min(count, limit); i++) within += mass(likely[i]);
    double before = 0;
    int kept = 0;
    for (; kept < std::min(count, limit); kept++) {
        if (kept > 0 && (!(before < draw.top_p * within) || v[likely[kept]] < peak - farthest)) break;
        before += mass(likely[kept]);
    }
    return kept;
}

}  // namespace

void Model::sample(const float* logits, const Draw* draws, int count, int32_t* tokens) {
    const int n = spec_.vocab;
    scaled_.resize(pool_.size());
    likely_.resize(pool_.size());
    WorkCounter counter;
    pool_.run([&](int thread) {
        std::vector<float>& scaled = scaled_[thread];
        std::vector<int32_t>& likely = likely_[thread];
        scaled.resize(n);
        for (int i; (i = counter.take()) < count;) {
            const Draw& draw = draws[i];
            const float peak = kernels_->scale_logits(logits + size_t(draw.row) * n, n, draw.temperature, scaled.data());
            if (draw.top_k == 0 && draw.top_p >= 1 && draw.min_p <= 0) {
                tokens[i] = kernels_->draw(scaled.data(), n, uint64_t(draw.seed), uint32_t(draw.position));
                continue;
            }
            likely.resize(n);
            const int kept = filter(*kernels_, draw, scaled.data(), n, peak, likely.data());
            float best = -INFINITY;
            tokens[i] = likely[0];
            for (int j = 0; j < kept; j++)
                if (const float score = scaled[likely[j]] + gumbel(draw, likely[j]); score > best) {
                    best = score;
                    tokens[i] = likely[j];
                }
        }
    });
}

}  // namespace penstock
