// What attention asks memory for before it needs it.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace PENSTOCK_ISA {

using namespace penstock;

// The keys and values that a thread reads after a chunk of a task: they lie in blocks too far apart for the hardware to
// guess the next one. For int8; those of bfloat16, twice as long, come no sooner by it.
class KeysAhead {
  public:
    KeysAhead(const Cache& cache, int head, const AttentionTask& task, const UpcomingKeys& next)
        : cache_(cache), own_{task.table, head, 0, task.key_end}, next_(next) {}

    // While the chunk at `begin` is computed: the one behind it, or the first of the next task.
    inline __attribute__((always_inline)) void request(int begin) const {
        if (begin + KEY_CHUNK < own_.end)
            request_chunk(own_, begin + KEY_CHUNK);
        else if (next_.table)
            request_chunk(next_, next_.begin);
    }

  private:
    inline __attribute__((always_inline)) void request_chunk(const UpcomingKeys& keys, int begin) const {
        for (int key = begin; key < keys.end && key < begin + KEY_CHUNK; key += cache_.block_size) {
            const uint8_t* block = cache_.keys(keys.table[key / cache_.block_size], keys.kv_head);
            for (size_t at = 0; at < cache_.head_bytes(); at += 64) prefetch_l2(block + at);
        }
    }

    const Cache& cache_;
    const UpcomingKeys own_, next_;
};

}  // namespace PENSTOCK_ISA
