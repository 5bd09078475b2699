// A decode step of one sequence of a dense decoder in one persistent kernel, one CTA per SM: from the last token to the
// logits and their argmax.
//
//     norm, qkv | q/k norm, rope, cache write, attention | out + residual | norm, gate_up, silu * mul | down + residual
//     and after all layers: norm, head | argmax
//
// A producer warp streams this CTA's rows of every weight into a ring of shared memory, through all phases: it waits for
// free slots only, so memory is busy while the other warps poll for each other's results. Those are published without a
// grid barrier (layers_exchange.cuh). See docs/design/0010-persistent-decode-kernel.md
//
// Macros: HIDDEN, INNER, HEADS, KV_HEADS, HEAD_NORM, FP8, CTAS (of the grid), IN_FLIGHT (slots that are being filled
// at most). Head size 128, tokens in KV blocks of 16.
#include "common.cuh"
#include "layers_attention.cuh"
#include "layers_head.cuh"

// The phases of a layer, each with a projection.
enum { TO_QKV, TO_OUT, TO_GATE_UP, TO_DOWN };

constexpr int HOLD_SLOTS = 6;  // slots that registers can hold

// State of the threads that compute, through all phases.
struct Compute {
    Ring ring;
    bf16* given;  // where this CTA publishes its results
    const u64* layer;
    float eps;
    float residual;  // of this thread's row, in float32

    // Between these two calls all of a phase's input has arrived. Then what the phase before has read may be restored to
    // UNWRITTEN, and this phase may publish its result once that of the phase before is restored.
    DEVICE void await_clean(int phase) {
        if (threadIdx.x == THREADS - 1 && phase > 0) wait(&ring.shared.clean, (phase - 1) % 2);
    }
    DEVICE void report_seen() {
        sync_warps();
        if (threadIdx.x == THREADS - 1) arrive(&ring.shared.seen);
    }

    // `give` writes the input to shared memory; it calls its argument before it polls.
    template <int WHICH, int K, int SHARE, class Give>
    DEVICE void phase(int number, const Rows& rows, Give give) {
        constexpr bool NORMED = WHICH % 2 == 0, GATED = WHICH == TO_GATE_UP;
        Shared& shared = ring.shared;
        const int row = rows.first + threadIdx.x, count = GATED ? 2 * rows.count : rows.count;
        const bool mine = static_cast<int>(threadIdx.x) < rows.count;
        Gemv<FP8, K, tiled(GATED ? 2 * SHARE : SHARE) / ROWS, HOLD_SLOTS> gemv;
        await_clean(4 * number + WHICH);
        float squares = 0, factor = give(squares, [&] { gemv.hold(ring, count); });
        report_seen();
        float scale = 1, up_scale = 1;
        if (FP8 && mine) {
            const u64 scales = address(layer, QKV_SCALES + WHICH);
            scale = __ldg(reinterpret_cast<const float*>(scales) + row);
            if (GATED) up_scale = __ldg(reinterpret_cast<const float*>(scales) + INNER + row);
        }
        gemv.compute(ring, count);
        if (NORMED) add_squares(shared, squares);
        sync_warps();
        if (mine) {
            if (NORMED) factor *= inverse_norm(shared, eps);
            float sum = total(shared, threadIdx.x) * factor * scale;
            if (GATED) {
                const float up = total(shared, rows.count + threadIdx.x) * factor * up_scale;
                sum = silu_times(sum, up);
            }
            if (!NORMED) sum = residual += sum;
            constexpr int TO[] = {PROJECTED, MIDDLE, INSIDE, ENTERING};
            publish(given, TO[WHICH] + row, to_bf16(sum));
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS + 64, 1)
    layers(const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap value_map, const u64* layers,
           int num_layers, bf16* exchange, bf16* keys, bf16* values, int num_blocks, const float* cos_sin, float eps,
           float scale, int window, const int* row_of, const int* context_of, i64* last_tokens, const int* tables,
           int table_width, const bf16* embedding, const bf16* head_gain, const bf16* head_weight, int vocab, float* logits,
           i64* chosen) {
    SHARED_MEMORY(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int thread = threadIdx.x, warp = thread / 32;
    if (thread == 0) {
        for (int slot = 0; slot < SLOTS; slot++) {
            init_barrier(shared.full + slot, 1);
            init_barrier(shared.empty + slot, WARPS);
        }
        init_barrier(&shared.seen, 1);
        init_barrier(&shared.clean, 1);
        publish_barriers();
    }
    __syncthreads();
    const Rows qkv = own_rows(QKV), hidden = own_rows(HIDDEN), inner = own_rows(INNER), tokens = own_rows(vocab);
    constexpr i64 CACHE_BLOCK = KV_HEADS * BLOCK * D;
    if (warp == WARPS) {
        Producer producer{{shared}, {shared}};
        Unit unit;
        const int* table;
        for (int number = 0; number < num_layers; number++) {
            const u64* layer = layers + number * ADDRESSES;
            producer.stream(address(layer, QKV_WEIGHT), HIDDEN * SIZE, qkv);
            if (number == 0) {
                wait_for_previous();
                unit = own_unit(*context_of, window);
                table = tables + static_cast<i64>(*row_of) * table_width;
            }
            const i64 first_block = static_cast<i64>(number) * num_blocks;
            if (unit.attends) producer.stream_tokens(&key_map, &value_map, first_block, table, unit);
            producer.stream(address(layer, OUT), MIXED * SIZE, hidden);
            producer.stream(address(layer, GATE_UP), HIDDEN * SIZE, inner.first, 2 * inner.count, inner.count,
                            INNER - inner.count);
            producer.stream(address(layer, DOWN), INNER * SIZE, hidden);
        }
        producer.limit = 4;  // nothing else is in flight any more
        producer.stream(reinterpret_cast<u64>(head_weight), HIDDEN * 2, tokens);
        return;
    }
    wait_for_previous();
    const int context = *context_of, row = *row_of;
    const Unit unit = own_unit(context, window);
    if (warp == WARPS + 1) {
        restore_all(shared, exchange, layers, num_layers, unit, reinterpret_cast<u64>(head_gain));
        return;
    }

    const bf16* x = embedding + last_tokens[row] * HIDDEN;
    i64 place = -1;
    if (context > 0) {
        const i64 block = tables[static_cast<i64>(row) * table_width + (context - 1) / BLOCK];
        place = block * CACHE_BLOCK + (unit.kv_head * BLOCK + (context - 1) % BLOCK) * D;
    }
    if (thread < D) shared.angles[thread] = cos_sin[static_cast<i64>(most(context - 1, 0)) * D + thread];
    const float entering = thread < hidden.count ? from_bf16(x[hidden.first + thread]) : 0;
    const bf16* theirs = exchange + blockIdx.x % REPLICAS * PLACES;
    Compute compute{{shared}, exchange, layers, eps, entering};
    for (int number = 0; number < num_layers; number++, compute.layer += ADDRESSES) {
        const u64* layer = compute.layer;
        compute.phase<TO_QKV, HIDDEN, share(QKV)>(number, qkv, [&](float& squares, auto meanwhile) {
            const bf16* from = number == 0 ? x : theirs + ENTERING;
            return give_normed<FP8>(shared, from, number == 0, address(layer, ATTENTION_NORM), squares, meanwhile);
        });
        if (unit.attends) {
            const i64 cache = number * num_blocks * CACHE_BLOCK;
            attend(compute.ring, unit, theirs, exchange, keys + cache, values + cache, place, address(layer, QUERY_NORM),
                   address(layer, KEY_NORM), eps, scale);
        }
        compute.phase<TO_OUT, MIXED, share(HIDDEN)>(number, hidden, [&](float&, auto meanwhile) {
            const float* weights = reinterpret_cast<const float*>(theirs + WEIGHTS);
            return give_attended(shared, theirs + ATTENDED, weights, unit.parts, meanwhile);
        });
        compute.phase<TO_GATE_UP, HIDDEN, share(INNER)>(number, inner, [&](float& squares, auto meanwhile) {
            return give_normed<FP8>(shared, theirs + MIDDLE, false, address(layer, MLP_NORM), squares, meanwhile);
        });
        compute.phase<TO_DOWN, INNER, share(HIDDEN)>(number, hidden, [&](float&, auto meanwhile) {
            return give_inner(shared, theirs + INSIDE, meanwhile);
        });
    }

    const Head head{logits, chosen, last_tokens + row};
    float squares = 0;
    compute.await_clean(4 * num_layers);
    const u64 gain = reinterpret_cast<u64>(head_gain);
    const float factor = give_normed<false>(shared, theirs + ENTERING, false, gain, squares, [] {});
    add_squares(shared, squares);
    compute.report_seen();
    choose_token(shared, head, exchange, compute_logits(compute.ring, head, tokens, factor, eps));
}
