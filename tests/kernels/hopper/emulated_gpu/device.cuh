// The functions of penstock/kernels/hopper/device.cuh on the CPU, so that the kernels themselves run in tests.
//
// Each CUDA thread is a fiber and all of them take turns on one thread of the host. What waits in a kernel yields here;
// if everybody waits and nothing is in flight, that is a deadlock and said so. Copies by the tensor memory accelerator
// arrive late and in any order (by a fixed seed), so that reading before the wait is found out. What the emulation does
// not show: wgmma is done when it is issued, so a missing fence or wait for it goes unnoticed; and neither caches nor
// weak memory order exist.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

using bf16 = unsigned short;
using e4m3 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// base, rank | bytes of an element << 8 | swizzle << 16, 5 sizes, 4 strides in bytes, 5 sides of the box; innermost first
struct alignas(64) TensorMap {
    u64 words[16];
};

#define DEVICE inline
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)

struct Triple {
    unsigned x, y, z;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

// -- the machine ----------------------------------------------------------------------------------------------------------

namespace gpu {

struct Meeting {  // of threads that do something together: the last to come does it for all
    int arrived = 0;
    unsigned generation = 0;
    void* brought[128] = {};
};

struct Phases {  // an mbarrier
    int expected = 0, pending = 0;
    long bytes = 0;
    unsigned phase = 0;
};

struct Block {
    Triple index;
    unsigned threads;
    std::vector<unsigned char> memory;
    unsigned char* shared;
    std::map<u32, Phases> barriers;
    std::vector<Meeting> warps, warpgroups;
    Meeting everyone, named[16];
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<unsigned char[]> stack;
    Block* block;
    unsigned thread;
    bool done = false;
};

struct Machine {
    ucontext_t scheduler;
    Fiber* current = nullptr;
    Triple grid;
    unsigned cluster = 1;
    u64 progress = 0;
    std::vector<std::function<void()>> copies;  // in flight
    std::function<void()> body;
    std::mt19937 random{20261115};
    std::string error;
};
inline Machine machine;

inline void yield() { swapcontext(&machine.current->context, &machine.scheduler); }
[[noreturn]] inline void fail(const std::string& what) {
    if (machine.error.empty())
        machine.error = what + " (block " + std::to_string(machine.current->block->index.x) + "," +
                        std::to_string(machine.current->block->index.y) + ", thread " +
                        std::to_string(machine.current->thread) + ")";
    for (;;) yield();
}

constexpr size_t STACK = 96 << 10;

inline void enter() {
    machine.body();
    machine.current->done = true;
    machine.progress++;
    for (;;) yield();
}

inline void run_blocks(const std::vector<Triple>& indices, unsigned threads, size_t shared) {
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::unique_ptr<Fiber>> fibers;
    for (Triple index : indices) {
        auto block = std::make_unique<Block>();
        block->index = index;
        block->threads = threads;
        block->memory.resize(shared + 2048);
        for (unsigned char& byte : block->memory) byte = static_cast<unsigned char>(machine.random());
        auto address = reinterpret_cast<uintptr_t>(block->memory.data());
        block->shared = reinterpret_cast<unsigned char*>((address + 1023) / 1024 * 1024);
        block->warps.resize((threads + 31) / 32);
        block->warpgroups.resize((threads + 127) / 128);
        for (unsigned thread = 0; thread < threads; thread++) {
            auto fiber = std::make_unique<Fiber>();
            fiber->stack.reset(new unsigned char[STACK]);
            fiber->block = block.get();
            fiber->thread = thread;
            getcontext(&fiber->context);
            fiber->context.uc_stack.ss_sp = fiber->stack.get();
            fiber->context.uc_stack.ss_size = STACK;
            fiber->context.uc_link = nullptr;
            makecontext(&fiber->context, enter, 0);
            fibers.push_back(std::move(fiber));
        }
        blocks.push_back(std::move(block));
    }
    size_t left = fibers.size(), idle = 0;
    while (left && machine.error.empty()) {
        u64 before = machine.progress;
        left = 0;
        for (auto& fiber : fibers) {
            if (fiber->done) continue;
            machine.current = fiber.get();
            swapcontext(&machine.scheduler, &fiber->context);
            left += !fiber->done;
        }
        bool moved = machine.progress != before || !machine.copies.empty();
        std::shuffle(machine.copies.begin(), machine.copies.end(), machine.random);
        for (size_t some = (machine.copies.size() + 1) / 2; some > 0; some--) {
            machine.copies.back()();
            machine.copies.pop_back();
        }
        idle = moved ? 0 : idle + 1;  // polls of global memory yield too
        if (left && idle > 100) machine.error = "deadlock: " + std::to_string(left) + " threads wait for each other";
    }
    if (machine.error.empty() && !machine.copies.empty()) machine.error = "copies were in flight when the kernel ended";
    machine.copies.clear();
}

template <class Function, class... Arguments, size_t... I>
void call(Function function, void** values, std::tuple<Arguments...>*, std::index_sequence<I...>) {
    function(*reinterpret_cast<std::remove_reference_t<Arguments>*>(values[I])...);
}

// Runs `resident` CTAs at once; kernels that wait for their grid need all of them.
template <class... Arguments>
const char* launch(void (*kernel)(Arguments...), const unsigned* shape, unsigned resident, void** values) {
    machine = Machine();
    machine.grid = {shape[0], shape[1], shape[2]};
    machine.cluster = shape[5];
    machine.body = [=] {
        call(kernel, values, static_cast<std::tuple<Arguments...>*>(nullptr), std::index_sequence_for<Arguments...>());
    };
    std::vector<Triple> wave;
    for (unsigned z = 0; z < shape[2]; z++)
        for (unsigned y = 0; y < shape[1]; y++)
            for (unsigned x = 0; x < shape[0]; x++) {
                wave.push_back({x, y, z});
                bool last = z + 1 == shape[2] && y + 1 == shape[1] && x + 1 == shape[0];
                if (wave.size() == resident || last) {
                    run_blocks(wave, shape[3], shape[4]);
                    wave.clear();
                    if (!machine.error.empty()) return machine.error.c_str();
                }
            }
    return nullptr;
}

template <class Op>
void together(Meeting& meeting, unsigned size, unsigned place, void* mine, Op op) {
    meeting.brought[place] = mine;
    unsigned generation = meeting.generation;
    if (++meeting.arrived == static_cast<int>(size)) {
        op(meeting.brought);
        meeting.arrived = 0;
        meeting.generation++;
        machine.progress++;
    } else {
        while (meeting.generation == generation) yield();
    }
}
template <class Op>
void warp(void* mine, Op op) {
    Fiber* fiber = machine.current;
    together(fiber->block->warps[fiber->thread / 32], 32, fiber->thread % 32, mine, op);
}
template <class Op>
void warpgroup(void* mine, Op op) {
    Fiber* fiber = machine.current;
    together(fiber->block->warpgroups[fiber->thread / 128], 128, fiber->thread % 128, mine, op);
}
inline void gather(Meeting& meeting, unsigned size, bool stay) {
    unsigned generation = meeting.generation;
    if (++meeting.arrived == static_cast<int>(size)) {
        meeting.arrived = 0;
        meeting.generation++;
        machine.progress++;
    } else if (stay) {
        while (meeting.generation == generation) yield();
    }
}
inline unsigned char* at(u32 address) { return machine.current->block->shared + address; }
inline u32 swizzled(u32 address) { return address ^ ((address >> 7 & 7) << 4); }

inline void settle(Phases& phases) {
    if (phases.pending == 0 && phases.bytes == 0) {
        phases.phase ^= 1;
        phases.pending = phases.expected;
        machine.progress++;
    }
}

}  // namespace gpu

struct ThreadIndex {
    struct X {
        operator unsigned() const { return gpu::machine.current->thread; }
    } x;
};
inline ThreadIndex threadIdx;
#define blockIdx (gpu::machine.current->block->index)
#define gridDim (gpu::machine.grid)
#define blockDim (Triple{gpu::machine.current->block->threads, 1, 1})
#define SHARED_MEMORY(name) unsigned char* name = gpu::machine.current->block->shared

#define EMULATED(kernel)                                                                                      \
    extern "C" const char* launch(const unsigned* shape, unsigned resident, void** values) {                  \
        return gpu::launch(kernel, shape, resident, values);                                                  \
    }

// -- CUDA's own ---------------------------------------------------------------------------------------------------------

inline u32 shared_address(const void* pointer) {
    return static_cast<u32>(static_cast<const unsigned char*>(pointer) - gpu::machine.current->block->shared);
}
inline void __syncthreads() {
    gpu::Block* block = gpu::machine.current->block;
    gpu::gather(block->everyone, block->threads, true);
}
inline void __syncwarp(unsigned = 0xffffffffu) {
    gpu::warp(nullptr, [](void**) {});
}
inline void __threadfence() {}
inline void __nanosleep(unsigned) { gpu::yield(); }
inline float __uint_as_float(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline u32 __float_as_uint(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<u32>(bits)); }
inline int __float_as_int(float value) { return static_cast<int>(__float_as_uint(value)); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float rounded_product(float a, float b) { return a * b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
using std::max;
using std::min;

template <class T>
T shuffled(T value, int lane_of(int, int), int argument) {
    struct Mine {
        T value;
        int lane, argument;
        T result;
    } mine{value, 0, argument, value};
    mine.lane = gpu::machine.current->thread % 32;
    gpu::warp(&mine, [lane_of](void** all) {
        for (int lane = 0; lane < 32; lane++) {
            Mine* own = static_cast<Mine*>(all[lane]);
            own->result = static_cast<Mine*>(all[lane_of(lane, own->argument) & 31])->value;
        }
    });
    return mine.result;
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return shuffled<T>(value, [](int lane, int argument) { return lane ^ argument; }, mask);
}
template <class T>
T __shfl_sync(unsigned, T value, int from) {
    return shuffled<T>(value, [](int, int argument) { return argument; }, from);
}
template <class T>
T __shfl_down_sync(unsigned, T value, int by) {
    return shuffled<T>(value, [](int lane, int argument) { return std::min(lane + argument, 31); }, by);
}
template <class T>
T atomicAdd(T* to, T value) {
    T before = *to;
    *to = before + value;
    gpu::machine.progress++;
    return before;
}
inline u32 __ballot_sync(unsigned, bool vote) {
    struct Mine {
        bool vote;
        u32 votes;
    } mine{vote, 0};
    gpu::warp(&mine, [](void** all) {
        u32 votes = 0;
        for (int lane = 0; lane < 32; lane++) votes |= static_cast<u32>(static_cast<Mine*>(all[lane])->vote) << lane;
        for (int lane = 0; lane < 32; lane++) static_cast<Mine*>(all[lane])->votes = votes;
    });
    return mine.votes;
}
inline int __popc(u32 bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
    const u64 both = static_cast<u64>(b) << 32 | a;
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= static_cast<u32>(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return out;
}

// -- device.cuh -----------------------------------------------------------------------------------------------------------

inline void let_next_start() {}
inline void wait_for_previous() {}

inline void init_barrier(u64* barrier, u32 arrivals) {
    gpu::machine.current->block->barriers[shared_address(barrier)] = {static_cast<int>(arrivals),
                                                                      static_cast<int>(arrivals), 0, 0};
}
inline void publish_barriers() {}
inline gpu::Phases& phases_of(u64* barrier) {
    auto& barriers = gpu::machine.current->block->barriers;
    auto found = barriers.find(shared_address(barrier));
    if (found == barriers.end()) gpu::fail("a barrier is used that was never initialised");
    return found->second;
}
inline void arrive(u64* barrier) {
    gpu::Phases& phases = phases_of(barrier);
    if (--phases.pending < 0) gpu::fail("more arrivals at a barrier than it expects");
    gpu::settle(phases);
}
inline void arrive_having(u64* barrier, u32) { arrive(barrier); }
inline void arrive_expecting(u64* barrier, u32 bytes) {
    phases_of(barrier).bytes += bytes;
    arrive(barrier);
}
inline bool try_wait(u64* barrier, u32 parity) {
    if ((phases_of(barrier).phase & 1) != parity) return true;
    gpu::yield();
    return false;
}
inline void trap() { gpu::fail("trap"); }
inline void wait(u64* barrier, u32 parity) {
    while (!try_wait(barrier, parity)) continue;
}

constexpr u64 EVICT_NORMAL = 0, EVICT_FIRST = 1, EVICT_LAST = 2;

inline void copy_later(std::function<void()> copy, u64* barrier, u32 bytes) {
    gpu::Phases* phases = &phases_of(barrier);
    gpu::machine.copies.push_back([=] {
        copy();
        phases->bytes -= bytes;
        gpu::settle(*phases);
    });
}
inline void copy_bulk(void* to, const void* from, u32 bytes, u64* barrier, u64 = EVICT_FIRST) {
    if (bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16 || shared_address(to) % 16)
        gpu::fail("a bulk copy is not aligned to 16 bytes");
    copy_later([=] { std::memcpy(to, from, bytes); }, barrier, bytes);
}
inline void prefetch_map(const TensorMap*) {}
inline void copy_box_at(void* to, const TensorMap* map, const i64 (&start)[5], u64* barrier) {
    const u64* words = map->words;
    int rank = words[1] & 255, size = words[1] >> 8 & 255, swizzle = static_cast<int>(words[1] >> 16);
    u32 bytes = size;
    for (int d = 0; d < rank; d++) bytes *= words[11 + d];
    u32 first = shared_address(to);
    if (first % 128 || (swizzle && first % 1024)) gpu::fail("a box is copied to a place that is not aligned");
    unsigned char* shared = gpu::machine.current->block->shared;
    TensorMap copied = *map;
    i64 origin[5];
    std::copy(start, start + 5, origin);
    copy_later(
        [=] {
            const u64* words = copied.words;
            i64 index[5] = {};
            for (u32 done = 0; done < bytes; done += size) {
                bool inside = true;
                i64 offset = 0;
                for (int d = 0; d < rank; d++) {
                    i64 place = origin[d] + index[d];
                    inside = inside && place >= 0 && place < static_cast<i64>(words[2 + d]);
                    offset += place * (d ? static_cast<i64>(words[6 + d]) : size);
                }
                u32 address = first + done;
                if (swizzle) address = gpu::swizzled(address);
                if (inside)
                    std::memcpy(shared + address, reinterpret_cast<const unsigned char*>(words[0]) + offset, size);
                else
                    std::memset(shared + address, 0, size);
                for (int d = 0; d < rank && ++index[d] == static_cast<i64>(words[11 + d]); d++) index[d] = 0;
            }
        },
        barrier, bytes);
}
inline void copy_box(void* to, const TensorMap* map, int column, int row, u64* barrier, u64) {
    copy_box_at(to, map, {column, row, 0, 0, 0}, barrier);
}

inline void copy_box(void* to, const TensorMap* map, int x, int y, int z, u64* barrier) {
    copy_box_at(to, map, {x, y, z, 0, 0}, barrier);
}
inline void copy_box(void* to, const TensorMap* map, int x, int y, int z, int w, int v, u64* barrier) {
    copy_box_at(to, map, {x, y, z, w, v}, barrier);
}
inline void copy_box(void* to, const TensorMap* map, int x, int y, int z, u64* barrier, u64) {
    copy_box_at(to, map, {x, y, z, 0, 0}, barrier);
}
inline void copy_box(void* to, const TensorMap* map, int x, int y, int z, int w, u64* barrier, u64) {
    copy_box_at(to, map, {x, y, z, w, 0}, barrier);
}

inline void fence_async_proxy() {}
inline void sync_threads(u32 barrier, u32 threads) {
    gpu::gather(gpu::machine.current->block->named[barrier], threads, true);
}
inline bool elected() { return gpu::machine.current->thread % 32 == 0; }
inline int sum_of_warp(int value) {
    for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
    return value;
}
inline int max_of_warp(int value) {
    for (int distance = 16; distance; distance /= 2) value = std::max(value, __shfl_xor_sync(~0u, value, distance));
    return value;
}
inline void arrive_threads(u32 barrier, u32 threads) {
    gpu::gather(gpu::machine.current->block->named[barrier], threads, false);
}
template <int>
void take_registers() {}
template <int>
void give_registers() {}

inline float from_bf16(bf16 value) { return __uint_as_float(static_cast<u32>(value) << 16); }
inline float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
inline float high_bf16(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
inline bf16 to_bf16(float value) {
    u32 bits = __float_as_uint(value);
    if (value != value) return 0x7FFF;
    return static_cast<bf16>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline u32 pack_bf16(float low, float high) { return to_bf16(low) | static_cast<u32>(to_bf16(high)) << 16; }
inline float from_f16(unsigned short value) {
    _Float16 half;
    std::memcpy(&half, &value, 2);
    return static_cast<float>(half);
}
inline unsigned short to_f16(float value) {
    _Float16 half = static_cast<_Float16>(value);
    unsigned short bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
inline u32 pack_f16(float low, float high) { return to_f16(low) | static_cast<u32>(to_f16(high)) << 16; }
inline float from_e4m3(e4m3 value) {
    int exponent = value >> 3 & 15, mantissa = value & 7;
    float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(static_cast<float>(mantissa), -9);
    if ((value & 127) == 127) size = NAN;
    return value & 128 ? -size : size;
}
inline e4m3 to_e4m3(float value) {
    if (value != value) return 127;
    float size = std::fabs(value);
    e4m3 sign = std::signbit(value) ? 128 : 0;
    if (size >= 448.0f) return sign | 126;
    int exponent = size < std::ldexp(1.0f, -6) ? -6 : std::ilogb(size);
    int steps = static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));  // of an eighth of the exponent's range
    if (steps == 16) steps = 8, exponent++;
    if (exponent > 8 || (exponent == 8 && steps > 14)) return sign | 126;
    return sign | static_cast<e4m3>(steps < 8 ? steps : (exponent + 7) << 3 | (steps - 8));
}
inline u32 f16_of_e4m3(unsigned short pair) { return pack_f16(from_e4m3(pair & 255), from_e4m3(pair >> 8)); }
inline unsigned short pack_e4m3(float low, float high) {
    return static_cast<unsigned short>(to_e4m3(low) | to_e4m3(high) << 8);
}

inline u32 larger_halves(u32 a, u32 b) {
    return std::max(a & 0xFFFF, b & 0xFFFF) | std::max(a >> 16, b >> 16) << 16;
}

// -- global memory ----------------------------------------------------------------------------------------------------------

inline uint4 poll(const void* place) {
    gpu::yield();
    return *static_cast<const uint4*>(place);
}
inline u32 poll_word(const void* place) {
    gpu::yield();
    return *static_cast<const u32*>(place);
}
inline void put_half(void* place, unsigned short value) {
    *static_cast<unsigned short*>(place) = value;
    gpu::machine.progress++;
}
inline void put_word(void* place, u32 value) {
    *static_cast<u32*>(place) = value;
    gpu::machine.progress++;
}
inline u64 poll_long(const void* place) {
    gpu::yield();
    return *static_cast<const u64*>(place);
}
inline void put_long(void* place, u64 value) {
    *static_cast<u64*>(place) = value;
    gpu::machine.progress++;
}
inline void put_after_all(void* place, u32 value) { put_word(place, value); }
inline uint4 load_once(const void* place) { return *static_cast<const uint4*>(place); }
inline void prefetch_line(u64) {}
template <class T>
T __ldg(const T* place) {
    return *place;
}
inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float tanh_approx(float x) { return std::tanh(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline float inverse_root_approx(float x) { return 1.0f / std::sqrt(x); }

// -- matrices -------------------------------------------------------------------------------------------------------------

template <bool TRANSPOSED>
void load_matrices_by_warp(u32 (&out)[4], u32 address) {
    struct Mine {
        u32* out;
        u32 address;
    } mine{out, address};
    gpu::warp(&mine, [](void** all) {
        auto element = [&](int matrix, int row, int column) {
            unsigned short value;
            u32 address = static_cast<Mine*>(all[matrix * 8 + row])->address;
            std::memcpy(&value, gpu::at(address) + column * 2, 2);
            return value;
        };
        for (int lane = 0; lane < 32; lane++)
            for (int matrix = 0; matrix < 4; matrix++) {
                int row = lane / 4, column = lane % 4 * 2;
                u32 low = TRANSPOSED ? element(matrix, column, row) : element(matrix, row, column);
                u32 high = TRANSPOSED ? element(matrix, column + 1, row) : element(matrix, row, column + 1);
                static_cast<Mine*>(all[lane])->out[matrix] = low | high << 16;
            }
    });
}
inline void load_matrices(u32 (&out)[4], u32 address) { load_matrices_by_warp<false>(out, address); }
inline void load_matrices_transposed(u32 (&out)[4], u32 address) { load_matrices_by_warp<true>(out, address); }

inline u32 transposed(u32 pair) {
    u32 out;
    struct Mine {
        u32 pair;
        u32* out;
    } mine{pair, &out};
    gpu::warp(&mine, [](void** all) {
        auto element = [&](int row, int column) {
            return static_cast<Mine*>(all[row * 4 + column / 2])->pair >> column % 2 * 16 & 0xFFFF;
        };
        for (int lane = 0; lane < 32; lane++)
            *static_cast<Mine*>(all[lane])->out =
                element(lane % 4 * 2, lane / 4) | element(lane % 4 * 2 + 1, lane / 4) << 16;
    });
    return out;
}

enum class Number { BF16, F16, E4M3 };
template <Number KIND>
float number(const u32* words, int index) {  // of numbers packed in words
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(words);
    if (KIND == Number::E4M3) return from_e4m3(bytes[index]);
    unsigned short bits;
    std::memcpy(&bits, bytes + 2 * index, 2);
    return KIND == Number::BF16 ? from_bf16(bits) : from_f16(bits);
}

// Word of A that holds numbers 4 bytes at `byte` of a row of 32, for one of 16 rows; and of B, for a column.
template <Number KIND>
void mma_by_warp(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    struct Mine {
        float* sum;
        const u32* a;
        u32 b[2];
    } mine{sum, a, {b0, b1}};
    gpu::warp(&mine, [](void** all) {
        constexpr int PER_WORD = KIND == Number::E4M3 ? 4 : 2, K = 8 * PER_WORD;
        float a[16][K], b[8][K];
        for (int lane = 0; lane < 32; lane++) {
            Mine* own = static_cast<Mine*>(all[lane]);
            int g = lane / 4, t = lane % 4;
            for (int i = 0; i < PER_WORD; i++) {
                for (int word = 0; word < 4; word++)
                    a[g + word % 2 * 8][(t + word / 2 * 4) * PER_WORD + i] = number<KIND>(own->a + word, i);
                for (int word = 0; word < 2; word++) b[g][(t + word * 4) * PER_WORD + i] = number<KIND>(own->b + word, i);
            }
        }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
                float total = 0;
                for (int k = 0; k < K; k++) total += a[row][k] * b[column][k];
                static_cast<Mine*>(all[lane])->sum[i] += total;
            }
    });
}
inline void mma_bf16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_by_warp<Number::BF16>(sum, a, b0, b1); }
inline void mma_f16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_by_warp<Number::F16>(sum, a, b0, b1); }

inline u64 swizzled_tile(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
inline void begin_wgmma() {}
inline void commit_wgmma() {}
template <int>
void await_wgmma() {}

// A number of a swizzled tile in shared memory. K_MAJOR: rows of 128 bytes along k; else rows of 64 along the other side.
template <Number KIND, bool K_MAJOR>
float tile_number(u64 tile, int row, int k) {
    constexpr int SIZE = KIND == Number::E4M3 ? 1 : 2;
    u32 start = static_cast<u32>(tile & 0x3FFF) << 4, leading = static_cast<u32>(tile >> 16 & 0x3FFF) << 4;
    u32 stride = static_cast<u32>(tile >> 32 & 0x3FFF) << 4;
    if (tile >> 62 != 1) gpu::fail("the tile of a wgmma is not swizzled by 128 bytes");
    u32 address = K_MAJOR ? start + row / 8 * stride + row % 8 * 128 + k * SIZE
                          : start + row % 64 * 2 + row / 64 * leading + k % 8 * 128 + k / 8 * stride;
    u32 word = 0;
    std::memcpy(&word, gpu::at(gpu::swizzled(address)), SIZE);
    return number<KIND>(&word, 0);
}

// sum[64, N] (+)= a[64, K] b[N, K]^T by 4 warps. A comes from shared memory or, as mma's, from registers.
template <int N, Number KIND, bool B_K_MAJOR>
void wgmma_by_warpgroup(float* sum, const u32* a_words, u64 a_tile, u64 b_tile, bool add) {
    struct Mine {
        float* sum;
        const u32* a;
        u64 a_tile, b_tile;
        bool add;
    } mine{sum, a_words, a_tile, b_tile, add};
    gpu::warpgroup(&mine, [](void** all) {
        constexpr int K = KIND == Number::E4M3 ? 32 : 16, PER_WORD = K / 8;
        std::vector<float> a(64 * K), b(N * K);
        Mine* first = static_cast<Mine*>(all[0]);
        for (int row = 0; row < N; row++)
            for (int k = 0; k < K; k++) b[row * K + k] = tile_number<KIND, B_K_MAJOR>(first->b_tile, row, k);
        for (int thread = 0; thread < 128; thread++) {
            Mine* own = static_cast<Mine*>(all[thread]);
            if (own->b_tile != first->b_tile || own->a_tile != first->a_tile) gpu::fail("a warpgroup disagrees on its tiles");
            if (!own->a) continue;
            int row = thread / 32 * 16 + thread % 32 / 4, t = thread % 4;
            for (int word = 0; word < 4; word++)
                for (int i = 0; i < PER_WORD; i++)
                    a[(row + word % 2 * 8) * K + (t + word / 2 * 4) * PER_WORD + i] = number<KIND>(own->a + word, i);
        }
        if (!first->a)
            for (int row = 0; row < 64; row++)
                for (int k = 0; k < K; k++) a[row * K + k] = tile_number<KIND, true>(first->a_tile, row, k);
        for (int thread = 0; thread < 128; thread++) {
            Mine* own = static_cast<Mine*>(all[thread]);
            for (int i = 0; i < N / 2; i++) {
                int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + thread % 4 * 2 + i % 2;
                float total = own->add ? own->sum[i] : 0.0f;
                for (int k = 0; k < K; k++) total += a[row * K + k] * b[column * K + k];
                own->sum[i] = total;
            }
        }
    });
}

inline void start_wgmma_n128(float (&sum)[64], u64 a, u64 b) {
    wgmma_by_warpgroup<128, Number::BF16, true>(sum, nullptr, a, b, false);
}
inline void wgmma_n128(float (&sum)[64], u64 a, u64 b) {
    wgmma_by_warpgroup<128, Number::BF16, true>(sum, nullptr, a, b, true);
}
inline void wgmma_n128(float (&sum)[64], const u32* a, u64 b) {
    wgmma_by_warpgroup<128, Number::BF16, false>(sum, a, 0, b, true);
}
inline u64 swizzled_tile_of_rows(u32 address, u32 halves_apart) {
    return swizzled_tile(address) - (1ull << 16) + (static_cast<u64>(halves_apart >> 4) << 16);
}
template <class T, int SIZE>
void keep_in_place(T (&)[SIZE]) {}

// -- global memory --------------------------------------------------------------------------------------------------------

inline int read_int(const int* at) { return *at; }
inline int4 read_ints(const int* at) { return {at[0], at[1], at[2], at[3]}; }
inline uint4 read_words(const void* at) { return *static_cast<const uint4*>(at); }
inline float read_float(const float* at) { return *at; }
inline float4 read_float4(const float* at) { return {at[0], at[1], at[2], at[3]}; }
