// Instructions of Hopper as functions, for all kernels of this folder. No CUDA headers: NVRTC has none, and none are needed.
#pragma once

using bf16 = unsigned short;  // bits
using e4m3 = unsigned char;   // bits
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct alignas(64) TensorMap {
    u64 words[16];
};

#define DEVICE __device__ __forceinline__
// Dynamic shared memory of a CTA, aligned to 1,024 bytes.
#define SHARED_MEMORY(name) extern __shared__ __align__(1024) unsigned char name[]

DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// -- launches that overlap: nothing an earlier kernel wrote may be read before wait_for_previous ------------------------

DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// -- mbarriers ------------------------------------------------------------------------------------------------------------

DEVICE void init_barrier(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// After init_barrier, before anyone else uses them.
DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Once `read`, the last word that the warp has read of what the barrier guards, is there: an arrival may overtake reads that
// are in flight. The address is the barrier's; that a count of bits is below 64 is not known to the assembler.
DEVICE void arrive_having(u64* barrier, u32 read) {
    asm volatile(
        "{ .reg .b32 t; popc.b32 t, %1; shr.b32 t, t, 6; add.u32 t, t, %0; mbarrier.arrive.shared::cta.b64 _, [t]; }" ::"r"(
            shared_address(barrier)),
        "r"(read)
        : "memory");
}
// The one arrival of a producer: the phase ends once so many bytes have come as well.
DEVICE void arrive_expecting(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
DEVICE bool try_wait(u64* barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done;
}
DEVICE void trap() { asm volatile("trap;"); }
// Until the phase of that parity is over. A new barrier is in phase 0: waiting for parity 1 returns at once.
DEVICE void wait(u64* barrier, u32 parity) {
    for (u32 tries = 0; !try_wait(barrier, parity); tries++)
        if (tries > 20000000) trap();  // seconds: a mistake, not a delay
}

// -- copies by the tensor memory accelerator ------------------------------------------------------------------------------

constexpr u64 EVICT_NORMAL = 0x1000000000000000ull;
constexpr u64 EVICT_FIRST = 0x12F0000000000000ull;
constexpr u64 EVICT_LAST = 0x14F0000000000000ull;

// Contiguous bytes: a multiple of 16, both ends aligned to 16.
DEVICE void copy_bulk(void* to, const void* from, u32 bytes, u64* barrier, u64 policy = EVICT_FIRST) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}
DEVICE void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<u64>(map)) : "memory");
}
// The box at (column, row): `column` counts along the innermost dimension.
DEVICE void copy_box(void* to, const TensorMap* map, int column, int row, u64* barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], "
        "[%4], %5;" ::"r"(shared_address(to)),
        "l"(reinterpret_cast<u64>(map)), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}
// Boxes of three, four and five dimensions, innermost first.
DEVICE void copy_box(void* to, const TensorMap* map, int x, int y, int z, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            shared_address(to)),
        "l"(reinterpret_cast<u64>(map)), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
        : "memory");
}
DEVICE void copy_box(void* to, const TensorMap* map, int x, int y, int z, u64* barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
        "l"(reinterpret_cast<u64>(map)), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}
DEVICE void copy_box(void* to, const TensorMap* map, int x, int y, int z, int w, u64* barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(to)),
        "l"(reinterpret_cast<u64>(map)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}
DEVICE void copy_box(void* to, const TensorMap* map, int x, int y, int z, int w, int v, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
        "[%7];" ::"r"(shared_address(to)),
        "l"(reinterpret_cast<u64>(map)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "r"(shared_address(barrier))
        : "memory");
}

// -- order ----------------------------------------------------------------------------------------------------------------

// Shared memory written by ordinary stores, before wgmma or a bulk copy reads it.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void sync_threads(u32 barrier, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// At a barrier of sync_threads, without staying.
DEVICE void arrive_threads(u32 barrier, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// One thread of a warp that is together: as the compiler knows that it is one, it generates no code for others.
DEVICE bool elected() {
    u32 is;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(is));
    return is;
}
DEVICE int sum_of_warp(int value) { return __reduce_add_sync(~0u, value); }
DEVICE int max_of_warp(int value) { return __reduce_max_sync(~0u, value); }
template <int REGISTERS>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// -- matrices -------------------------------------------------------------------------------------------------------------

// Four 8x8 matrices of 16 bits (or 8x16 of 8): lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void load_matrices(u32 (&out)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}
DEVICE void load_matrices_transposed(u32 (&out)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}
// An 8x8 matrix of 16 bits: lane 4 g + t has columns 2 t and 2 t + 1 of row g.
DEVICE u32 transposed(u32 pair) {
    u32 out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}
// sum[16, 8] += a[16, 16] b[16, 8]; b column by column.
DEVICE void mma_bf16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_f16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// wgmma reads shared memory in tiles of 8 rows of 128 bytes, swizzled as TMA writes them: rows 128 bytes apart, groups of
// 8 rows 1,024 bytes apart. The tile begins at a multiple of 1,024; within its 128 bytes, step by adding bytes to `address`.
DEVICE u64 swizzled_tile(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
DEVICE void begin_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void await_wgmma() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define EIGHT_OPERANDS(how, x, i) \
    how(x[i]), how(x[i + 1]), how(x[i + 2]), how(x[i + 3]), how(x[i + 4]), how(x[i + 5]), how(x[i + 6]), how(x[i + 7])
#define SIXTY_FOUR_OPERANDS(how, x) \
    EIGHT_OPERANDS(how, x, 0), EIGHT_OPERANDS(how, x, 8), EIGHT_OPERANDS(how, x, 16), EIGHT_OPERANDS(how, x, 24), \
        EIGHT_OPERANDS(how, x, 32), EIGHT_OPERANDS(how, x, 40), EIGHT_OPERANDS(how, x, 48), EIGHT_OPERANDS(how, x, 56)
#define WGMMA_N128 \
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
    "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
    "%62, %63}"

// sum = a b^T, or sum += a b^T: a [64, 16] and b [128, 16] in shared memory, the 16 innermost.
DEVICE void start_wgmma_n128(float (&sum)[64], u64 a, u64 b) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 0, 0; " WGMMA_N128 ", %64, %65, p, 1, 1, 0, 0; }"
                 : SIXTY_FOUR_OPERANDS("=f", sum)
                 : "l"(a), "l"(b));
}
DEVICE void wgmma_n128(float (&sum)[64], u64 a, u64 b) {
    asm volatile(WGMMA_N128 ", %64, %65, 1, 1, 1, 0, 0;" : SIXTY_FOUR_OPERANDS("+f", sum) : "l"(a), "l"(b));
}
// sum += a b: a [64, 16] in registers, b [16, 128] in shared memory, the 128 innermost in two tiles of 64.
DEVICE void wgmma_n128(float (&sum)[64], const u32* a, u64 b) {
    asm volatile(WGMMA_N128 ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : SIXTY_FOUR_OPERANDS("+f", sum)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// The tile of that last b: its halves so many bytes apart.
DEVICE u64 swizzled_tile_of_rows(u32 address, u32 halves_apart) {
    return swizzled_tile(address) - (1ull << 16) + (static_cast<u64>(halves_apart >> 4) << 16);
}
// Registers that a wgmma in flight reads or writes stay unchanged until here.
template <int SIZE>
DEVICE void keep_in_place(float (&values)[SIZE]) {
#pragma unroll
    for (int i = 0; i < SIZE; i++) asm volatile("" : "+f"(values[i])::"memory");
}
template <int SIZE>
DEVICE void keep_in_place(u32 (&values)[SIZE]) {
#pragma unroll
    for (int i = 0; i < SIZE; i++) asm volatile("" : "+r"(values[i])::"memory");
}

// -- numbers --------------------------------------------------------------------------------------------------------------

DEVICE float from_bf16(bf16 value) { return __uint_as_float(static_cast<u32>(value) << 16); }
DEVICE float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_bf16(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
DEVICE bf16 to_bf16(float value) {
    bf16 out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
    return out;
}
DEVICE u32 pack_bf16(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
DEVICE u32 pack_f16(float low, float high) {
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
// Two e4m3 numbers, low byte first, as two float16.
DEVICE u32 f16_of_e4m3(unsigned short pair) {
    u32 out;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(pair));
    return out;
}
// What is beyond 448 becomes 448.
DEVICE unsigned short pack_e4m3(float low, float high) {
    unsigned short out;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
    return out;
}
// Never fused with an addition.
DEVICE float rounded_product(float a, float b) { return __fmul_rn(a, b); }
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float inverse_root_approx(float x) {
    float out;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
// To 2^-11 of the result.
DEVICE float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The larger of each of two unsigned numbers of 16 bits.
DEVICE u32 larger_halves(u32 a, u32 b) {
    u32 out;
    asm("max.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

// -- global memory that other CTAs write and read at the same time -----------------------------------------------------------

DEVICE uint4 poll(const void* place) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(place)
                 : "memory");
    return v;
}
DEVICE u32 poll_word(const void* place) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(place) : "memory");
    return v;
}
DEVICE void put_half(void* place, unsigned short value) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(place), "h"(value) : "memory");
}
// Seen by others only after everything this thread has written, and whoever sees it sees that.
DEVICE void put_after_all(void* place, u32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(place), "r"(value) : "memory");
}
DEVICE void put_word(void* place, u32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(place), "r"(value) : "memory");
}
DEVICE u64 poll_long(const void* place) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(place) : "memory");
    return v;
}
DEVICE void put_long(void* place, u64 value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(place), "l"(value) : "memory");
}
// From L2: what another SM may have written.
DEVICE int read_int(const int* at) {
    int out;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(out) : "l"(at) : "memory");
    return out;
}
DEVICE int4 read_ints(const int* at) {
    int4 out;
    asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
                 : "l"(at)
                 : "memory");
    return out;
}
DEVICE uint4 read_words(const void* at) {
    uint4 out;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
                 : "l"(at)
                 : "memory");
    return out;
}
DEVICE float read_float(const float* at) {
    float out;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(out) : "l"(at) : "memory");
    return out;
}
DEVICE float4 read_float4(const float* at) {
    float4 out;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w)
                 : "l"(at)
                 : "memory");
    return out;
}

// -- global memory that nobody writes ---------------------------------------------------------------------------------------

DEVICE uint4 load_once(const void* place) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(place));
    return v;
}
DEVICE void prefetch_line(u64 address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }
